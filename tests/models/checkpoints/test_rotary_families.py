"""Rotary outputs from the files of published models, against transformers."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Glm46VConfig, Glm46VModel

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.rotary_reader import read_rotary
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.frontend import FrontEnd
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding
from preblock.models.modules.rotary_output import RotaryOutput
from tests.families.library_models import in_our_form
from tests.families.published_models import PUBLISHED, token_decoder
from tests.models.checkpoints.rotary_models import ROTARY, TEXT_PARTS, config_of, modeling_of, outputs_of, rotary_of
from tests.models.rejections import rejection

POSITIONS = torch.cat((torch.arange(100), torch.arange(100, 1536, 37))).unsqueeze(0)
LINEAR = {"factor": 4.0, "rope_type": "linear"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6}
PER_LAYER = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e3}, "full_attention": LINEAR}
LONG = {"short_factor": [1.0 + i / 50 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}
PHIMOE: dict[str, Any] = {"type": "longrope", "short_factor": [1.0 + i / 50 for i in range(64)]}
PHIMOE |= {"long_factor": [2.0] * 64, "short_mscale": 1.1, "long_mscale": 1.3}
DEEPSEEK = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.6, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK |= {"original_max_position_embeddings": 1024}
GPT_OSS = {"rope_type": "yarn", "factor": 16.0, "truncate": False, "original_max_position_embeddings": 4096}
LLAMA4 = LLAMA3 | {"high_freq_factor": 1.0, "factor": 16.0}
OLMO3 = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2, "original_max_position_embeddings": 1024}
COMPLEX = ("deepseek_v2", "llama4_text")

NO_DEFAULTS = ("esm", "granitemoehybrid", "glm4_moe", "glm4v/text", "glm4v_text", "glm4v_moe/text", "glm4v_moe_text")
"""Families without rotary positions, or with an impossible rotary width, by default."""
MULTIMODAL = {"type": "default", "mrope_section": [8, 12, 12]}
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}

# Defaults of the library for missing keys, and both spellings of each key.
FILES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in ROTARY if family not in (*NO_DEFAULTS, *TEXT_PARTS)),
    ("phi", {"rope_scaling": LINEAR, "partial_rotary_factor": 0.375}),
    ("phi3", {"rope_scaling": {"type": "su", **LONG, "original_max_position_embeddings": 9}}),
    ("phi3", {"rope_scaling": {"type": "yarn", **LONG}, "original_max_position_embeddings": 1000}),
    ("phimoe", {"rope_scaling": PHIMOE | {"original_max_position_embeddings": 99}}),
    ("phimoe", {"rope_scaling": PHIMOE | {"original_max_position_embeddings": 2000}}),
    ("qwen2_vl/text", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e5}),
    ("qwen3_vl/text", {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True}, "rope_theta": 5e6}),
    ("glm4v/text", {"rope_scaling": MULTIMODAL, "rope_theta": 2e4, "partial_rotary_factor": 0.5}),
    ("glm4v_moe/text", {"rope_scaling": MULTIMODAL, "head_dim": 128}),
    ("glm46v/text", {"model_type": "glm4v_moe_text", "rope_parameters": MULTIMODAL, "head_dim": 128}),
    ("glmga/text", {"model_type": "glm4v_text", "rope_parameters": MULTIMODAL, "partial_rotary_factor": 0.5}),
    ("qwen4_exp/text", {"rope_parameters": LINEAR, "partial_rotary_factor": 0.5, "rope_theta": 1e7}),
    ("gemma4_text", {"head_dim": 128, "global_head_dim": 384, "num_hidden_layers": 7}),
    ("gemma4_text", {"rope_parameters": PER_LAYER | {"full_attention": PROPORTIONAL | {"factor": 4.0}}}),
    ("gemma4_text", {"rope_parameters": PER_LAYER | {"full_attention": PROPORTIONAL | {"partial_rotary_factor": 0.3}}}),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 64}}, "num_hidden_layers": 2}),
    ("gemma4/text", {"per_layer_config": {}}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 25000, "rope_theta": 7.0, "partial_rotary_factor": 0.7}),
    ("bamba", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ("deepseek_v2", {"rope_scaling": DEEPSEEK, "rope_theta": 2e4, "qk_rope_head_dim": 32}),
    ("deepseek_v3", {"rope_scaling": DEEPSEEK, "rope_theta": 2e4, "qk_rope_head_dim": 32}),
    ("glm", {"head_dim": None, "partial_rotary_factor": 0.25}),
    ("glm4_moe", {"head_dim": 128, "rope_theta": 1e6}),
    ("gpt_oss", {"rope_scaling": GPT_OSS, "rope_theta": 1.5e5}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "rope_theta": 5e5}),
    ("hunyuan_v1_dense", {"head_dim": 128, "rope_scaling": ALPHA}),
    ("hunyuan_v1_dense", {"head_dim": 128, "rope_scaling": ALPHA, "partial_rotary_factor": 0.5}),
    ("hunyuan_v1_dense", {"head_dim": 128, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("llama4_text", {"rope_scaling": LLAMA4}),
    ("minimax_m2", {"rotary_dim": 64, "partial_rotary_factor": 0.25}),
    ("olmo3", {"rope_scaling": OLMO3, "rope_theta": 5e5}),
    ("sarvam_mla", {"head_dim": 576, "q_head_dim": 192, "rope_scaling": DEEPSEEK | {"type": "deepseek_yarn"}}),
    ("sarvam_mla", {"qk_rope_head_dim": 32, "rope_interleave": False}),
    ("gemma3_text", {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}),
    ("modernbert", {"global_rope_theta": 2e5, "local_rope_theta": 2e4, "rope_scaling": LINEAR}),
    ("gptj", {"rotary_dim": 32, "rope_theta": 7.0}),
    ("codegen", {"rotary_dim": 32}),
    ("roformer", {"hidden_size": 96, "rope_parameters": LINEAR, "partial_rotary_factor": 0.5}),
    ("esm", {"position_embedding_type": "rotary"}),
]


def rotary_class(config: Any) -> Any:
    """Return the rotary module of the library for a model's texts."""
    modeling = modeling_of(config)
    (name,) = (name for name in dir(modeling) if re.fullmatch("(?!.*Vision).*RotaryEmbedding", name))
    return getattr(modeling, name)


