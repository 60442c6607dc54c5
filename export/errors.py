"""What an export can end in."""


class ExportError(Exception):
    """An export that cannot be done. The message is one line and says why."""


class ParityError(ExportError):
    """A graph that does not equal its PyTorch module."""
