"""Spellings of rope settings in `config.json`, in types that read them in different ways. Oracle: transformers."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from preblock.models.checkpoints.rotary_reader import read_rotary
from preblock.models.modules.rotary_embedding import RotaryEmbedding
from tests.families.library_models import config_class, model_class
from tests.families.published_models import PUBLISHED
from tests.models.checkpoints.rotary_models import ROTARY, config_of, rotary_of
from tests.models.checkpoints.test_rotary_families import POSITIONS, library

PLAIN, FULL, SLIDING = {"rope_type": "default"}, "full_attention", "sliding_attention"
LINEAR, OLD = {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 2.0}
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
            expected = library(family, values)
        except Exception:  # the library has many errors
            expected = {}
        if (family, name) == ("gpt_oss", "share"):  # its default is a scaling: see the last test
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


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "deepseek_v3"])
def test_share_of_scaled_whole_heads_fails_in_library(family: str) -> None:
    rope = LINEAR | THETA | {"partial_rotary_factor": 0.5}
    row = ROTARY[family]
    values = {"rope_parameters": rope if "" in row.thetas else dict.fromkeys(row.thetas, rope)}
    with pytest.raises(ValueError, match=r"partial_rotary_factor: got 0\.5, expected 1 with rope_type 'linear'"):
        read_rotary(row, values, 32, 64)
    config = {**PUBLISHED[family].config, **deepcopy(values)}
    model = model_class(family)(config_class(family)(**config))
    with pytest.raises(RuntimeError, match="must match the size"):
        model(input_ids=torch.arange(9)[None])
