"""Sources and their front-ends."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from preblock.export.arguments import HUB
from preblock.export.errors import ExportError
from preblock.export.source import load_source
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.frontend import FrontEnd
from preblock.service.artifacts.records import Source


def test_a_folder_is_read_as_a_checkpoint(tiny_checkpoint: Path) -> None:
    loaded = load_source(str(tiny_checkpoint))
    expected = read_frontend(tiny_checkpoint).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.frontend.state_dict().items())
    assert loaded.record.kind == "folder"
    assert loaded.tokenizer == tiny_checkpoint / "tokenizer.json"


def test_a_preset_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_source("transformer-base")
    assert loaded.record == Source(kind="preset", name="transformer-base")
    assert isinstance(loaded.frontend, FrontEnd)
    assert loaded.frontend.signature.vocab_size == 32000
    assert loaded.tokenizer is None


def test_a_folder_comes_before_a_preset_of_its_name(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-small").symlink_to(tiny_checkpoint)
    loaded = load_source("gpt2-small")
    assert loaded.record.kind == "folder"
    assert isinstance(loaded.frontend, FrontEnd)
    assert loaded.frontend.signature.vocab_size == 40


def test_a_folder_comes_before_a_hub(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:owner").mkdir()
    (tmp_path / "hf:owner" / "name").symlink_to(tiny_checkpoint)
    assert load_source("hf:owner/name").record.kind == "folder"


@pytest.mark.parametrize(
    ("source", "name", "revision"),
    [
        ("hf:openai-community/gpt2", "openai-community/gpt2", None),
        ("hf:a/b.c-d_e@v1.0", "a/b.c-d_e", "v1.0"),
        ("hf:a/b@refs/pr/3", "a/b", "refs/pr/3"),
    ],
)
def test_a_hub_source_names_a_repository_and_perhaps_a_revision(source: str, name: str, revision: str | None) -> None:
    match = HUB.fullmatch(source)
    assert match is not None
    assert (match["name"], match["revision"]) == (name, revision)


@pytest.mark.parametrize(("side", "arithmetic"), [("encoder", "float32"), (None, "source")])
def test_a_preset_leaves_no_choice(side: str | None, arithmetic: Literal["float32", "source"]) -> None:
    with pytest.raises(ExportError, match=r"--(side|arithmetic) is only for published checkpoints; gpt2-small is none"):
        load_source("gpt2-small", side=side, arithmetic=arithmetic)


def test_a_preset_has_no_segments_to_choose() -> None:
    with pytest.raises(ExportError, match="--segments is only for published checkpoints"):
        load_source("gpt2-small", segments=True)


def test_a_checkpoint_whose_segments_are_no_choice_says_so(tiny_checkpoint: Path) -> None:
    with pytest.raises(ExportError, match=r"--segments is only for .*; the model is 'bert'"):
        load_source(str(tiny_checkpoint), segments=True)
