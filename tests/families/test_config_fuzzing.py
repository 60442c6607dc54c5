"""Edited configurations against transformers: the edits that once gave other vectors."""

import json
from pathlib import Path
from typing import Any

import pytest

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from tests.families.config_edits import REMOVED, Edit, save_whole, try_edit
from tests.families.config_fuzzing import DOCUMENT
from tests.families.published_models import LONGEST, PUBLISHED, WIDTH
from tests.families.table import versions
from tests.models.rejections import rejection


def test_config_document_lists_every_family_without_difference() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    rows = [line.split("|") for line in document.partition("Preblock alone refuses")[0].splitlines()]
    different = {row[1].strip(" `"): int(row[3]) for row in rows if len(row) > 3 and row[1].startswith(" `")}
    assert different == dict.fromkeys(PUBLISHED, 0)
    assert versions() in document


YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4}
FULL, SLIDING = "full_attention", "sliding_attention"


OUTCOMES: dict[str, list[tuple[dict[str, Any], str]]] = {
    # Other names of the width and of the limit, which the library reads too.
    "ctrl": [
        ({"hidden_size": WIDTH, "max_position_embeddings": LONGEST, "n_positions": REMOVED, "n_embd": REMOVED}, "equal")
    ],
    "gptj": [
        ({"max_position_embeddings": 16, "n_positions": REMOVED}, "equal"),
        ({"max_position_embeddings": 16}, "preblock refuses"),
    ],
    "xglm": [({"hidden_size": WIDTH, "d_model": REMOVED}, "equal")],
    "roberta": [({"pad_token_id": REMOVED}, "equal")],
    "deepseek_v2": [({"max_position_embeddings": 1}, "equal")],
    "deepseek_v3": [({"head_dim": 2}, "preblock refuses")],
    "gpt_oss": [
        ({"max_position_embeddings": 1}, "equal"),
        ({"rope_parameters": {**YARN, "truncate": None}}, "equal"),
    ],
    "granitemoehybrid": [({"position_embedding_type": None}, "equal")],
    "esm": [
        ({"position_embedding_type": None}, "equal"),
        ({"mask_token_id": 1}, "preblock refuses"),
        ({"mask_token_id": 1, "token_dropout": False}, "equal"),
    ],
    "funnel": [
        *(({"pad_token_id": value}, "equal") for value in (2, -1, REMOVED)),
        ({"pad_token_id": 99}, "refused"),
    ],
    "gemma3_text": [
        *(({"layer_types": value}, "equal") for value in (None, [FULL, FULL])),
        ({"layer_types": [FULL, "chunked_attention"]}, "refused"),
        *(({"sliding_window_pattern": value}, "equal") for value in (1, 2)),
    ],
    "gemma4_text": [
        ({"num_hidden_layers": 0}, "refused"),
        ({"hidden_size_per_layer_input": -1}, "refused"),
        ({"rms_norm_eps": -1.0}, "preblock refuses"),
    ],
    "qwen3_5/text": [({"text_config": {}}, "refused"), ({"text_config": None}, "refused")],
    "gemma3n/text": [({"text_config": {}}, "refused"), ({"audio_config": {}}, "transformers refuses")],
    "modernbert": [
        *(({key: 1}, "equal") for key in ("num_hidden_layers", "global_attn_every_n_layers")),
        ({"num_hidden_layers": 0}, "refused"),
        ({"layer_types": [SLIDING, SLIDING]}, "equal"),
    ],
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_config_edits_have_expected_outcomes(name: str, tmp_path: Path) -> None:
    config = save_whole(name, tmp_path / "source")
    for number, (changes, expected) in enumerate(OUTCOMES[name]):
        *others, (key, value) = changes.items()
        edit = Edit((key,), value)
        outcome = try_edit(name, tmp_path / "source", config | dict(others), edit, tmp_path / str(number))
        assert outcome.kind == expected, (changes, outcome)


def test_oversized_config_value_is_rejected(tmp_path: Path) -> None:
    for name, key in (
        ("llama", "head_dim"),
        ("gptj", "rotary_dim"),
        ("ctrl", "n_positions"),
        ("xglm", "max_position_embeddings"),
        ("marian/encoder", "max_position_embeddings"),
    ):
        config = save_whole(name, tmp_path) | {key: 10**9}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = rejection(CheckpointError, read_frontend, tmp_path, name.partition("/")[2] or None)
        assert f"{key}: got 1000000000, expected 1 to" in found
