"""The progress of the models' loading at the start."""

from dataclasses import dataclass


@dataclass
class Progress:
    """Written by the loader, read by the server of the start.

    Args:
        ready: versions of models, opened and run once.
        of: versions in all; 0 before the folder was read.
        model: name of the model in progress; None before the first and after the last.

    """

    ready: int = 0
    of: int = 0
    model: str | None = None
