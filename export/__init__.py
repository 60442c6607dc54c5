"""From a front-end to a proven artifact in a repository."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preblock.export.exporter import export_module

__all__ = ["export_module"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the exporter on first use: the other modules of this package do not need it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from preblock.export import exporter

        return getattr(exporter, name)
