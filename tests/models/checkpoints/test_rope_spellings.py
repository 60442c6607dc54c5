"""Spellings of rope settings in `config.json`, in types that read them in different ways. Oracle: transformers."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from preblock.models.checkpoints.rotary_families import find_rotary
from preblock.models.checkpoints.rotary_reader import read_rotary
from preblock.models.modules.rotary_embedding import RotaryEmbedding
from tests.models.checkpoints.rotary_models import config_of
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
    "share": {"partial_rotary_factor": 0.5},
    "share inside": {"rope_parameters": PLAIN | THETA | {"partial_rotary_factor": 0.5}},
}


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "phi", "gpt_neox", "gpt_oss", "qwen2", "gemma3_text", "gemma4_text", "olmo3", "modernbert"),
        *("gptj", "codegen"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the library, on keys that it does not read
def test_spelling_loads_with_angles_of_transformers(family: str) -> None:
    sizes = config_of(family, {})
    for name, values in SPELLINGS.items():
        row = find_rotary(family, values)
        assert row is not None
        try:
            expected = library(family, values)
        except Exception:  # the library has many errors
            expected = {}
        if (family, name) == ("gpt_oss", "share"):  # too few columns for its attention, which fails
            expected = {}
        try:
            outputs = read_rotary(row, deepcopy(values), sizes.hidden_size, sizes.max_position_embeddings)
        except ValueError:
            outputs = ()
        found = {output.name: RotaryEmbedding(output.config)(POSITIONS, position_ids=POSITIONS) for output in outputs}
        assert found.keys() == expected.keys(), (name, values)
        for layer, tables in expected.items():
            assert all(map(torch.equal, found[layer], tables)), name
