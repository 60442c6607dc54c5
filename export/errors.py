"""The errors of an export."""


class ExportError(Exception):
    """The export failed. The message is one line with the reason."""


class ParityError(ExportError):
    """A graph differs from its reference."""


class UnrepeatableError(ExportError):
    """The hashes agree, but the artifact does not describe its module: the proof of the export cannot be repeated."""
