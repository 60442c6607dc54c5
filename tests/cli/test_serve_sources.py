"""`preblock serve SOURCE`: sources are exported before anything is served, and only once."""

import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.command_line import failing, run
from tests.families.tiny_models import save_whole
from tests.support.checkpoints import random_gpt2
from tests.support.servers import in_use, serve
from tests.support.tokenizers import WORDS, write_tokenizer


def save_checkpoint(folder: Path) -> Path:
    """Save a tiny GPT-2 with a tokenizer."""
    write_tokenizer(random_gpt2(folder, len(WORDS)) / "tokenizer.json")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "tiny")


@pytest.fixture
def prepare(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Start a server on a used port, so that it ends after the exports; return their lines on standard error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def start(*arguments: str | Path) -> list[str]:
            done = run("serve", *arguments, "--repository", tmp_path / "r", "--port", str(port))
            *lines, last = done.stderr.splitlines()
            assert (done.returncode, done.stdout) == (1, ""), done.stderr
            assert last == f"preblock: {in_use(port)}"
            return lines

        yield start


def versions(repository: Path) -> dict[str, list[str]]:
    """Return the entries of each model's folder."""
    return {folder.name: sorted(version.name for version in folder.iterdir()) for folder in repository.iterdir()}


def test_folder_and_preset_are_exported_and_served(source: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "r", str(source), "transformer-base") as server:
        assert "  tiny: gpt2, ids 0 to 10, max_len 6, width 4, " in server.banner
        for model, width in (("tiny", 4), ("transformer-base", 512)):
            answer = httpx.post(f"{server.address}/models/{model}/embed", json={"input_ids": [[1, 2, 3]]}, timeout=60)
            assert answer.json()["shape"] == [1, 3, width]
    assert versions(tmp_path / "r") == {"tiny": ["1"], "transformer-base": ["1"]}


def test_second_start_exports_nothing(source: Path, prepare: Callable[..., list[str]]) -> None:
    *progress, last = prepare(source, "--name", "mine")
    assert progress[0] == f"mine: reading {source}"
    assert last == f"mine: exported {source} as version 1"
    assert prepare(source, "--name", "mine") == [f"mine: version 1 is the export of {source} already"]
    moved = source.rename(source.with_name("moved"))
    assert prepare(moved, "--name", "mine") == [f"mine: version 1 is the export of {moved} already"]


def test_changed_source_is_exported_again(source: Path, tmp_path: Path, prepare: Callable[..., list[str]]) -> None:
    prepare(source)
    random_gpt2(source, len(WORDS))
    assert prepare(source)[-1] == f"tiny: exported {source} as version 2"
    run("export", source, "--repository", tmp_path / "r", "--dtype", "float16")
    assert prepare(source)[-1] == f"tiny: exported {source} as version 4"
    assert prepare(source) == [f"tiny: version 4 is the export of {source} already"]


def test_other_file_in_folder_of_model_is_no_version(
    source: Path, tmp_path: Path, prepare: Callable[..., list[str]]
) -> None:
    prepare(source)
    (tmp_path / "r" / "tiny" / "7").write_text("notes")
    assert prepare(source) == [f"tiny: version 1 is the export of {source} already"]
    random_gpt2(source, len(WORDS))
    assert prepare(source)[-1] == f"tiny: exported {source} as version 8"


def test_discovery_of_another_library_is_exported_again(tmp_path: Path, prepare: Callable[..., list[str]]) -> None:
    source = tmp_path / "found"
    save_whole("helium", source)
    prepare(source)
    assert prepare(source) == [f"found: version 1 is the export of {source} already"]
    manifest = tmp_path / "r" / "found" / "1" / "manifest.json"
    manifest.write_text(re.sub("transformers [0-9.]+", "transformers 5.0.0", manifest.read_text()))
    assert prepare(source)[-1] == f"found: exported {source} as version 2"


def test_wrong_sources_are_usage_errors(
    tiny_repository: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(source, tmp_path / "other" / "tiny")
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["--name", "a/b", "tiny"], "--name: got 'a/b', expected 1 to 128 letters"),
        (["--name", "a"], "--name: got 'a' and 0 sources, expected one SOURCE"),
        (["--name", "a", "tiny", "gpt2-small"], "--name: got 'a' and 2 sources, expected one SOURCE"),
        (
            ["tiny", "other/tiny"],
            "SOURCE: got tiny and other/tiny, both for a model 'tiny', expected different names; ",
        ),
    ):
        assert failing("serve", *arguments, "--repository", "r", code=2).startswith(message)
    assert not (tmp_path / "r").exists()
    for command in ("serve", "export"):
        message = failing(command, "bert", "--repository", tiny_repository, code=2)
        expected = f"{tiny_repository} has a model of this name, which `preblock serve` without SOURCE serves"
        assert message == f"SOURCE: 'bert' is neither a folder nor a preset; {expected}"


def test_failed_export_serves_nothing(source: Path, tmp_path: Path) -> None:
    damaged = save_checkpoint(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"")
    done = run("serve", source, damaged, "--repository", tmp_path / "r", "--port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    *_, exported, reading, error = done.stderr.splitlines()
    assert exported == f"tiny: exported {source} as version 1"
    assert reading == f"damaged: reading {damaged}"
    assert error.startswith(f"preblock: {damaged}/model.safetensors: ")
    assert versions(tmp_path / "r") == {"tiny": ["1"]}


def test_damaged_newest_version_serves_nothing(source: Path, tmp_path: Path, prepare: Callable[..., list[str]]) -> None:
    prepare(source)
    (tmp_path / "r" / "tiny" / "1" / "manifest.json").write_text("{")
    message = failing("serve", source, "--repository", tmp_path / "r", "--port", "0", code=1)
    assert message.startswith(f"{tmp_path}/r/tiny/1: manifest.json is no JSON file: ")
