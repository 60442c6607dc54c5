"""Readers of the numbers of presets and of the modules of `preblock.models`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from preblock.plots.source import Floats, PlotSource, rotary_wavelengths, sinusoid_wavelengths
from preblock.service.core.errors import Invalid

if TYPE_CHECKING:
    from torch import Tensor, nn

    from preblock.models import FrontEnd


def read_preset(name: str) -> PlotSource:
    """Build a preset and read it.

    Raises:
        Invalid: `name` is no preset.

    """
    from preblock.models.frontend import FrontEnd
    from preblock.models.presets import PRESETS, preset_data

    if name not in PRESETS:
        raise Invalid("preset", repr(name), ", ".join(PRESETS))
    return read_module(FrontEnd.from_data(preset_data(name)), name)


def read_module(module: "nn.Module", name: str | None = None) -> PlotSource:
    """Read a module of `preblock.models`: a front-end, a table of tokens, an encoding of positions, or a bias.

    Args:
        module: it is read on the CPU, and its dropout does not count.
        name: for titles and errors; default the name of its class.

    Raises:
        Invalid: the module is of another kind.

    """
    from preblock import models

    name = name or type(module).__name__
    parameters = {key.removesuffix(".weight"): value.numel() for key, value in module.named_parameters()}
    match module:
        case models.FrontEnd():
            return _read_frontend(module, name, parameters)
        case models.TokenEmbedding():
            rows = len(module.weight)
            return PlotSource(name=name, tokens=_read_tokens(module), vocab_size=rows, parameters=parameters)
        case models.LearnedPositionalEncoding():
            read = _read_positions(module, module.weight.shape[1])
            return PlotSource(name=name, positions=read, max_len=module.max_len, parameters=parameters)
        case models.SinusoidalPositionalEncoding() | models.HybridPositionalEncoding():
            sinusoid = module.sinusoid
            turns = sum(part.double().numpy() for part in sinusoid.turns)
            return PlotSource(
                name=name,
                positions=_read_positions(module, sinusoid.d_model),
                wavelengths={"positions": 1 / np.asarray(turns)},
                parameters=parameters,
            )
        case models.LearnedGridEncoding() | models.SinusoidalGridEncoding() | models.FactorisedGridEncoding():
            cells = module.height * module.width
            return PlotSource(name=name, positions=_read_cells(module, cells), max_len=cells, parameters=parameters)
        case models.RotaryEmbedding():
            frequencies = module.frequencies.double().numpy(force=True)
            turning = frequencies[frequencies != 0]
            return PlotSource(name=name, wavelengths={"rotary": 2 * np.pi / turning}, parameters=parameters)
        case models.AlibiBias() | models.T5RelativeBias():
            return PlotSource(name=name, bias=_read_bias(module), parameters=parameters)
    allowed = "a front-end, TokenEmbedding, an encoding of positions, RotaryEmbedding, AlibiBias or T5RelativeBias"
    raise Invalid("module", type(module).__name__, allowed)


def _read_frontend(frontend: "FrontEnd", name: str, parameters: dict[str, int]) -> PlotSource:
    import torch

    from preblock.models import AlibiBias, T5RelativeBias
    from preblock.models.steps import Positions

    config = frontend.config
    positions: Callable[[int, int], Floats] | None = None
    wavelengths: dict[str, NDArray[np.float64]] = {}
    for step, width in zip(config.steps[1:], config.widths, strict=False):
        if isinstance(step, Positions):
            positions = _read_positions(frontend.positions, width, step.first)
            wavelengths |= sinusoid_wavelengths(config.to_document(), width)
    first = torch.zeros((1, 1), dtype=torch.int64)
    outputs = {
        key: value[0, 0].numpy(force=True) for key, value in frontend.rotary_outputs(first, 1, rounded=False).items()
    }
    for output in config.rotary:
        cos, sin = (outputs[name] for name in output.names)
        wavelengths[output.named("rotary").replace("_", " ")] = rotary_wavelengths(cos, sin, output.config.dim)
    bias = frontend.bias if config.bias is not None else None
    return PlotSource(
        name=name,
        positions=positions,
        max_len=config.max_len,
        tokens=_read_tokens(frontend.look_up),
        vocab_size=config.tokens.rows,
        wavelengths=wavelengths,
        bias=_read_bias(bias) if isinstance(bias, AlibiBias | T5RelativeBias) else None,
        parameters=parameters,
    )


def _read_tokens(look_up: "Callable[[Tensor], Tensor]") -> Callable[[NDArray[np.int64]], Floats]:
    import torch

    def read(ids: NDArray[np.int64]) -> Floats:
        return _to_numpy(look_up(torch.from_numpy(ids)[None])[0])

    return read


def _read_positions(module: "nn.Module", width: int, offset: int = 0) -> Callable[[int, int], Floats]:
    """Return the function of position rows: those that `module` adds to zeros, from the row `offset` on."""
    import torch

    def read(first: int, count: int) -> Floats:
        rows = torch.arange(first, first + count)[None] + offset
        training = module.training
        try:
            return _to_numpy(module.eval()(torch.zeros(1, count, width), position_ids=rows)[0])
        finally:
            module.train(training)

    return read


def _read_cells(module: "nn.Module", cells: int) -> Callable[[int, int], Floats]:
    """Return the function of the rows of a grid, cell after cell."""
    import torch

    def read(first: int, count: int) -> Floats:
        return _to_numpy(module(torch.zeros((1, cells), dtype=torch.int64))[0])[first : first + count]

    return read


def _read_bias(module: "nn.Module") -> Callable[[int], Floats]:
    return lambda length: _to_numpy(module(0, length, length)[0])


def _to_numpy(values: "Tensor") -> Floats:
    numbers: Floats = values.detach().float().numpy(force=True)
    return numbers
