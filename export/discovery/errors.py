"""The error of an unknown front-end."""

from preblock.models.checkpoints.weight_files import CheckpointError


class DiscoveryError(CheckpointError):
    """The front-end of a checkpoint was not found.

    Args:
        cause: description of the failure.
        advice: next step, shown only if no reason is known for the model type; default none.

    """

    def __init__(self, cause: str, advice: str = "") -> None:
        super().__init__(f"{cause}: {advice}" if advice else cause)
        self.cause = cause


class MissingTensorError(DiscoveryError):
    """The checkpoint lacks a tensor of the front-end."""
