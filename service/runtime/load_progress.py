"""How far a service that starts is."""

from dataclasses import dataclass


@dataclass
class Progress:
    """Written by who opens the models, read by who is asked meanwhile.

    Args:
        ready: versions of models that were opened and run once.
        of: versions that are to be; 0 before the folder was read.
        model: which one is being opened; None before the first and after the last.

    """

    ready: int = 0
    of: int = 0
    model: str | None = None