def library(
    family: str, values: dict[str, Any], positions: Tensor = POSITIONS, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the cosines and sines of attention in transformers, in the form of our outputs."""
    config = config_of(family, values)
    modeling = modeling_of(config)
    if family in ("gptj", "codegen"):
        tables = modeling.create_sinusoidal_positions(config.n_positions, config.rotary_dim)
    elif family == "roformer":
        width = config.hidden_size // config.num_attention_heads
        module = modeling.RoFormerSinusoidalPositionalEmbedding(config.max_position_embeddings, width)
        tables = module.create_weight()
    else:
        module, x = rotary_class(config)(config), torch.zeros(1, dtype=dtype)
        layers = [layer for layer in ROTARY[family].thetas if not layer or layer in config.layer_types]
        return {layer: in_our_form(module(x, positions, *([layer] if layer else []))) for layer in layers}
    sin, cos = tables[positions].chunk(2, dim=-1)
    return {"": (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))}


@pytest.mark.parametrize(("family", "values"), FILES, ids=lambda value: value if isinstance(value, str) else "")
def test_rotary_config_matches_transformers(family: str, values: dict[str, Any]) -> None:
    config = config_of(family, values)
    saved = json.loads(config.to_json_string())  # of transformers 5
    for stated in (values, saved):
        row = rotary_of(family, stated)
        assert row is not None
        outputs = read_rotary(row, stated, config.hidden_size, config.max_position_embeddings, 1536)
        found = {output.name: RotaryEmbedding(output.config)(POSITIONS, position_ids=POSITIONS) for output in outputs}
        expected = library(family, values)
        assert found.keys() == expected.keys()
        for name, (cos, sin) in expected.items():
            # torch.polar rounds otherwise than torch.cos.
            tolerance = 2.0**-23 if family in COMPLEX else 0.0
            assert (found[name][0] - cos).abs().max() <= tolerance
            assert (found[name][1] - sin).abs().max() <= tolerance


FAR = 131072
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 4096}
LARGE = SIZES | {"max_position_embeddings": FAR}
SHARP = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEP = DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
PHI = LARGE | {"original_max_position_embeddings": 4096}
PHI_ROPE = {"type": "longrope", "short_factor": [1 + i / 50 for i in range(32)]}
PHI_ROPE |= {"long_factor": [1 + 0.7 * i for i in range(32)]}
SCALED: list[tuple[str, dict[str, Any]]] = [
    ("llama", SIZES),
    ("llama", SIZES | {"rope_scaling": {"type": "linear", "factor": 3.7}, "rope_theta": 5e5}),
    ("llama", SIZES | {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5e5}),
    ("llama", LARGE | {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    ("llama", SIZES | {"rope_scaling": DEEP, "rope_theta": 5e5, "max_position_embeddings": 163840}),
    ("gpt_neox", SIZES | {"rotary_pct": 0.25, "rope_scaling": {"type": "dynamic", "factor": 1.7}}),
    *(
        ("qwen2", LARGE | {"rope_theta": 1e6, "rope_scaling": SHARP | changes})
        for changes in (
            {},
            {"attention_factor": 0.8},
            {"beta_fast": 16, "beta_slow": 2, "truncate": False},
            {"original_max_position_embeddings": 64},
            {"original_max_position_embeddings": 6},  # too short for a turn
            {"factor": 0.5},
        )
    ),
    ("qwen2", LARGE | {"rope_theta": 10.0, "rope_scaling": SHARP | {"original_max_position_embeddings": 1000}}),
    *(
        ("phi3", PHI | {"rope_scaling": PHI_ROPE | changes})
        for changes in ({}, {"factor": 2.0}, {"factor": 0.5}, {"attention_factor": 1.3})
    ),
]
"""Every scaling, up to far positions."""


def test_scaled_angles_equal_transformers_at_every_length() -> None:
    for family, values in SCALED:
        config = config_of(family, values)
        for length in (1000, 4096, 4097, FAR):
            positions = torch.cat((torch.arange(300), torch.arange(300, length, 641), torch.tensor([length - 1])))[None]
            x = torch.zeros(*positions.shape, 1, dtype=torch.bfloat16 if length == 4096 else torch.float32)
            (expected,) = library(family, values, positions, x.dtype).values()
            for stated in (values, json.loads(config.to_json_string())):
                (output,) = read_rotary(
                    ROTARY[family], stated, config.hidden_size, config.max_position_embeddings, length
                )
                found = RotaryEmbedding(output.config)(x, position_ids=positions)
                assert all(map(torch.equal, found, expected)), (family, values, length)


INVALID: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": [
        ({"rope_parameters": LINEAR, "partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1"),
        ({"rope_parameters": LINEAR | {"fator": 4.0}}, "rope_parameters: got the key 'fator', not known"),
    ],
    "phi3": [({"rope_scaling": LINEAR}, "rope_type: got 'linear', expected default, longrope")],
    "qwen2_vl/text": [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [9]}, "head_dim": 16}, "with the sum 8"),
        ({"rope_parameters": {"mrope_section": 4}}, "mrope_section: got 4, expected a list of"),
    ],
    "qwen3_vl/text": [({"rope_parameters": {"mrope_section": [4, -1, 4]}}, "mrope_section: got .*-1")],
    "qwen3_5_text": [({"rope_parameters": {"mrope_section": [4]}}, r"mrope_section: got \[4\], expected three")],
    "phimoe": [
        ({"rope_scaling": LINEAR}, "rope_type: got 'linear', expected default, longrope"),
        ({"rope_scaling": {"type": "longrope", **LONG}}, "short_mscale: got None, expected a number"),
    ],
    "gemma4_text": [
        (
            {"rope_parameters": PER_LAYER | {"full_attention": PROPORTIONAL | {"partial_rotary_factor": 0.0}}},
            "partial_rotary_factor: got 0.0, expected a share of 1 to 256 pairs of a head",
        ),
        ({"per_layer_config": {"2": {}}, "num_hidden_layers": 2}, "per_layer_config: got .* from 0 to 1"),
        ({"per_layer_config": {"one": {}}}, "per_layer_config: got .*, expected objects with values"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "got 8 and 256 in layers of sliding_attention"),
        ({"num_hidden_layers": 2**16 + 1}, "num_hidden_layers: got 65537, expected 1 to 65536"),
        ({"rope_scaling": LINEAR}, "rope_scaling.full_attention: got None, expected a JSON"),
        ({"global_head_dim": None}, "head_dim: got None, expected"),
    ],
    "minimax_m2": [({"rotary_dim": 300}, "rotary_dim: got 300, expected 1 to head_dim, 128")],
    "gemma3_text": [
        (
            {"rope_parameters": LINEAR, "rope_scaling": LINEAR},
            "got the key 'factor', expected full_attention, sliding_attention",
        ),
    ],
    "modernbert": [
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
            "got the key 'truncate', not known",
        ),
    ],
}


@pytest.mark.parametrize("family", INVALID)
def test_unsupported_rotary_config_is_rejected(family: str) -> None:
    for values, message in INVALID[family]:
        assert re.search(message, rejection(ValueError, read_rotary, ROTARY[family], values, 64, 2048, 100)), values


def test_model_without_rotary_attention_has_no_rotary_row() -> None:
    for family, values in (("falcon", {"alibi": True}), ("esm", {}), ("bert", {}), ("granitemoehybrid", {})):
        assert rotary_of(family, values) is None


@pytest.mark.parametrize(
    ("family", "sections"),
    [
        ("qwen2_vl/text", [16, 40, 8]),
        ("qwen3_vl/text", [24, 20, 20]),
        ("qwen3_5_text", [11, 30, 0]),
        ("glm4v/text", [16, 40, 8]),
        ("glm4v_moe/text", [4, 20, 8]),
        ("glm_ocr/text", [16, 8, 8]),
        ("qwen4_exp/text", [24, 20, 20]),
        ("ernie4_5_vl_moe/text", [22, 22, 20]),
    ],
)
def test_axes_are_those_of_transformers(family: str, sections: list[int]) -> None:
    values: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
    values |= {"head_dim": 128} if family == "glm4v_moe/text" else {}  # the default width is odd
    config = config_of(family, values)
    positions = torch.randint(2000, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    expected = in_our_form(rotary_class(config)(config)(torch.zeros(1), positions))
    row = rotary_of(family, values)
    assert row is not None
    (output,) = read_rotary(row, values, config.hidden_size, config.max_position_embeddings)
    module, axes = RotaryEmbedding(output.config), torch.tensor(output.axes * 2)
    for part, wanted in enumerate(expected):
        each = torch.stack([module(ids, position_ids=ids)[part] for ids in positions])
        assert torch.equal(each.gather(0, axes.expand(1, 2, 7, -1))[0], wanted)
    again = RotaryOutput.from_document(json.loads(json.dumps(output.to_document())))
    assert again == output


def test_invalid_sections_and_axes_are_rejected() -> None:
    row = rotary_of("ernie4_5_vl_moe/text", {})
    assert row is not None
    for sections in ([22, 21, 21], [32, 32, 0], [64], [22, 22, 19]):
        values = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
        message = r"mrope_section: got \[.*\], expected (numbers with the sum 64|three numbers)"
        assert re.search(message, rejection(ValueError, read_rotary, row, values, 2560, 64)), sections
    for axes in ((0,), (0, 3), [0, 1]):
        message = f"rotary.axes: got {axes}, expected 2 numbers from 0 to 2, or none"
        assert message in rejection(ValueError, RotaryOutput, config=RotaryConfig(dim=4), axes=axes)


def test_text_part_of_mixed_experts_has_its_own_rotary(tmp_path: Path) -> None:
    part = token_decoder("glm4v_moe_text").config
    model = Glm46VModel(Glm46VConfig(**(PUBLISHED["glm46v/text"].config | {"text_config": part})))
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    document = json.loads(file.read_text())
    del document["text_config"]["max_position_embeddings"]
    file.write_text(json.dumps(document))
    frontend = FrontEnd.from_data(read_frontend(tmp_path, "text"))
    assert frontend.config.max_len == 65536
    (output,) = frontend.config.rotary
    assert (output.layout, output.config.dim, output.axes) == ("half", 4, (0, 1))
    expected = model.language_model.rotary_emb(torch.zeros(1), torch.arange(30, 39).expand(3, 1, 9))
    for found, wanted in zip(outputs_of(frontend, 9, 30).values(), in_our_form(expected), strict=True):
        assert torch.equal(found, wanted)

    document["text_config"]["model_type"] = "llama"
    file.write_text(json.dumps(document))
    message = "model_type is 'llama', understood is 'glm4v_text' or 'glm4v_moe_text'"
    assert message in rejection(CheckpointError, read_frontend, tmp_path, "text")


PLAIN, FULL, SLIDING = {"rope_type": "default"}, "full_attention", "sliding_attention"
OLD = {"type": "linear", "factor": 2.0}
LAYERS = {FULL: LINEAR | {"rope_theta": 3e5}, SLIDING: PLAIN | {"rope_theta": 7e3}}
THETA = {"rope_theta": 5e5}
SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta": THETA,
    "theta inside": {"rope_parameters": PLAIN | THETA},
    "theta beside": THETA | {"rope_parameters": PLAIN},
    "theta beside and inside": THETA | {"rope_parameters": PLAIN | {"rope_theta": 6e5}},
    "type missing": THETA | {"rope_parameters": {"rope_theta": 6e5}},
    "parameters null": THETA | {"rope_parameters": None},
    "unused number": {"rope_parameters": PLAIN | {"factor": 4.0}},
    "scaling": THETA | {"rope_scaling": LINEAR},
    "old scaling": {"rope_scaling": OLD},
    "scaling inside": THETA | {"rope_parameters": LINEAR},
    "scaling beside": {"rope_scaling": OLD, "rope_parameters": PLAIN | THETA},
    "scaling with theta beside": {"rope_scaling": LINEAR | {"rope_theta": 4e5}, "rope_parameters": PLAIN | THETA},
    "scaling empty": {"rope_scaling": {}, "rope_parameters": PLAIN | THETA},
    "layers": {"rope_parameters": LAYERS},
    "theta beside layers": THETA | {"rope_parameters": {FULL: LINEAR, SLIDING: PLAIN}},
    "theta among layers": {"rope_parameters": LAYERS | {"rope_theta": 9e5}},
    "scaling beside layers": {"rope_scaling": OLD, "rope_parameters": LAYERS},
    "layers in scaling": {"rope_scaling": LAYERS},
    "layers in both": {"rope_scaling": LAYERS, "rope_parameters": {FULL: dict(PLAIN), SLIDING: dict(PLAIN)}},
    "one layer missing": {"rope_parameters": {FULL: LINEAR}},
    "one kind of layer": {"layer_types": [FULL] * 2, "num_hidden_layers": 2, "rope_parameters": {FULL: LAYERS[FULL]}},
    "parameters empty": {"rope_parameters": {}},
    "scaling null": {"rope_scaling": None},
    "share": {"partial_rotary_factor": 0.5},
    "share null": {"partial_rotary_factor": None},
    "share inside": {"rope_parameters": PLAIN | THETA | {"partial_rotary_factor": 0.5}},
    "share of no number": {"partial_rotary_factor": "half"},
}

WITH_AVX_512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="torch divides 16 frequencies into other blocks"
)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("phi", marks=WITH_AVX_512),
        *("llama", "gpt_neox", "gpt_oss", "qwen2", "gemma3_text", "gemma4_text", "olmo3", "modernbert"),
        *("gptj", "codegen", "hunyuan_v1_dense", "deepseek_v3"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the library, on keys that it does not read
def test_spelling_loads_with_angles_of_transformers(family: str) -> None:
    sizes = config_of(family, {})
    for name, values in SPELLINGS.items():
        row = rotary_of(family, values)
        assert row is not None
        try:
            # The default of gpt_oss is a scaling: its attention fails with a share of the columns.
            expected = {} if (family, name) == ("gpt_oss", "share") else library(family, values)
        except Exception:  # the library has many errors
            expected = {}
        try:
            outputs = read_rotary(row, deepcopy(values), sizes.hidden_size, sizes.max_position_embeddings)
        except ValueError:
            outputs = ()
        found = {output.name: RotaryEmbedding(output.config)(POSITIONS, position_ids=POSITIONS) for output in outputs}
        assert found.keys() == expected.keys(), (name, values)
        for layer, tables in expected.items():
            assert all(map(torch.equal, found[layer], tables)), name


@pytest.mark.parametrize("family", sorted(ROTARY))
@pytest.mark.filterwarnings("ignore")  # of the library, on keys that it does not read
def test_rows_say_which_types_fail_for_other_forms(family: str) -> None:
    row = ROTARY[family]
    other = LAYERS if "" in row.thetas else LAYERS | THETA
    # Some types have an impossible width of a head by default.
    width = {"head_dim": 128 if "moe" in family else 64} if family.startswith(("glm4v", "glm46v", "glmga")) else {}
    try:
        library(family, {"position_embedding_type": "rotary", "rope_parameters": deepcopy(other), **width})
        fails = False
    except Exception:  # the library has many errors
        fails = True
    assert row.strict == fails
