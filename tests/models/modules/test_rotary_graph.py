"""Rotary modules exported to ONNX, against the modules."""

import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from tests.models.modules.published_rotary import CONFIGS, EACH_SCALING, FAR, IDS, Layout


class Angles(nn.Module):
    """With the inputs of a graph."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(config)

    def forward(self, input_ids: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.rotary(input_ids, offset=offset)
        return found


class Turned(nn.Module):
    """Queries, turned inside the graph."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.rotary, self.layout = RotaryEmbedding(CONFIGS["default"]), layout

    def forward(self, query: Tensor, offset: Tensor) -> Tensor:
        cos, sin = self.rotary(query[:, 0], offset=offset)
        return rotate(query, cos, sin, self.layout)


def session(module: nn.Module, x: Tensor, shapes: tuple[object, ...]) -> onnxruntime.InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        program = torch.onnx.export(
            module,
            (x, torch.zeros(1, dtype=torch.int64)),
            dynamo=True,
            opset_version=20,
            dynamic_shapes=shapes,
            verbose=False,
        )
    assert program is not None
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString())


@EACH_SCALING
def test_exported_rotary_graph_equals_module(config: RotaryConfig) -> None:
    batch, length, offsets = (torch.export.Dim(name) for name in ("batch", "length", "offsets"))
    graph = session(Angles(config), IDS, ({0: batch, 1: length}, {0: offsets}))
    module = RotaryEmbedding(config)
    # One unit in the last place below the largest value: 6e-8 for a factor of 1 on cos and sin.
    unit = np.spacing(np.nextafter(np.float32(module.attention_factor), np.float32(0)))
    for size, starts in (
        (1, [0]),
        (1, [FAR - 1]),
        (700, [0]),
        (700, [5, 4000, 100_000]),
        (9000, [FAR - 9000]),
        (0, [2]),
    ):
        ids, offset = torch.zeros((len(starts), size), dtype=torch.int64), torch.tensor(starts)
        found: list[NDArray[np.float32]] = graph.run(None, {"input_ids": ids.numpy(), "offset": offset.numpy()})
        for a, b in zip(found, module(ids, offset=offset), strict=True):
            assert a.shape == b.shape == (len(starts), size, 32)
            assert np.abs(a - b.numpy()).max(initial=0) <= unit


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_exported_rotate_graph_equals_module(layout: Layout) -> None:
    torch.manual_seed(0)
    batch, length = (torch.export.Dim(name) for name in ("batch", "length"))
    module, query = Turned(layout), torch.randn(3, 4, 40, 48)
    graph = session(module, query[:2], ({0: batch, 2: length}, None))
    offset = torch.tensor([9000])
    found = graph.run(None, {"query": query.numpy(), "offset": offset.numpy()})[0]
    assert np.abs(found - module(query, offset).numpy()).max() < 1e-6
