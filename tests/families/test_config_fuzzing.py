"""Edited configurations against transformers: the edits that once gave other vectors, and a sample of all."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from tests.families.config_edits import REMOVED, Edit, edits_of, save_whole, try_edit
from tests.families.config_fuzzing import WRONG
from tests.families.published_models import PUBLISHED

SAMPLED = 5
"""Edits of each family; `make discover-fuzz` tries all of them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_sample_of_edits_changes_no_vector_silently(name: str, tmp_path: Path) -> None:
    config = save_whole(name, tmp_path / "source")
    for number, edit in enumerate(random.Random(name).sample(list(edits_of(config)), SAMPLED)):
        outcome = try_edit(name, tmp_path / "source", config, edit, tmp_path / str(number))
        assert outcome.kind not in WRONG, (edit, outcome)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
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
        ("modernbert", {"num_hidden_layers": 1}, "equal"),
        ("modernbert", {"global_attn_every_n_layers": 1}, "equal"),
        ("modernbert", {"num_hidden_layers": 0}, "refused"),
        ("modernbert", {"layer_types": [SLIDING, SLIDING]}, "equal"),
    ],
)
def test_an_edit_means_what_it_means_to_transformers(
    name: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
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
def test_a_size_that_would_fill_the_memory_is_refused(name: str, key: str, value: int, tmp_path: Path) -> None:
    config = save_whole(name, tmp_path / "source") | {key: value}
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{key}: got 1000000000, expected"):
        read_frontend(tmp_path / "source", name.partition("/")[2] or None)


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    command = [sys.executable, "-m", "tests.families.config_fuzzing", "t5/encoder", "--state", str(state)]
    subprocess.run(command, check=True, capture_output=True)
    lines = state.read_text().splitlines()
    assert len({json.loads(line)["edit"] for line in lines}) == len(lines) > 100
    state.write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:20])
    subprocess.run(command, check=True, capture_output=True)
    continued = state.read_text().splitlines()
    assert [json.loads(line)["edit"] for line in continued[len(lines) - 1 :]] == [
        json.loads(line)["edit"] for line in lines[-2:]
    ]
