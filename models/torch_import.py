"""PyTorch itself: imported late, with the extra to install where it is missing."""

from importlib import import_module
from typing import Any


class MissingTorchError(ModuleNotFoundError):
    """torch is not installed; the message names the extra to install."""


def import_torch(purpose: str) -> Any:
    """Return the module torch.

    Args:
        purpose: what needs it, for the message.

    Raises:
        MissingTorchError: torch is not installed.

    """
    try:
        return import_module("torch")
    except ModuleNotFoundError as error:
        raise MissingTorchError(f"{purpose} needs torch: pip install 'preblock[torch]'", name="torch") from error
