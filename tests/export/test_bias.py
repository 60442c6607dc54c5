"""The graph of a pairwise bias, in a bare onnxruntime, against the modules of transformers and inside them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers import T5Config as PublishedT5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from preblock.export.errors import ParityError
from preblock.export.outputs import OUTPUTS, write_graphs
from preblock.export.parity import SINUSOID_ULP
from preblock.export.parity_cases import BIAS_GRID
from preblock.export.reference import NumpyReference
from preblock.export.stored_tables import read_data
from preblock.export.torch_reference import TorchReference
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.alibi import AlibiBias
from preblock.models.modules.bias import AlibiConfig, BiasConfig, RelativeSinusoidConfig, T5Config
from preblock.models.modules.relative_positions import RelativeSinusoid, T5RelativeBias
from preblock.models.step_modules import Bias
from preblock.models.steps import Tokens
from preblock.service.artifacts.names import BIAS_GRAPH
from preblock.service.runtime.session import Session
from tests.clients.client_matrix import check_standard
from tests.families.bias_models import BIASED, HEADS, save

LONG = 5000
MODULES: dict[str, Callable[[], Bias]] = {
    "alibi query": partial(AlibiBias, 12),
    "alibi first": partial(AlibiBias, 12, "first"),
    "alibi last": partial(AlibiBias, 12, "last", "float32_reciprocals"),
    "alibi bfloat16": partial(AlibiBias, 71, "first", "float32_powers", "bfloat16", 8**0.5),
    **{
        f"t5 {buckets} {longest} {both}": partial(T5RelativeBias, HEADS, buckets, longest, both)
        for buckets, longest in ((32, 128), (4, 3), (64, 20000))
        for both in (True, False)
    },
    **{
        f"sinusoid {clamp} {both}": partial(RelativeSinusoid, 16, clamp, both)
        for clamp in (None, 5)
        for both in (True, False)
    },
}


def frontend_with(bias: Bias) -> FrontEnd:
    """Return a front-end of one id with `bias`."""
    config: BiasConfig
    match bias:
        case AlibiBias():
            anchor: Any = bias.anchor
            config = AlibiConfig(
                heads=bias.heads, anchor=anchor, recipe=bias.recipe, arithmetic=bias.arithmetic, divisor=bias.divisor
            )
        case T5RelativeBias():
            buckets, heads = bias.weight.shape
            config = T5Config(
                heads=heads, buckets=buckets, max_distance=bias.max_distance, bidirectional=bias.bidirectional
            )
        case RelativeSinusoid():
            config = RelativeSinusoidConfig(
                width=bias.d_model, clamp_len=bias.clamp_len, bidirectional=bias.bidirectional
            )
    frontend = FrontEnd(FrontEndConfig(family="x", steps=(Tokens(rows=2, width=2),), max_len=None, bias=config))
    frontend.bias = bias
    return frontend


def session_of(bias: Bias, folder: Path) -> Session:
    write_graphs(frontend_with(bias).data(), folder)
    return Session(folder, graph=BIAS_GRAPH)


def graph_of(bias: Bias, folder: Path) -> Callable[..., Tensor]:
    """Export `bias`, and return the session of its graph."""
    write_graphs(frontend_with(bias).data(), folder)
    session = onnxruntime.InferenceSession(folder / BIAS_GRAPH, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run(*lengths: int) -> Tensor:
        feeds = {name: np.array([length]) for name, length in zip(names, lengths, strict=True)}
        return torch.from_numpy(session.run(None, feeds)[0])

    return run


def saved(name: str, folder: Path, **changes: Any) -> tuple[Any, FrontEnd]:
    """A model of transformers, and the front-end read from its checkpoint."""
    model = save(name, folder, **changes)
    return model, FrontEnd.from_data(read_frontend(folder, name.partition("/")[2] or None))


@pytest.mark.parametrize("name", MODULES)
def test_bias_graph_matches_module(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    bias = MODULES[name]()
    session, frontend = session_of(bias, tmp_path), frontend_with(bias)
    whole = [(offset, queries, keys)[name.startswith("sinusoid") :] for offset, queries, keys in BIAS_GRID]
    for reference in (TorchReference(frontend), NumpyReference(frontend.data())):
        (parity,) = OUTPUTS[BIAS_GRAPH].prove(reference, session).values()
        assert [tuple(case.arguments.values()) for case in parity.cases] == whole
        assert parity.max_abs <= (2.0**-23 if name.startswith("sinusoid") else 0)


@pytest.mark.parametrize(
    ("exported", "other"),
    [
        (AlibiBias(12), AlibiBias(12, "first")),
        (AlibiBias(12, recipe="exact"), AlibiBias(12, recipe="float32_powers")),
        (AlibiBias(12), AlibiBias(12, divisor=1 + 1e-6)),
        (T5RelativeBias(2, 32, 128, True), T5RelativeBias(2, 32, 128, True)),
        (RelativeSinusoid(8), RelativeSinusoid(8, clamp_len=4999)),
        (RelativeSinusoid(8), RelativeSinusoid(8, bidirectional=False)),
    ],
    ids=["anchor", "recipe", "divisor", "weight", "clamp_len", "direction"],
)
def test_bias_graph_of_other_parameters_fails_proof(exported: Bias, other: Bias, tmp_path: Path) -> None:
    session = session_of(exported, tmp_path)
    with pytest.raises(ParityError, match=r"of the graph differs from its reference by .* at query_"):
        OUTPUTS[BIAS_GRAPH].prove(TorchReference(frontend_with(other)), session)


def test_bias_graph_of_other_kind_fails_proof(tmp_path: Path) -> None:
    session = session_of(RelativeSinusoid(8), tmp_path)
    with pytest.raises(ParityError, match="relative_positions of the graph differs from its reference by inf"):
        OUTPUTS[BIAS_GRAPH].prove(TorchReference(frontend_with(AlibiBias(2))), session)


@pytest.mark.parametrize("name", MODULES)
def test_bias_graph_describes_inputs_and_outputs(name: str, tmp_path: Path) -> None:
    bias = MODULES[name]()
    write_graphs(frontend_with(bias).data(), tmp_path)
    model = onnx.load(tmp_path / BIAS_GRAPH, load_external_data=False)
    check_standard(tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / BIAS_GRAPH)
    inputs = [(node.name, node.type, node.shape) for node in session.get_inputs()]
    lengths = [(length, "tensor(int64)", [1]) for length in ("query_offset", "query_length", "key_length")]
    (output,) = session.get_outputs()
    assert output.type == "tensor(float)"
    if isinstance(bias, RelativeSinusoid):
        assert inputs == lengths[1:]
        assert (output.name, output.shape) == ("relative_positions", ["rows", 16])
    else:
        assert inputs == lengths
        heads = bias.heads if isinstance(bias, AlibiBias) else HEADS
        assert (output.name, output.shape) == ("bias", [1, heads, "query_length", "key_length"])
    used = {name for node in model.graph.node for name in node.input}
    assert {tensor.name for tensor in model.graph.initializer} <= used
    assert not any(tensor.external_data for tensor in model.graph.initializer)


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (32, 20), (128, 20000), (6, 100), (320, 800)])
def test_t5_bias_graph_matches_transformers_at_every_distance(
    buckets: int, longest: int, decoder: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = PublishedT5Config(
        d_model=4,
        num_heads=HEADS,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=longest,
        is_decoder=decoder,
    )
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    bias = T5RelativeBias(HEADS, buckets, longest, bidirectional=not decoder)
    with torch.no_grad():
        attention.relative_attention_bias.weight.copy_(bias.weight)
        run = graph_of(bias, tmp_path)
        for past, queries, keys in ((0, 1, LONG), (LONG, 1, LONG + 1), (700, 40, 1500), (0, 60, 60)):
            expected = attention.compute_bias(queries, keys, past_seen_tokens=past)  # type: ignore[no-untyped-call]
            assert torch.equal(run(past, queries, keys), expected)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_t5_bias_graph_of_checkpoint_matches_transformers(side: str, tmp_path: Path) -> None:
    model, frontend = saved(f"t5/{side}", tmp_path)
    attention = getattr(model, side).block[0].layer[0].SelfAttention
    run = graph_of(frontend.bias, tmp_path)
    with torch.no_grad():
        for past, queries, keys in ((0, 9, 9), (30, 1, 31), (30, 4, 34), (0, 5, 300)):
            assert torch.equal(run(past, queries, keys), attention.compute_bias(queries, keys, past_seen_tokens=past))


@pytest.mark.parametrize("heads", [1, 6, 16, 71])
def test_bloom_and_mpt_bias_graphs_match_transformers(heads: int, tmp_path: Path) -> None:
    published: dict[str, Callable[[int], Tensor]] = {
        "bloom": lambda keys: build_alibi_tensor(torch.ones(1, keys, dtype=torch.int64), heads, torch.float32),
        "mpt": lambda keys: build_mpt_alibi_tensor(heads, keys),  # type: ignore[no-untyped-call]
    }
    sizes = {"bloom": {"hidden_size": heads * 2, "n_head": heads}, "mpt": {"d_model": heads * 2, "n_heads": heads}}
    for name, row in published.items():
        (tmp_path / name).mkdir()
        _, frontend = saved(name, tmp_path / name, **sizes[name])
        run = graph_of(frontend.bias, tmp_path / name)
        for past, queries, keys in ((0, 9, 9), (LONG, 1, LONG + 1), (30, 4, 34)):
            assert torch.equal(run(past, queries, keys)[0], row(keys).expand(-1, queries, -1))


@pytest.mark.parametrize("attn_type", ["bi", "uni"])
@pytest.mark.parametrize("clamp_len", [-1, 20])
def test_xlnet_bias_graph_matches_transformers(clamp_len: int, attn_type: str, tmp_path: Path) -> None:
    model, frontend = saved("xlnet", tmp_path, clamp_len=clamp_len, attn_type=attn_type)
    run = graph_of(frontend.bias, tmp_path)
    for queries, keys in ((9, 9), (1, LONG), (30, 300)):
        expected = model.relative_positional_encoding(queries, keys)[:, 0]
        torch.testing.assert_close(run(queries, keys), expected, rtol=0, atol=SINUSOID_ULP * 2.0**-23)


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
    model, frontend = saved(name, tmp_path)
    run, own = graph_of(frontend.bias, tmp_path), states(name, model, None)
    if name == "xlnet":
        torch.testing.assert_close(states(name, model, run), own, rtol=0, atol=1e-5)
    else:
        assert torch.equal(states(name, model, run), own)
    # The model uses the given bias.
    assert (states(name, model, run, factor=2.0) - own).abs().max() > 1e-3


def test_trained_bias_is_read_back_from_artifact(tmp_path: Path) -> None:
    _, frontend = saved("t5/decoder", tmp_path)
    write_graphs(frontend.data(), tmp_path)
    (tmp_path / BIAS_GRAPH).rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"^bias\.weight: got nothing, expected \(32, "):
        read_data(tmp_path, frontend.config)
    (tmp_path / "moved").rename(tmp_path / BIAS_GRAPH)
    data, stored = read_data(tmp_path, frontend.config)
    assert not stored
    assert list(data.tensors) == ["tokens.weight", "bias.weight"]
    lengths = {"query_offset": 3, "query_length": 4, "key_length": 7}
    assert np.array_equal(TorchReference.of(data).bias(lengths), frontend.bias(**lengths).detach())
