"""The error of a front-end that was not found."""

from preblock.models.checkpoints.weight_files import CheckpointError


class DiscoveryError(CheckpointError):
    """The front-end of a checkpoint was not found; the message says what was tried."""
