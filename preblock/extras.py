"""The extras of the package. The base install imports this module, so it imports no package."""

from collections.abc import Iterable
from importlib.util import find_spec

EXTRAS = {
    "export": ("cpu", "export"),
    "verify": ("cpu", "export"),
    "convert": ("cpu", "export"),
    "families": ("export",),
    "list": ("service",),
    "inspect": ("service",),
    "plot": ("cpu", "plot"),
    "check": ("cpu",),
    "remove": ("service",),
    "key": ("service",),
    "settings": ("service",),
    "serve": ("cpu",),
    "bench": ("service",),
}
"""The extras that each command needs. `cpu`, `gpu`, `export` and `plot` contain `service`."""
_MODULES = {"cpu": "onnxruntime", "export": "onnx", "torch": "torch", "plot": "matplotlib", "service": "fastapi"}
"""A module of each extra, which its other modules accompany."""


def find_missing(extras: Iterable[str]) -> dict[str, str]:
    """Return those of `extras` that are not installed, each with the missing module."""
    return {extra: _MODULES[extra] for extra in extras if find_spec(_MODULES[extra]) is None}


def write_hint(extras: Iterable[str]) -> str:
    """Return the command that installs `extras`."""
    names = ",".join(extras)
    gpu = " (gpu instead of cpu for an NVIDIA GPU)" if "cpu" in names else ""
    return f"pip install 'preblock[{names}]'{gpu}"
