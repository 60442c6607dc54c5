"""The graph of a pairwise bias, in a bare onnxruntime, against the modules of transformers and inside them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from preblock.export.description import describe_graph
from preblock.export.errors import ParityError
from preblock.export.outputs import OUTPUTS, write_graphs
from preblock.export.parity_cases import BIAS_GRID
from preblock.export.reference import NumpyReference
from preblock.export.torch_reference import TorchReference
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.bias import AlibiConfig, BiasConfig, RelativeSinusoidConfig, T5Config
from preblock.models.steps import Tokens
from preblock.service.artifacts.names import BIAS_GRAPH
from preblock.service.runtime.session import Session
from tests.clients.client_matrix import check_standard
from tests.families.bias_models import BIASED, HEADS, save

CONFIGS: dict[str, BiasConfig] = {
    "alibi query": AlibiConfig(heads=12),
    "alibi first": AlibiConfig(heads=12, anchor="first"),
    "alibi last": AlibiConfig(heads=12, anchor="last", recipe="float32_reciprocals"),
    "alibi bfloat16": AlibiConfig(
        heads=71, anchor="first", recipe="float32_powers", arithmetic="bfloat16", divisor=8**0.5
    ),
    **{
        f"t5 {buckets} {longest} {both}": T5Config(
            heads=HEADS, buckets=buckets, max_distance=longest, bidirectional=both
        )
        for buckets, longest in ((32, 128), (4, 3), (64, 20000))
        for both in (True, False)
    },
    **{
        f"sinusoid {clamp} {both}": RelativeSinusoidConfig(width=16, clamp_len=clamp, bidirectional=both)
        for clamp in (None, 5)
        for both in (True, False)
    },
}
ALIBI, SINUSOID = AlibiConfig(heads=12), RelativeSinusoidConfig(width=16, clamp_len=None, bidirectional=True)


def frontend_with(bias: BiasConfig) -> FrontEnd:
    """Return a front-end of two ids with `bias`."""
    return FrontEnd(FrontEndConfig(family="x", steps=(Tokens(rows=2, width=2),), max_len=None, bias=bias))


def session_of(frontend: FrontEnd, folder: Path) -> Session:
    """Write the graphs of a front-end, and return the session of its bias."""
    write_graphs(frontend.data(), folder)
    return Session(folder, graph=BIAS_GRAPH)


@pytest.mark.parametrize("name", CONFIGS)
def test_bias_graph_matches_module_and_standard(name: str, tmp_path: Path) -> None:
    """The modules are compared with transformers in tests/models/modules."""
    frontend = frontend_with(CONFIGS[name])
    session, alone = session_of(frontend, tmp_path), name.startswith("sinusoid")
    whole = [(offset, queries, keys)[alone:] for offset, queries, keys in BIAS_GRID]
    for reference in (TorchReference(frontend), NumpyReference(frontend.data())):
        (parity,) = OUTPUTS[BIAS_GRAPH].prove(reference, session).values()
        assert [tuple(case.arguments.values()) for case in parity.cases] == whole
        assert parity.max_abs <= (2.0**-23 if alone else 0)
    check_standard(tmp_path)
    graph = describe_graph(tmp_path / BIAS_GRAPH)
    lengths = [(length, "int64", (1,)) for length in ("query_offset", "query_length", "key_length")]
    assert [(spec.name, spec.dtype, spec.shape) for spec in graph.inputs] == lengths[alone:]
    heads = getattr(CONFIGS[name], "heads", None)
    output = ("relative_positions", ("rows", 16)) if alone else ("bias", (1, heads, "query_length", "key_length"))
    assert [(spec.name, spec.shape) for spec in graph.outputs] == [output]
    model = onnx.load(tmp_path / BIAS_GRAPH, load_external_data=False).graph
    assert {tensor.name for tensor in model.initializer} <= {name for node in model.node for name in node.input}
    assert not any(tensor.external_data for tensor in model.initializer)


@pytest.mark.parametrize(
    ("exported", "other"),
    [
        (ALIBI, replace(ALIBI, anchor="first")),
        (ALIBI, replace(ALIBI, divisor=1 + 1e-6)),
        (CONFIGS["t5 32 128 True"],) * 2,
        (SINUSOID, replace(SINUSOID, clamp_len=4999)),
        (SINUSOID, replace(SINUSOID, bidirectional=False)),
    ],
    ids=["anchor", "divisor", "weight", "clamp_len", "direction"],
)
def test_bias_graph_of_other_parameters_fails_proof(exported: BiasConfig, other: BiasConfig, tmp_path: Path) -> None:
    session = session_of(frontend_with(exported), tmp_path)
    with pytest.raises(ParityError, match=r"of the graph differs from its reference by .* at query_"):
        OUTPUTS[BIAS_GRAPH].prove(TorchReference(frontend_with(other)), session)


ATTENTION = {
    "bloom": "BloomAttention",
    "mpt": "MptAttention",
    "falcon": "FalconAttention",
    "t5": "T5LayerSelfAttention",
    "xlnet": "XLNetLayer",
}


def fed(name: str, keywords: dict[str, Any], bias: Tensor) -> dict[str, Any]:
    """The arguments of the library's attention with `bias` in place of its own."""
    match name:
        case "bloom":
            return {"alibi": bias[0]}
        case "mpt":
            return {"position_bias": bias[0]}
        case "falcon":
            mask = keywords["attention_mask"]
            return {"attention_mask": torch.where(mask == torch.finfo(mask.dtype).min, mask, bias)}
        case "t5":
            return {"position_bias": bias}
        case _:
            return {"r": bias.unsqueeze(1)}


