"""Rotary positions, against the corresponding modules of transformers."""

import copy
import inspect
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config, PreTrainedConfig, Qwen2Config
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from preblock.models.checkpoints.rotary_families import ROTARY
from preblock.models.checkpoints.rotary_reader import read_rotary
from preblock.models.modules.positions import LearnedPositionalEncoding
from preblock.models.modules.rotary_config import SCALINGS, RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate

Layout = Literal["half", "interleaved"]

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 4096}
FAR = 131072
"""Positions up to one less are compared."""


@dataclass(frozen=True)
class PublishedRotary:
    """A module of transformers, and a `config.json` as published for it."""

    config_class: type[PreTrainedConfig]
    module_class: type[nn.Module]
    values: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        # A copy, because transformers writes into its arguments.
        return self.config_class(**copy.deepcopy(self.values))

    def read(self, length: int) -> RotaryConfig:
        return read(self.values, length, self.config_class.model_type)

    def angles(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the result of the first call of a new module."""
        found: tuple[Tensor, Tensor] = self.module_class(self.config())(torch.zeros(1, dtype=dtype), positions)
        return found


def read(values: dict[str, Any], length: int | None = None, family: str = "llama") -> RotaryConfig:
    (output,) = read_rotary(
        ROTARY[family], values, SIZES["hidden_size"], values.get("max_position_embeddings", 2048), length
    )
    return output.config


def llama(scaling: dict[str, Any] | None = None, **values: object) -> PublishedRotary:
    return PublishedRotary(
        LlamaConfig,
        modeling_llama.LlamaRotaryEmbedding,
        {**SIZES, "rope_scaling": scaling, "rope_theta": 5e5, **values},
    )


def neox(scaling: dict[str, Any] | None) -> PublishedRotary:
    values = {**SIZES, "rotary_pct": 0.25, "rotary_emb_base": 10000, "rope_scaling": scaling}
    return PublishedRotary(GPTNeoXConfig, modeling_gpt_neox.GPTNeoXRotaryEmbedding, values)


def qwen(scaling: dict[str, Any]) -> PublishedRotary:
    values = {**SIZES, "max_position_embeddings": FAR, "rope_theta": 1e6, "rope_scaling": scaling}
    return PublishedRotary(Qwen2Config, Qwen2RotaryEmbedding, values)


def phi(**scaling: object) -> PublishedRotary:
    lists = {"short_factor": [1 + i / 50 for i in range(32)], "long_factor": [1 + 0.7 * i for i in range(32)]}
    values = {
        **SIZES,
        "max_position_embeddings": FAR,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", **lists, **scaling},
    }
    return PublishedRotary(Phi3Config, Phi3RotaryEmbedding, values)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
PUBLISHED = {
    "llama": llama(),
    "llama without theta": PublishedRotary(LlamaConfig, modeling_llama.LlamaRotaryEmbedding, SIZES),
    "llama with a width of a head": llama(head_dim=80),
    "llama linear": llama({"type": "linear", "factor": 3.7}),
    "llama dynamic": llama({"type": "dynamic", "factor": 2.0}),
    "llama dynamic of an integer": llama({"rope_type": "dynamic", "factor": 8}),
    "llama3": llama(LLAMA3, max_position_embeddings=FAR),
    "gpt-neox": neox(None),
    "gpt-neox linear": neox({"type": "linear", "factor": 2.0}),
    "gpt-neox dynamic": neox({"type": "dynamic", "factor": 1.7}),
    "qwen2 yarn": qwen(YARN),
    "qwen2 yarn with its own factor on cos and sin": qwen({**YARN, "attention_factor": 0.8}),
    "qwen2 yarn not rounded": qwen({**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}),
    "qwen2 yarn after short pretraining": qwen({**YARN, "original_max_position_embeddings": 64}),
    "qwen2 yarn after pretraining too short for a turn": qwen({**YARN, "original_max_position_embeddings": 6}),
    "qwen2 yarn of short wavelengths": qwen({**YARN, "original_max_position_embeddings": 1000, "rope_theta": 10.0}),
    "qwen2 yarn for shorter inputs": qwen({**YARN, "factor": 0.5}),
    "llama yarn as deepseek's": llama(DEEPSEEK, max_position_embeddings=163840),
    "phi3 longrope": phi(),
    "phi3 longrope with a factor": phi(factor=2.0),
    "phi3 longrope for shorter inputs": phi(factor=0.5),
    "phi3 longrope with its own factor on cos and sin": phi(attention_factor=1.3),
}
EACH = pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
LENGTHS = pytest.mark.parametrize("length", [1000, 4096, 4097, FAR])

CONFIGS = {
    "default": RotaryConfig(dim=32),
    "linear": RotaryConfig(dim=32, scaling="linear", factor=4.0),
    "dynamic": RotaryConfig(dim=32, scaling="dynamic", factor=4.0, original_len=4096, length=FAR),
    "yarn": RotaryConfig(dim=32, scaling="yarn", factor=32.0, original_len=4096),
    "llama3": RotaryConfig(
        dim=32, scaling="llama3", factor=8.0, original_len=8192, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "longrope": RotaryConfig(
        dim=32,
        scaling="longrope",
        factor=32.0,
        original_len=4096,
        length=FAR,
        short_factor=(1.0,) * 16,
        long_factor=tuple(1 + i / 3 for i in range(16)),
    ),
    "given": RotaryConfig(dim=32, scaling="given", frequencies=tuple(0.5**i for i in range(16))),
}
EACH_SCALING = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
IDS = torch.zeros((2, 5), dtype=torch.int64)


def some_positions(length: int) -> Tensor:
    """Near and far positions of a sequence of `length` tokens, the last included."""
    near, far = torch.arange(300), torch.arange(300, length, 641)
    return torch.cat((near, far, torch.tensor([length - 2, length - 1]))).unsqueeze(0)


def angles(module: RotaryEmbedding, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = module(torch.zeros(*positions.shape, 1, dtype=dtype), position_ids=positions)
    return found


def assert_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@EACH
@LENGTHS
def test_rotary_angles_equal_transformers(published: PublishedRotary, length: int) -> None:
    positions = some_positions(length)
    module = RotaryEmbedding(published.read(length))
    assert_equal(angles(module, positions), published.angles(positions))


@EACH
def test_rotary_angles_in_bfloat16_equal_transformers(published: PublishedRotary) -> None:
    positions = some_positions(5000)
    found = angles(RotaryEmbedding(published.read(5000)), positions, torch.bfloat16)
    assert_equal(found, published.angles(positions, torch.bfloat16))


@EACH
@LENGTHS
def test_transformers_5_config_reads_like_older_config(published: PublishedRotary, length: int) -> None:
    new = published.config().to_dict()
    assert "rope_scaling" not in new
    assert read(new, length, published.config_class.model_type) == published.read(length)


def test_comparisons_cover_every_rotary_scaling() -> None:
    assert {published.read(1).scaling for published in PUBLISHED.values()} == set(SCALINGS) - {"given"}
    assert set(CONFIGS) == set(SCALINGS)


def test_gptj_angles_equal_transformers() -> None:
    values = {"n_embd": 64, "n_head": 4, "rotary_dim": 12, "n_positions": 2048}
    config = read(values, family="gptj")
    sin, cos = modeling_gptj.create_sinusoidal_positions(2048, 12).chunk(2, dim=-1)
    assert config == RotaryConfig(dim=12)
    assert_equal(
        angles(RotaryEmbedding(config), torch.arange(2048).unsqueeze(0)),
        (torch.cat((cos, cos), -1).unsqueeze(0), torch.cat((sin, sin), -1).unsqueeze(0)),
    )


@EACH_SCALING
def test_offset_shifts_rotary_positions(config: RotaryConfig) -> None:
    module = RotaryEmbedding(config)
    whole = module(torch.zeros((1, 50), dtype=torch.int64))
    assert_equal(module(IDS, offset=7), (whole[0][:, 7:12], whole[1][:, 7:12]))
    found = module(IDS, offset=torch.tensor([3, 45]))
    for row, start in enumerate((3, 45)):
        assert_equal(tuple(part[row] for part in found), tuple(part[0, start : start + 5] for part in whole))


@EACH_SCALING
def test_row_is_independent_of_neighbours_and_earlier_calls(config: RotaryConfig) -> None:
    module, far = RotaryEmbedding(config), torch.tensor([3, 100_000])
    near = RotaryEmbedding(config)(IDS, offset=3)
    assert_equal(tuple(part[:1] for part in module(IDS, offset=far)), near)
    assert_equal(module(IDS, offset=3), near)


def test_rotary_embedding_shares_position_call_signature() -> None:
    found, expected = (
        inspect.signature(kind.forward).parameters for kind in (RotaryEmbedding, LearnedPositionalEncoding)
    )
    assert found == expected


def test_rotary_angles_are_equal_for_ids_and_vectors() -> None:
    module = RotaryEmbedding(CONFIGS["default"])
    assert_equal(module(torch.zeros(2, 5, 8)), module(IDS))


def test_rotary_embedding_has_no_parameters_or_state() -> None:
    module = RotaryEmbedding(CONFIGS["default"])
    assert list(module.parameters()) == []
    assert module.state_dict() == {}


def test_rotary_angles_ignore_dtype_cast() -> None:
    module = RotaryEmbedding(CONFIGS["default"])
    far = module(IDS, offset=10_000)
    assert_equal(module.to(torch.bfloat16)(IDS, offset=10_000), far)
    assert_equal(module.double()(IDS, offset=10_000), far)


def test_rotary_frequencies_are_filled_after_meta_device() -> None:
    expected = RotaryEmbedding(CONFIGS["llama3"])(IDS)
    with torch.device("meta"):
        module = RotaryEmbedding(CONFIGS["llama3"])
    assert_equal(module(IDS), expected)
    assert module.to("meta").frequencies.device.type == "meta"
    assert_equal(module.to_empty(device="cpu")(IDS), expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_rotate_equals_transformers_llama(rows: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 32), torch.randn(2, 2, 5, 32)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=torch.arange(rows) + 100)
    assert cos.shape == (rows, 5, 32)
    expected = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    assert_equal((rotate(query, cos, sin, "half"), rotate(key, cos, sin, "half")), expected)


def test_rotate_partial_head_equals_gpt_neox() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 48), torch.randn(2, 4, 5, 48)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=100)
    expected = modeling_gpt_neox.apply_rotary_pos_emb(query, key, cos, sin)  # type: ignore[no-untyped-call]
    assert_equal((rotate(query, cos, sin, "half"), rotate(key, cos, sin, "half")), expected)
    assert torch.equal(expected[0][..., 32:], query[..., 32:])


@pytest.mark.parametrize("width", [32, 48])
def test_rotate_interleaved_equals_transformers_gptj(width: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, width)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=torch.tensor([0, 100]))
    sines, cosines = sin[..., :16], cos[..., :16]
    turned = modeling_gptj.apply_rotary_pos_emb(query[..., :32].transpose(1, 2), sines, cosines)
    expected = torch.cat((turned.transpose(1, 2), query[..., 32:]), dim=-1)
    assert torch.equal(rotate(query, cos, sin, "interleaved"), expected)


def test_rotate_keeps_query_dtype() -> None:
    query = torch.randn(2, 4, 5, 32, dtype=torch.bfloat16)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(query[:, 0])
    assert rotate(query, cos, sin).dtype == cos.dtype == torch.bfloat16


def test_rotate_interleaved_equals_complex_multiplication() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, 50, 32, dtype=torch.float64)
    angle = torch.outer(torch.arange(50).double(), 10000.0 ** (-torch.arange(16).double() / 16))
    turned = torch.view_as_complex(query.reshape(1, 2, 50, 16, 2)) * torch.polar(torch.ones_like(angle), angle)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(torch.zeros((1, 50), dtype=torch.int64))
    assert (rotate(query, cos, sin, "interleaved") - torch.view_as_real(turned).flatten(-2)).abs().max() < 2e-5


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotated_score_depends_only_on_distance(layout: Layout) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)
    positions = torch.arange(2000).unsqueeze(0)
    cos, sin = angles(RotaryEmbedding(CONFIGS["default"]), positions)
    queries = rotate(query.expand(1, 1, 2000, 32), cos, sin, layout)
    keys = rotate(key.expand(1, 1, 2000, 32), cos, sin, layout)
    scores = (queries[:, :, 70:] * keys[:, :, :-70]).sum(-1)
    assert (scores - scores[..., :1]).abs().max() < 1e-3
    assert (queries.norm(dim=-1) - query.norm()).abs().max() < 1e-6


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotate_gradient_rotates_back(layout: Layout) -> None:
    torch.manual_seed(0)
    query, weights = torch.randn(2, 4, 5, 40, requires_grad=True), torch.randn(2, 4, 5, 40)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=9)
    (rotate(query, cos, sin, layout) * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None
    torch.testing.assert_close(query.grad, rotate(weights, cos, -sin, layout))


def test_rotate_unknown_layout_is_rejected() -> None:
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS)
    with pytest.raises(ValueError, match="layout: got 'pairs', expected 'half', 'interleaved'"):
        rotate(torch.zeros(2, 1, 5, 32), cos, sin, "pairs")  # type: ignore[arg-type]


def test_rotate_head_narrower_than_angles_is_rejected() -> None:
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS)
    with pytest.raises(ValueError, match="cos: got 32 columns, expected up to the width 16 of a head"):
        rotate(torch.zeros(2, 1, 5, 16), cos, sin)


@pytest.mark.parametrize("offset", [-1, torch.tensor([3, -1])])
def test_rotary_negative_offset_is_rejected(offset: int | Tensor) -> None:
    with pytest.raises(ValueError, match="offset: got -1, expected 0 or more"):
        RotaryEmbedding(CONFIGS["default"])(IDS, offset=offset)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_position_beyond_length_is_rejected_with_length_scaling(scaling: str) -> None:
    module = RotaryEmbedding(replace(CONFIGS[scaling], length=5000))
    module(IDS, offset=4995)
    with pytest.raises(ValueError, match="position: got 5000, expected 0 to 4999"):
        module(IDS, offset=4996)
    with pytest.raises(ValueError, match="position: got 6000, expected 0 to 4999"):
        module(IDS, position_ids=torch.tensor([[0, 1, 6000, 2, 3]]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scaling": "ntk"}, "scaling: got 'ntk', expected default, linear, dynamic, yarn, llama3, longrope"),
        ({"dim": 31}, "dim: got 31, expected an even width of 2 to 65536"),
        ({"dim": 32.0}, "dim: got 32.0, expected a whole number"),
        ({"dim": 0}, "dim: got 0, expected an even width of 2 to 65536"),
        ({"theta": 1.0}, "theta: got 1.0, expected more than 1"),
        ({"factor": 2.0}, "factor: got 2.0, expected 0.0 with scaling 'default'"),
        ({"scaling": "linear"}, "factor: got 0.0, expected more than 0 with scaling 'linear'"),
        ({"scaling": "linear", "factor": float("nan")}, "factor: got nan, expected more than 0"),
        ({"scaling": "linear", "factor": float("inf")}, "factor: got inf, expected more than 0"),
        ({"scaling": "linear", "factor": 2.0, "truncate": False}, "truncate: got False, expected True"),
        ({"scaling": "dynamic", "factor": 2.0, "original_len": 9}, "length: got 0, expected more than 0"),
        ({"scaling": "dynamic", "factor": 2.0, "original_len": 9, "length": 9, "dim": 2}, "dim: got 2, expected 4"),
        ({"scaling": "yarn", "factor": 2.0, "original_len": 9, "attention_factor": 0.0}, "attention_factor: got 0.0"),
        ({"scaling": "yarn", "factor": 2.0, "original_len": 9, "beta_fast": 0.5}, "beta_fast: got 0.5, expected at"),
    ],
)
def test_rotary_config_with_invalid_value_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryConfig(**{"dim": 32, **changes})


def test_llama3_high_factor_below_low_factor_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"high_freq_factor: got 0.5, expected at least low_freq_factor, 1.0"):
        replace(CONFIGS["llama3"], high_freq_factor=0.5)


@pytest.mark.parametrize("factors", [(), (1.0,) * 15, (1.0,) * 15 + (0.0,)])
def test_longrope_with_wrong_factors_is_rejected(factors: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"short_factor: got .*, expected 16 numbers of more than 0"):
        replace(CONFIGS["longrope"], short_factor=factors)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "su"}, "rope_type: got 'su', expected default, linear"),
        ({"type": "mrope", "mrope_section": [8, 12, 12]}, "rope_type: got 'mrope', expected default, linear"),
        ({"rope_type": "default", "mrope_section": [8]}, "got the key 'mrope_section', not known with rope_type 'def"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 9}, "got the key 'beta_fast', not known with rope_type"),
        ({"full_attention": {"rope_type": "default"}}, "got the key 'full_attention', not known"),
        ({"rope_type": "default", "length": 9}, "got the key 'length', not known"),
        ({"rope_type": "dynamic", "factor": 2.0, "length": 9}, "got the key 'length', not known"),
        ({"rope_type": "linear"}, "factor: got 0.0, expected more than 0 with scaling 'linear'"),
        ({"rope_type": "linear", "factor": "2"}, "factor: got '2', expected a number"),
        ({"rope_type": "longrope", "long_factor": 1.0}, "long_factor: got 1.0, expected a list of numbers"),
        ({"rope_type": "longrope", "long_factor": [1, "2"]}, r"long_factor\[1\]: got '2', expected a number"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic' depends on the length .*, and none was given"),
        ({"rope_type": "given", "frequencies": [1.0]}, "rope_type: got 'given', expected default, linear"),
        ({"rope_type": "linear", "type": "dynamic", "factor": 2.0}, "type: got 'dynamic', expected 'linear'"),
        (
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
            "partial_rotary_factor: got 0.5, expect",
        ),
        ({"rope_type": "linear", "factor": True}, "factor: got True, expected a number"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 0}, "truncate: got 0, expected true or false"),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 0},
            "original_max_position_embeddings: got 0, expect",
        ),
        ("linear", "got 'linear', expected a JSON object"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_invalid_rope_config_is_rejected(rope: object, message: str, key: str) -> None:
    with pytest.raises(ValueError, match=message):
        read({**SIZES, key: rope})


@pytest.mark.parametrize("heads", [0, 257, "4", True])
def test_invalid_head_count_is_rejected(heads: object) -> None:
    with pytest.raises(ValueError, match=rf"num_attention_heads: got {heads!r}, expected 1 to 256"):
        read({**SIZES, "num_attention_heads": heads})


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
