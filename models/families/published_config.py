"""`config.json` of a published model."""

from collections.abc import Mapping
from typing import Any

ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("d_model", "n_embd"), "hidden_size"),
    "hidden_size": "n_embed",
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), "num_attention_heads"),
    **dict.fromkeys(("n_positions", "context_length"), "max_position_embeddings"),
}
"""Key -> its other name in the library, which a file may have in its place."""


class Config:
    """`config.json`, with the library's defaults for keys missing from older files.

    Args:
        values: content of the file.
        segments: the caller chose segments, in families with optional ones; default False.

    """

    def __init__(self, values: Mapping[str, Any], segments: bool = False) -> None:
        self._values, self.segments = values, segments
        self.last = ""
        """The last requested key."""

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default if the key and its alias are absent or null.

        Raises:
            ValueError: key and alias have different values.

        """
        self.last = key
        alias = ALIASES.get(key, "")
        value, other = self._values.get(key), self._values.get(alias)
        if value is not None and other is not None and other != value:
            raise ValueError(f"{alias} is {other!r}, understood is {value!r}, as {key}")
        found = other if value is None else value
        return default if found is None else found

    def nullable(self, key: str, default: Any) -> Any:
        """Return a value, None if it is null, or the default if the key is absent: null has a meaning of its own."""
        return self._values.get(key, default)