def states(name: str, model: Any, run: Callable[..., Tensor] | None, factor: float = 1.0) -> Tensor:
    """The last hidden states of a prompt of 9, a chunk of 4 and a step of 1, each after those before it.

    Where `run` is given, its bias times `factor` takes the place of the library's own in every block.
    """
    family, _, side = name.partition("/")
    stack = getattr(model, side) if side else model
    lengths, past, chunks = [0, 0], None, []
    cached = "mems" if family == "xlnet" else "cache"

    def hook(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if run is None:
            return None
        begin, end = lengths
        bias = factor * run(*([] if family == "xlnet" else [begin]), end - begin, end)
        return arguments, keywords | fed(family, keywords, bias)

    attentions = [module for module in stack.modules() if type(module).__name__ == ATTENTION[family]]
    assert len(attentions) == 2
    handles = [attention.register_forward_pre_hook(hook, with_kwargs=True) for attention in attentions]
    ids = torch.arange(3, 17).reshape(1, -1)
    given: dict[str, Any] = {"use_mems" if family == "xlnet" else "use_cache": side != "encoder"}
    if side == "decoder":
        given["encoder_hidden_states"] = torch.ones(1, 3, model.config.d_model)
    with torch.inference_mode():
        for begin, end in [(0, 9)] if side == "encoder" else [(0, 9), (9, 13), (13, 14)]:
            lengths[:] = begin, end
            result = stack(ids[:, begin:end], **given, **({} if past is None else {cached: past}))
            past = getattr(result, cached, None)
            chunks.append(result[0])
    for handle in handles:
        handle.remove()
    return torch.cat(chunks, dim=1)


@pytest.mark.parametrize("name", BIASED)
def test_attention_with_bias_of_graph_matches_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    frontend = FrontEnd.from_data(read_frontend(tmp_path, name.partition("/")[2] or None))
    session, own = session_of(frontend, tmp_path), states(name, model, None)

    def run(*lengths: int) -> Tensor:
        feeds = {spec.name: np.array([length]) for spec, length in zip(session.inputs, lengths, strict=True)}
        return torch.from_numpy(next(iter(session.run(feeds).values())))

    if name == "xlnet":
        torch.testing.assert_close(states(name, model, run), own, rtol=0, atol=1e-5)
    else:
        assert torch.equal(states(name, model, run), own)
    # The model uses the given bias.
    assert (states(name, model, run, factor=2.0) - own).abs().max() > 1e-3
