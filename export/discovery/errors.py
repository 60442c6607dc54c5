"""The error of an unknown front-end."""

from preblock.models.checkpoints.weight_files import CheckpointError


class DiscoveryError(CheckpointError):
    """The front-end of a checkpoint was not found.

    Args:
        cause: what was found in its place.
        advice: for a model type without a known reason; default none.

    """

    def __init__(self, cause: str, advice: str = "") -> None:
        super().__init__(f"{cause}: {advice}" if advice else cause)
        self.cause = cause


class MissingTensorError(DiscoveryError):
    """The checkpoint lacks a tensor of the front-end."""
