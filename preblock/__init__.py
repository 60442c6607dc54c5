"""Preblock: the part of a transformer before its first block."""

from typing import TYPE_CHECKING

__all__ = ["__version__", "connect", "connect_async"]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from preblock.client import connect, connect_async
else:

    def __getattr__(name: str) -> object:
        """Import the client on first use, so that `serve` and `export` start without its imports."""
        if name not in ("connect", "connect_async"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from preblock import client

        return getattr(client, name)
