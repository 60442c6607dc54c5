"""Modules whose values follow from their sizes: they are no state, and keep their bits in a module of another type."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from preblock.models.modules.alibi import AlibiBias
from preblock.models.modules.relative_positions import RelativeSinusoid
from preblock.models.modules.rotary_embedding import RotaryEmbedding
from preblock.models.modules.sinusoids import Sinusoid
from tests.models.modules.published_rotary import CONFIGS, IDS

DERIVED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "alibi": (lambda: AlibiBias(12), lambda module: module(0, 9, 9)),
    "relative sinusoid": (lambda: RelativeSinusoid(8), lambda module: module(2, 3000)),
    "rotary": (lambda: RotaryEmbedding(CONFIGS["llama3"]), lambda module: torch.stack(module(IDS, offset=10_000))),
    "sinusoid": (lambda: Sinusoid(64), lambda module: module(torch.tensor([3, 10**6]))),
}


def test_derived_values_are_no_state_and_stay_float32() -> None:
    for name, (build, call) in DERIVED.items():
        module, expected = build(), call(build())
        assert (list(module.parameters()), module.state_dict()) == ([], {}), name
        for dtype in (torch.bfloat16, torch.float64):
            assert torch.equal(call(build().to(dtype)), expected), name
        module.to("meta")
        assert {buffer.device.type for buffer in module.buffers()} <= {"meta"}, name
        assert torch.equal(call(module.to_empty(device="cpu")), expected), name


def test_rotary_and_sinusoids_are_built_on_meta_with_values() -> None:
    for name in ("rotary", "sinusoid"):
        build, call = DERIVED[name]
        with torch.device("meta"):
            module = build()
        assert torch.equal(call(module), call(build())), name
