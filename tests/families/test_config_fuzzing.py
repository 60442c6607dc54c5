"""Edited configurations against transformers: the edits that once gave other vectors, and a sample of all."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from tests.families.config_edits import REMOVED, Edit, edits_of, save_whole, try_edit
from tests.families.config_fuzzing import DOCUMENT, WRONG, try_family
from tests.families.published_models import PUBLISHED
from tests.families.table import versions

SAMPLED = 5
"""Edits of each family; `make discover-fuzz` tries all of them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_sampled_config_edits_never_give_wrong_vectors(name: str, tmp_path: Path) -> None:
    config = save_whole(name, tmp_path / "source")
    for number, edit in enumerate(random.Random(name).sample(list(edits_of(config)), SAMPLED)):
        outcome = try_edit(name, tmp_path / "source", config, edit, tmp_path / str(number))
        assert outcome.kind not in WRONG, (edit, outcome)


def test_config_document_lists_every_family_without_difference() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    rows = [line.split("|") for line in document.partition("Preblock alone refuses")[0].splitlines()]
    different = {row[1].strip(" `"): int(row[3]) for row in rows if len(row) > 3 and row[1].startswith(" `")}
    assert different == dict.fromkeys(PUBLISHED, 0)
    assert versions() in document


YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek_v2", {"max_position_embeddings": 1}, "equal"),
        ("gpt_oss", {"max_position_embeddings": 1}, "equal"),
        ("gpt_oss", {"rope_parameters": {**YARN, "truncate": None}}, "equal"),
        ("deepseek_v3", {"head_dim": 2}, "preblock refuses"),
        ("granitemoehybrid", {"position_embedding_type": None}, "equal"),
        ("esm", {"position_embedding_type": None}, "equal"),
        ("esm", {"mask_token_id": 1}, "preblock refuses"),
        ("esm", {"mask_token_id": 1, "token_dropout": False}, "equal"),
        ("funnel", {"pad_token_id": 2}, "equal"),
        ("funnel", {"pad_token_id": -1}, "equal"),
        ("funnel", {"pad_token_id": REMOVED}, "equal"),
        ("funnel", {"pad_token_id": 99}, "refused"),
        ("gemma3_text", {"layer_types": None}, "equal"),
        ("gemma3_text", {"layer_types": [FULL, FULL]}, "equal"),
        ("gemma3_text", {"layer_types": [FULL, "chunked_attention"]}, "refused"),
        ("gemma3_text", {"sliding_window_pattern": 1}, "equal"),
        ("gemma3_text", {"sliding_window_pattern": 2}, "equal"),
        ("gemma4_text", {"num_hidden_layers": 0}, "refused"),
        ("gemma4_text", {"hidden_size_per_layer_input": -1}, "refused"),
        ("gemma4_text", {"rms_norm_eps": -1.0}, "preblock refuses"),
        ("qwen2_vl/text", {"text_config": {}}, "refused"),
        ("qwen3_vl/text", {"text_config": {}}, "refused"),
        ("qwen3_5/text", {"text_config": None}, "refused"),
        ("gemma3n/text", {"text_config": {}}, "refused"),
        ("gemma3n/text", {"audio_config": {}}, "transformers refuses"),
        ("qwen2_5_vl/text", {"vision_config": {}}, "transformers refuses"),
        ("modernbert", {"num_hidden_layers": 1}, "equal"),
        ("modernbert", {"global_attn_every_n_layers": 1}, "equal"),
        ("modernbert", {"num_hidden_layers": 0}, "refused"),
        ("modernbert", {"layer_types": [SLIDING, SLIDING]}, "equal"),
    ],
)
def test_config_edit_has_expected_outcome(name: str, changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    config = save_whole(name, tmp_path / "source")
    *others, last = changes.items()
    for key, value in others:
        config[key] = value
    outcome = try_edit(name, tmp_path / "source", config, Edit((last[0],), last[1]), tmp_path / "edited")
    assert outcome.kind == expected, outcome


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "head_dim", 10**9),
        ("gptj", "rotary_dim", 10**9),
        ("ctrl", "n_positions", 10**9),
        ("xglm", "max_position_embeddings", 10**9),
        ("marian/encoder", "max_position_embeddings", 10**9),
    ],
)
def test_oversized_config_value_is_rejected(name: str, key: str, value: int, tmp_path: Path) -> None:
    config = save_whole(name, tmp_path / "source") | {key: value}
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{key}: got 1000000000, expected 1 to"):
        read_frontend(tmp_path / "source", name.partition("/")[2] or None)


def test_interrupted_config_run_is_continued(tmp_path: Path) -> None:
    edits = [str(edit) for edit in edits_of(save_whole("t5/encoder", tmp_path / "source"))]
    record = {"family": "t5/encoder", "kind": "equal", "detail": "", "versions": versions()}
    lines = [json.dumps(record | {"edit": edit}) for edit in edits]
    other_version = json.dumps(record | {"edit": edits[-3], "versions": "another"})
    state = tmp_path / "state.jsonl"
    state.write_text("\n".join([*lines[:-3], other_version, lines[-2][:20]]))
    try_family("t5/encoder", state)
    added = state.read_text().splitlines()[-3:]
    assert [json.loads(line)["edit"] for line in added] == edits[-3:]
