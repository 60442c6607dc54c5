"""Rotary outputs from the files of published models, against transformers."""

import copy
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.rotary_families import ROTARY, find_rotary
from preblock.models.checkpoints.rotary_reader import read_rotary
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from preblock.models.modules.rotary_output import RotaryOutput
from tests.families.library_models import in_our_form, save
from tests.families.published_models import _ENCODER, VOCABULARY

POSITIONS = torch.cat((torch.arange(100), torch.arange(100, 1536, 37))).unsqueeze(0)
LINEAR = {"factor": 4.0, "rope_type": "linear"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
PER_LAYER = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e3}, "full_attention": LINEAR}
LONG = {"short_factor": [1.0 + i / 50 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}
PHIMOE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0 + i / 50 for i in range(64)],
    "long_factor": [2.0] * 64,
}
PHIMOE |= {"short_mscale": 1.1, "long_mscale": 1.3}
DEEPSEEK = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.6, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK |= {"original_max_position_embeddings": 1024}
GPT_OSS = {"rope_type": "yarn", "factor": 16.0, "truncate": False, "original_max_position_embeddings": 4096}
LLAMA4 = LLAMA3 | {"high_freq_factor": 1.0, "factor": 16.0}
OLMO3 = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2, "original_max_position_embeddings": 1024}
COMPLEX = ("deepseek_v2", "llama4_text")

NO_DEFAULTS = ("esm", "granitemoehybrid", "glm4_moe", "glm4v/text", "glm4v_moe/text")
"""Families without rotary positions, or with an impossible rotary width, by default."""
MULTIMODAL = {"type": "default", "mrope_section": [8, 12, 12]}

