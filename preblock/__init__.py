"""Preblock serves the front-end of a transformer: token ids in, the vectors entering block 0 out."""

from typing import TYPE_CHECKING

__all__ = ["__version__", "connect", "connect_async"]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from preblock.client import connect, connect_async
else:

    def __getattr__(name: str) -> object:
        """Import the client on first use, to keep its imports out of `serve` and `export`."""
        if name not in ("connect", "connect_async"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from preblock import client

        return getattr(client, name)

    def __dir__() -> list[str]:
        """List the client's names too, for completion."""
        return sorted({*globals(), *__all__})
