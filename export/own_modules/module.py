"""Exports a PyTorch module: one of `preblock.models`, or somebody's own."""

from pathlib import Path

import torch
from torch import nn

from preblock.export.errors import ExportError
from preblock.export.exporter import ExportResult, export_loaded
from preblock.export.source import AnyFrontEnd, LoadedSource
from preblock.models.config_check import check_described, check_stem
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.models.frontend import FrontEnd
from preblock.models.modules.stems import Stem
from preblock.service.artifacts.manifest import Source


def export_module(
    module: nn.Module,
    name: str,
    repository: str | Path,
    *,
    vocab_size: int | None = None,
    max_len: int | None = None,
    exact: bool = False,
) -> ExportResult:
    """Export a module as the next version of `name` in `repository`, and prove its graph equal to it.

    A module of `preblock.models` is described in the artifact, so `verify` can repeat the proof. The artifact of
    any other module does not describe it, so `verify` checks its hashes alone. The training modes stay as they are.

    Args:
        module: a `FrontEnd` or a stem; or any other module, as in `CustomFrontEnd`.
        name: name of the model.
        repository: folder of the models; created if missing.
        vocab_size: legal ids are 0 to V - 1; only for other modules, and required for them.
        max_len: the largest legal offset + tokens; only for other modules, and required for them.
        exact: whether the graph must equal another module bit for bit; default False.

    Raises:
        ExportError: the module returns no vectors, the graph is not equal to it, an argument is missing or needless,
            or a file cannot be written.

    """
    given: object = module
    if not isinstance(given, nn.Module):
        got = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise ExportError(f"module: got {got}, expected an instance of torch.nn.Module")
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        frontend = _front_end_of(module, vocab_size, max_len, exact)
        return export_loaded(LoadedSource(frontend, Source(kind="module")), name, Path(repository))
    except ValueError as error:
        raise ExportError(str(error)) from error
    finally:
        for part, training in modes:
            part.training = training


def _front_end_of(module: nn.Module, vocab_size: int | None, max_len: int | None, exact: bool) -> AnyFrontEnd:
    """Return a module of `preblock.models` as data or as a stem, and any other one as a custom front-end."""
    given = {"vocab_size": vocab_size, "max_len": max_len, "exact": exact or None}
    if isinstance(module, FrontEnd | Stem):
        for argument, value in given.items():
            if value is not None:
                kind = type(module).__name__
                raise ExportError(f"{argument}: got {value}, expected nothing, because a {kind} has its own")
        for name, weight in module.named_parameters():
            if weight.dtype != torch.float32 or weight.device.type != "cpu":
                got = f"{weight.dtype} on {weight.device}"
                raise ExportError(f"{name}: got {got}, expected torch.float32 on cpu; module.float().cpu() converts it")
        if isinstance(module, Stem):
            check_stem(module)
            return module
        check_described(module)
        return module.data()
    if vocab_size is None or max_len is None:
        missing = "vocab_size" if vocab_size is None else "max_len"
        raise ExportError(
            f"{missing}: got nothing, expected a number, because a {type(module).__name__} does not state it"
        )
    return CustomFrontEnd(module, vocab_size, max_len, exact)