# Defaults of the library for missing keys, and both spellings of each key.
FILES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in ROTARY if family not in NO_DEFAULTS),
    ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "head_dim": 64}),
    ("llama", {"num_attention_heads": 16}),
    ("mistral", {"rope_theta": 1e6, "head_dim": 128}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    ("qwen3", {"rope_theta": 1e6, "head_dim": 64}),
    ("phi", {"partial_rotary_factor": 0.375}),
    ("phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ("phi", {"rope_scaling": LINEAR, "partial_rotary_factor": 0.375}),
    ("phi3", {"rope_scaling": {"type": "su", **LONG, "original_max_position_embeddings": 9}}),
    ("phi3", {"rope_scaling": {"type": "yarn", **LONG}, "original_max_position_embeddings": 1000}),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG, "original_max_position_embeddings": 99}}),
    ("phimoe", {"rope_scaling": PHIMOE | {"original_max_position_embeddings": 99}}),
    ("phimoe", {"rope_scaling": PHIMOE | {"original_max_position_embeddings": 2000}}),
    ("qwen2_vl/text", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e5}),
    ("qwen3_vl/text", {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True}, "rope_theta": 5e6}),
    ("qwen3_5_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [9, 9, 9]}}),
    ("qwen3_5_moe/text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [9, 9, 9]}}),
    ("qwen3_vl_moe/text", {"head_dim": 64, "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10]}}),
    ("glm4v/text", {"rope_scaling": MULTIMODAL, "rope_theta": 2e4, "partial_rotary_factor": 0.5}),
    ("glm4v/text", {"rope_parameters": LINEAR | {"mrope_section": [8, 12, 12]}, "head_dim": 64}),
    ("glm4v_moe/text", {"rope_scaling": MULTIMODAL, "head_dim": 128}),
    ("glm_ocr/text", {"rope_parameters": MULTIMODAL, "head_dim": 128, "partial_rotary_factor": 0.5}),
    (
        "ernie4_5_vl_moe/text",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [10, 10, 12]}, "head_dim": 64},
    ),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 25000, "rope_theta": 7.0, "partial_rotary_factor": 0.7}),
    ("gpt_neox", {"rope_scaling": LINEAR}),
    ("granite", {"rope_theta": 1e7}),
    ("bamba", {"partial_rotary_factor": 0.25}),
    ("bamba", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ("cohere", {"rope_theta": 8e6}),
    ("cohere2", {"rope_theta": 5e4, "head_dim": 64}),
    *(
        (family, {"rope_scaling": DEEPSEEK, "rope_theta": 2e4, "qk_rope_head_dim": 32})
        for family in ("deepseek_v2", "deepseek_v3", "deepseek_v32")
    ),
    ("ernie4_5", {"head_dim": None, "num_attention_heads": 8}),
    ("glm", {"head_dim": None, "partial_rotary_factor": 0.25}),
    ("glm4", {"partial_rotary_factor": 0.25, "rope_scaling": LINEAR}),
    ("glm4_moe", {"head_dim": 128, "rope_theta": 1e6}),
    ("gpt_oss", {"rope_scaling": GPT_OSS, "rope_theta": 1.5e5}),
    ("gpt_oss", {"rope_parameters": {}}),
    ("gpt_oss", {"rope_parameters": None, "rope_theta": 1e5}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "rope_theta": 5e5}),
    *(
        (family, {"head_dim": 128, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}})
        for family in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    ),
    ("hunyuan_v1_dense", {"head_dim": 128, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("llama4_text", {"rope_scaling": LLAMA4}),
    ("minimax", {"head_dim": 64, "rotary_dim": 32}),
    ("minimax_m2", {"rotary_dim": 64}),
    ("minimax_m2", {"rotary_dim": 64, "partial_rotary_factor": 0.25}),
    ("nemotron", {"head_dim": 64, "partial_rotary_factor": 0.25}),
    ("olmo3", {"rope_scaling": OLMO3, "rope_theta": 5e5}),
    ("olmo3", {"rope_theta": 2e4}),
    ("olmo3", {"rope_parameters": PER_LAYER}),
    ("qwen3_next", {"rope_theta": 1e7}),
    ("gemma", {"head_dim": 64, "rope_theta": 2e4}),
    ("gemma2", {"head_dim": 64}),
    ("gemma3_text", {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}),
    ("gemma3_text", {"rope_parameters": PER_LAYER, "rope_theta": 3e6}),
    ("modernbert", {"global_rope_theta": 2e5, "local_rope_theta": 2e4, "rope_scaling": LINEAR}),
    ("modernbert", {"rope_parameters": PER_LAYER}),
    ("nomic_bert", {"rope_theta": 1e4}),
    ("falcon", {"rope_theta": 5e5}),
    ("gptj", {"rotary_dim": 32, "rope_theta": 7.0}),
    ("codegen", {"rotary_dim": 32}),
    ("roformer", {"hidden_size": 96}),
    ("esm", {"position_embedding_type": "rotary"}),
    ("esm", {"position_embedding_type": "rotary", "rope_theta": 500.0}),
]


def config_of(family: str, values: dict[str, Any]) -> Any:
    # A copy, because transformers writes into the dictionaries it is given.
    return CONFIG_MAPPING[family.replace("/", "_")](**copy.deepcopy(values))


def library(family: str, values: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the cosines and sines of attention in transformers, in the form of our outputs."""
    config = config_of(family, values)
    package = family.removesuffix("_text").removesuffix("/text")
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    if family in ("gptj", "codegen"):
        tables = modeling.create_sinusoidal_positions(config.n_positions, config.rotary_dim)
    elif family == "roformer":
        width = config.hidden_size // config.num_attention_heads
        module = modeling.RoFormerSinusoidalPositionalEmbedding(config.max_position_embeddings, width)
        tables = module.create_weight()
    else:
        (name,) = (name for name in dir(modeling) if re.fullmatch("(?!.*Vision).*RotaryEmbedding", name))
        module = getattr(modeling, name)(config)
        layers = list(ROTARY[family].thetas)
        return {layer: in_our_form(module(torch.zeros(1), POSITIONS, *([layer] if layer else []))) for layer in layers}
    sin, cos = tables[POSITIONS].chunk(2, dim=-1)
    return {"": (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))}


@pytest.mark.parametrize(("family", "values"), FILES, ids=lambda value: value if isinstance(value, str) else "")
def test_rotary_config_matches_transformers(family: str, values: dict[str, Any]) -> None:
    config = config_of(family, values)
    saved = json.loads(config.to_json_string())  # of transformers 5
    for stated in (values, saved):
        row = find_rotary(family, stated)
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


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("phi3", {"rope_scaling": LINEAR}, "rope_type: got 'linear', expected default, longrope"),
        ("gptj", {"rope_scaling": LINEAR}, "rope_parameters: got .*, expected none"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1"),
        ("qwen2_vl/text", {"rope_scaling": {"type": "mrope", "mrope_section": [9]}, "head_dim": 16}, "with the sum 8"),
        ("qwen2_vl/text", {"rope_parameters": {"mrope_section": 4}}, "mrope_section: got 4, expected a list of"),
        ("qwen3_vl/text", {"rope_parameters": {"mrope_section": [4, -1, 4]}}, "mrope_section: got .*-1"),
        ("qwen3_5_text", {"rope_parameters": {"mrope_section": [4]}}, r"mrope_section: got \[4\], expected three"),
        ("phimoe", {"rope_scaling": LINEAR}, "rope_type: got 'linear', expected default, longrope"),
        ("phimoe", {"rope_scaling": {"type": "longrope", **LONG}}, "short_mscale: got None, expected a number"),
        ("minimax_m2", {"rotary_dim": 300}, "rotary_dim: got 300, expected 1 to head_dim, 128"),
        ("minimax", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1"),
        (
            "gemma3_text",
            {"rope_parameters": LINEAR},
            "got the key 'factor', expected full_attention, sliding_attention",
        ),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "type: got 'linear', expected 'default'"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
            "got the key 'truncate', not known",
        ),
    ],
)
def test_unsupported_rotary_config_is_rejected(family: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rotary(ROTARY[family], values, 64, 2048, 100)


@pytest.mark.parametrize(
    ("family", "sections"),
    [
        ("qwen2_vl/text", [16, 40, 8]),
        ("qwen3_vl/text", [24, 20, 20]),
        ("qwen3_vl_moe/text", [24, 20, 20]),
        ("qwen3_5_text", [11, 30, 0]),
        ("qwen3_5_moe/text", [11, 11, 10]),
        ("glm4v/text", [16, 40, 8]),
        ("glm4v_moe/text", [4, 20, 8]),
        ("glm_ocr/text", [16, 8, 8]),
        ("ernie4_5_vl_moe/text", [22, 22, 20]),
    ],
)
def test_axes_are_those_of_transformers(family: str, sections: list[int]) -> None:
    values: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
    values |= {"head_dim": 128} if family == "glm4v_moe/text" else {}  # the default width is odd
    config = config_of(family, values)
    package = family.removesuffix("_text").removesuffix("/text")
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    (name,) = (name for name in dir(modeling) if re.fullmatch("(?!.*Vision).*RotaryEmbedding", name))
    positions = torch.randint(2000, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    expected = in_our_form(getattr(modeling, name)(config)(torch.zeros(1), positions))
    row = find_rotary(family, values)
    assert row is not None
    (output,) = read_rotary(row, values, config.hidden_size, config.max_position_embeddings)
    module, axes = RotaryEmbedding(output.config), torch.tensor(output.axes * 2)
    for part, wanted in enumerate(expected):
        each = torch.stack([module(ids, position_ids=ids)[part] for ids in positions])
        assert torch.equal(each.gather(0, axes.expand(1, 2, 7, -1))[0], wanted)
    again = RotaryOutput.from_document(json.loads(json.dumps(output.to_document())))
    assert again == output


@pytest.mark.parametrize("sections", [[22, 21, 21], [32, 32, 0], [64], [22, 22, 19]])
def test_sections_that_the_library_cannot_take_are_refused(sections: list[int]) -> None:
    values = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
    row = find_rotary("ernie4_5_vl_moe/text", values)
    assert row is not None
    with pytest.raises(
        ValueError, match=r"mrope_section: got \[.*\], expected (numbers with the sum 64|three numbers)"
    ):
        read_rotary(row, values, 2560, 64)


@pytest.mark.parametrize("axes", [(0,), (0, 3), [0, 1]])
def test_axes_that_name_no_position_are_refused(axes: Any) -> None:
    with pytest.raises(ValueError, match=r"rotary\.axes: got .*, expected 2 numbers from 0 to 2, or none"):
        RotaryOutput(config=RotaryConfig(dim=4), axes=axes)


def test_number_of_streams_below_one_is_rejected(tmp_path: Path) -> None:
    save("gemma3n_text", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"altup_num_inputs": 0}))
    with pytest.raises(CheckpointError, match="streams: got 0, expected 1 or more"):
        read_frontend(tmp_path)


@pytest.mark.parametrize("family", ["phi", "stablelm", "glm4", "qwen3_next"])
def test_null_partial_rotary_factor_covers_whole_head(family: str) -> None:
    values: dict[str, Any] = {"partial_rotary_factor": None}
    ((cos, _),) = library(family, values).values()
    config = CONFIG_MAPPING[family](**values)
    (output,) = read_rotary(ROTARY[family], values, config.hidden_size, 9)
    assert output.config.dim == cos.shape[-1]


def test_model_without_rotary_attention_has_no_rotary_row() -> None:
    for family, values in (("falcon", {"alibi": True}), ("esm", {}), ("bert", {}), ("granitemoehybrid", {})):
        assert find_rotary(family, values) is None


def tiny(folder: Path, model: str, **values: Any) -> Any:
    """Save a tiny model, and return it as transformers loads it."""
    kind = getattr(transformers, model)
    torch.manual_seed(0)
    sizes = {**_ENCODER, "max_position_embeddings": 64, **values}
    kind(kind.config_class(**sizes)).save_pretrained(folder)
    return kind.from_pretrained(folder).eval()


def outputs_of(frontend: FrontEnd, length: int = 9, offset: int = 0) -> dict[str, Tensor]:
    return frontend.rotary_outputs(torch.zeros((2, length), dtype=torch.int64), offset)


ESM = {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 98, "token_dropout": True}


def test_esm_rotary_positions_count_padding(tmp_path: Path) -> None:
    model, seen = tiny(tmp_path, "EsmModel", **ESM), []
    model.rotary_embeddings.register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    ids = torch.tensor([[1, 1, 5, 6], [7, 8, 9, 1]])
    model(input_ids=ids, attention_mask=(ids != 1).long())
    frontend = read_frontend(tmp_path)
    assert frontend.config.needs_mask
    ((cos, sin),) = seen
    assert [torch.equal(a, b) for a, b in zip(outputs_of(frontend, 4).values(), (cos, sin), strict=True)] == [True] * 2


@pytest.mark.parametrize("place", ["rotary_embeddings", "encoder.layer.0.attention.self.rotary_embeddings"])
def test_stored_esm_frequencies_override_config(tmp_path: Path, place: str) -> None:
    tiny(tmp_path, "EsmModel", **ESM)
    file = tmp_path / "model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if "inv_freq" not in key}
    narrow = (1.0 / 10000 ** (torch.arange(0, 8, 2) / 8)).half()
    save_file(tensors | {f"{place}.inv_freq": narrow}, file, metadata={"format": "pt"})
    model = transformers.EsmModel.from_pretrained(tmp_path)
    assert model.rotary_embeddings is not None
    expected = model.rotary_embeddings(torch.zeros(1), torch.arange(9).unsqueeze(0))
    frontend = read_frontend(tmp_path)
    assert frontend.config.rotary[0].config.scaling == "given"
    assert all(torch.equal(a, b) for a, b in zip(outputs_of(frontend).values(), expected, strict=True))
    again = FrontEndConfig.from_document(json.loads(json.dumps(frontend.config.to_document())))
    assert again.rotary == frontend.config.rotary

    save_file(tensors | {f"{place}.inv_freq": narrow[:3].clone()}, file)
    with pytest.raises(CheckpointError, match=r"frequencies: got .*, expected 4 numbers"):
        read_frontend(tmp_path)


def test_changed_roformer_table_disables_rotary_outputs(tmp_path: Path) -> None:
    tiny(tmp_path, "RoFormerModel")
    assert read_frontend(tmp_path).config.rotary
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.embed_positions.weight"] = tensors["encoder.embed_positions.weight"].half()
    save_file(tensors, file)
    config = read_frontend(tmp_path).config
    assert config.rotary == ()
    assert config.no_rotary is not None
    assert "encoder.embed_positions.weight" in config.no_rotary


@pytest.mark.parametrize("family", ["gptj", "codegen", "roformer", "llama", "nomic_bert"])
def test_rotate_matches_transformers(family: str) -> None:
    torch.manual_seed(0)
    query, row = torch.randn(1, 2, 9, 16), ROTARY[family]
    cos, sin = RotaryEmbedding(RotaryConfig(dim=16))(torch.zeros(1, 9, dtype=torch.int64))
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if row.layout == "half":
        expected = modeling.apply_rotary_pos_emb(query, query, cos, sin)[0]
    elif family == "roformer":
        table = torch.cat((sin[..., :8], cos[..., :8]), -1)[:, None]
        expected = modeling.RoFormerSelfAttention.apply_rotary_position_embeddings(table, query, query)[0]
    else:
        turned = modeling.apply_rotary_pos_emb(query.transpose(1, 2), sin[..., :8], cos[..., :8])
        expected = turned.transpose(1, 2)
    assert torch.equal(rotate(query, cos, sin, row.layout), expected)


def test_length_dependent_rotary_needs_rotary_length(tmp_path: Path) -> None:
    model = tiny(tmp_path, "LlamaModel", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    left_out = read_frontend(tmp_path)
    assert (left_out.config.rotary, left_out.signature.rotary) == ((), {})
    assert left_out.config.no_rotary == (
        "rope_type 'dynamic' depends on the length of the whole sequence, and none was given"
    )
    assert FrontEndConfig.from_document(left_out.config.to_document()).no_rotary == left_out.config.no_rotary

    frontend = read_frontend(tmp_path, rotary_length=200)
    assert frontend.signature.rotary == {"rotary_cos": 8, "rotary_sin": 8}
    assert (frontend.signature.rotary_len, frontend.signature.max_len) == (200, 64)
    expected = model.rotary_emb(torch.zeros(1), torch.arange(200).unsqueeze(0))
    for found, whole in zip(outputs_of(frontend, 5, 195).values(), expected, strict=True):
        assert torch.equal(found, whole[:, 195:])
    with pytest.raises(ValueError, match="position: got 200, expected 0 to 199"):
        outputs_of(frontend, 5, 196)


def test_needless_rotary_length_is_rejected(tmp_path: Path) -> None:
    save("llama", tmp_path / "llama")
    save("bert", tmp_path / "bert")
    for family, why in (("llama", "the angles of 'llama' here do not"), ("bert", "'bert' here has no rotary")):
        with pytest.raises(CheckpointError, match=f"--rotary-length: {why}"):
            read_frontend(tmp_path / family, rotary_length=100)


@pytest.mark.parametrize("length", [0, -1])
def test_non_positive_rotary_length_is_rejected(tmp_path: Path, length: int) -> None:
    tiny(tmp_path, "LlamaModel", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    with pytest.raises(CheckpointError, match=f"length: got {length}, expected more than 0"):
        read_frontend(tmp_path, rotary_length=length)


def test_layer_types_have_separate_rotary_outputs(tmp_path: Path) -> None:
    save("modernbert", tmp_path)
    frontend = read_frontend(tmp_path)
    names = [f"rotary_{part}_{layer}_attention" for layer in ("full", "sliding") for part in ("cos", "sin")]
    assert list(frontend.signature.rotary) == list(outputs_of(frontend)) == names
    assert frontend.config.tokens.rows == VOCABULARY
    per_row = frontend.rotary_outputs(torch.zeros((2, 9), dtype=torch.int64), torch.tensor([0, 30]))
    assert {tuple(tensor.shape) for tensor in per_row.values()} == {(2, 9, 8)}
    assert {tuple(tensor.shape) for tensor in outputs_of(frontend).values()} == {(1, 9, 8)}
    assert {tensor.dtype for tensor in per_row.values()} == {torch.float32}
