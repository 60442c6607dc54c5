"""The errors of an export."""


class ExportError(Exception):
    """The export failed. The message is one line with the reason."""


class ParityError(ExportError):
    """A graph differs from its PyTorch module."""
