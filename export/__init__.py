"""From a front-end to a proven artifact in a repository."""

from typing import TYPE_CHECKING

from preblock.models.torch_import import import_torch

if TYPE_CHECKING:
    from preblock.export.own_modules.module import export_module

__all__ = ["export_module"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the function on first use: it needs torch, and the rest of the package does not."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import_torch(f"preblock.export.{name}")
        from preblock.export.own_modules import module

        return getattr(module, name)
