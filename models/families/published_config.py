"""`config.json` of a published model."""

from collections.abc import Mapping
from typing import Any


class Config:
    """`config.json`, with the library's defaults for keys missing from older files.

    Args:
        values: content of the file.
        segments: the caller chose segments, in families with optional ones; default False.

    """

    def __init__(self, values: Mapping[str, Any], segments: bool = False) -> None:
        self._values, self.segments = values, segments
        self.missing: list[str] = []
        """Requested keys without a value and without a default."""

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default if the key is absent or null."""
        value = self._values.get(key)
        if value is None and default is None:
            self.missing.append(key)
        return default if value is None else value

    def nullable(self, key: str, default: Any) -> Any:
        """Return a value, None if it is null, or the default if the key is absent: null has a meaning of its own."""
        return self._values.get(key, default)
