"""The error of an unknown front-end."""

from preblock.models.checkpoints.weight_files import CheckpointError


class DiscoveryError(CheckpointError):
    """The front-end of a checkpoint was not found; the message lists the attempts."""


class MissingTensorError(DiscoveryError):
    """The checkpoint lacks a tensor of the front-end."""
