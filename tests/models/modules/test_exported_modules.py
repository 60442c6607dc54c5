"""Modules exported to ONNX, against the modules. Those with the same inputs share a graph."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from preblock.models.modules.alibi import AlibiBias
from preblock.models.modules.grid import FactorisedGridEncoding, LearnedGridEncoding, SinusoidalGridEncoding
from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.relative_positions import RelativeSinusoid, T5RelativeBias
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from tests.models.modules.graphs import graph_of, session_of
from tests.models.modules.published_rotary import CONFIGS, FAR, IDS

AUTO, D = torch.export.Dim.AUTO, 16


class Positions(nn.Module):
    """Modules of positions, each with the arguments that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.hybrid, self.other_base = HybridPositionalEncoding(D, 4), HybridPositionalEncoding(D, 4, base=12345.678)
        self.levels = HierarchicalPositionalEncoding(D, {"sentence": 2, "word": 4})
        self.grids = nn.ModuleList(kind(D, 2, 4) for kind in GRIDS)

    def forward(self, x: Tensor, offset: Tensor, position_ids: Tensor, cells: Tensor) -> tuple[Tensor, ...]:
        found = (self.hybrid(x, offset=offset), self.other_base(x, position_ids), self.levels(x, cells))
        return (*found, *(grid(x, cells) for grid in self.grids))


GRIDS = (LearnedGridEncoding, SinusoidalGridEncoding, FactorisedGridEncoding)


def run(graph: Any, feeds: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = graph.run(None, {name: np.asarray(value) for name, value in feeds.items()})
    return found


def inputs_of(batch: int, length: int, offset: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(batch, length, D),
        "offset": torch.tensor([offset]),
        "position_ids": torch.randint(10**6, (batch, length)) * torch.randint(2, (batch, length)),
        "cells": torch.stack((torch.randint(2, (batch, length)), torch.randint(4, (batch, length))), dim=-1),
    }


def test_exported_positions_equal_modules() -> None:
    torch.manual_seed(0)
    module, sample = Positions().eval(), inputs_of(2, 3, 2)
    axes = {"x": {0: AUTO, 1: AUTO}, "offset": {}, "position_ids": {0: AUTO, 1: AUTO}, "cells": {0: AUTO, 1: AUTO}}
    graph = session_of(graph_of(module, sample, axes))
    for feeds in (sample, inputs_of(1, 1, 3), inputs_of(5, 7, 0)):
        for found, expected in zip(run(graph, feeds), module(**feeds), strict=True):
            assert np.array_equal(found, expected.detach().numpy())


class Rotary(nn.Module):
    """Angles of every scaling, and queries turned inside the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scalings = nn.ModuleList(map(RotaryEmbedding, CONFIGS.values()))

    def forward(self, input_ids: Tensor, offset: Tensor, query: Tensor, start: Tensor) -> list[Tensor]:
        cos, sin = self.scalings[0](query[:, 0], offset=start)
        turned = [rotate(query, cos, sin, "half"), rotate(query, cos, sin, "interleaved")]
        return [*turned, *(part for scaling in self.scalings for part in scaling(input_ids, offset=offset))]


def test_exported_rotary_modules_equal_modules() -> None:
    torch.manual_seed(0)
    module = Rotary()
    # One unit in the last place below the largest value: 6e-8 for a factor of 1 on cos and sin.
    factors = [np.float32(RotaryEmbedding(config).attention_factor) for config in CONFIGS.values() for _ in range(2)]
    allowed = [1e-6, 1e-6, *(np.spacing(np.nextafter(factor, np.float32(0))) for factor in factors)]
    sample = {"input_ids": IDS, "offset": IDS[0, :1], "query": torch.randn(2, 4, 5, 48), "start": IDS[0, :1]}
    axes = {"input_ids": {0: AUTO, 1: AUTO}, "offset": {0: AUTO}, "query": {0: AUTO, 2: AUTO}, "start": {}}
    graph = session_of(graph_of(module, sample, axes))
    for length, starts in ((1, [0]), (1, [FAR - 1]), (700, [5, 4000, 100_000]), (9000, [FAR - 9000]), (0, [2])):
        feeds = {
            "input_ids": torch.zeros((len(starts), length), dtype=torch.int64),
            "offset": torch.tensor(starts),
            "query": torch.randn(3, 4, 40, 48),
            "start": torch.tensor([9000]),
        }
        for found, expected, unit in zip(run(graph, feeds), module(**feeds), allowed, strict=True):
            assert found.shape == expected.shape
            assert np.abs(found - expected.numpy()).max(initial=0) <= unit, (length, starts)


class Biases(nn.Module):
    """Attention by distance, in both directions and in one."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.ModuleList([AlibiBias(12), T5RelativeBias(4), T5RelativeBias(4, bidirectional=False)])
        self.sinusoids = nn.ModuleList(
            RelativeSinusoid(16, clamp, side) for clamp in (None, 5) for side in (True, False)
        )

    def forward(self, query_offset: int, query_length: int, key_length: int) -> list[Tensor]:
        biases = [bias(query_offset, query_length, key_length) for bias in self.biases]
        return [*biases, *(sinusoid(query_length, key_length) for sinusoid in self.sinusoids)]


def test_exported_biases_equal_modules() -> None:
    module, names = Biases(), ("query_offset", "query_length", "key_length")
    sample = dict(zip(names, (5, 3, 8), strict=True))
    graph = session_of(graph_of(module, sample, dict.fromkeys(names, torch.export.Dim.DYNAMIC)))
    for lengths in ((5, 3, 8), (0, 1, 1), (0, 9, 9), (3000, 1, 3001), (100, 300, 2500), (4, 0, 4), (4, 2, 0)):
        found = run(graph, dict(zip(names, lengths, strict=True)))
        tolerances = (0.0,) * 3 + (1.2e-7,) * 4
        for got, expected, tolerance in zip(found, module(*lengths), tolerances, strict=True):
            np.testing.assert_allclose(got, expected.detach().numpy(), rtol=0, atol=tolerance, err_msg=str(lengths))
