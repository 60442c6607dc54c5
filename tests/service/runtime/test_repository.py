"""The models of a folder: discovery, names, and the errors of broken ones."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preblock.service.artifacts.catalog import find_artifacts
from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST, PARITY
from preblock.service.core.auth import NOBODY, SERVICE, Authenticator, new_key, read_keys
from preblock.service.core.errors import ArtifactError, Forbidden, Invalid, NotFound, Unavailable
from preblock.service.runtime.model_control import ModelControl
from preblock.service.runtime.repository import Repository
from tests.support.artifacts import copy_artifact, make_repository


@pytest.fixture
def root(tiny_repository: Path, tmp_path: Path) -> Path:
    """A copy of the tiny repository, to break."""
    return shutil.copytree(tiny_repository, tmp_path / "root")


@pytest.fixture(scope="module")
def repository(tiny_repository: Path) -> Repository:
    """The tiny models, opened once for tests that change nothing."""
    return Repository(tiny_repository)


def refusal(root: Path) -> str:
    with pytest.raises(ArtifactError) as refused:
        Repository(root)
    return str(refused.value)


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_highest_version_is_the_default(root: Path) -> None:
    shutil.rmtree(root / "bert/1")
    shutil.move(root / "bert/2", root / "bert/10")
    copy_artifact("bert", root)
    repository = Repository(root)
    assert [repository.get("bert", version).version for version in (None, "", "1")] == [10, 10, 1]
    assert repository.versions("bert") == [1, 10]
    assert [(model.name, model.version) for model in repository.all()] == [("bert", 1), ("bert", 10), ("gpt", 1)]
    assert {name: model.version for name, model in repository.newest().items()} == {"bert": 10, "gpt": 1}


def test_unknown_model_or_version_is_not_found(repository: Repository) -> None:
    for name in ("nope", "../root/bert", ""):
        for version in (None, "1"):
            with pytest.raises(NotFound) as refused:
                repository.get(name, version)
            assert str(refused.value) == f"model: got {name}, expected bert, gpt"
    # The last but one is a digit in Arabic.
    for version in ("3", "0", "01", "+1", "1\n", "../bert/1", "\u0661", "9" * 5000):
        with pytest.raises(NotFound) as refused:
            repository.get("bert", version)
        assert (refused.value.field, refused.value.expected) == ("version", "1, 2")
        assert refused.value.got.rstrip("…") == version[:80]


def test_other_folders_and_files_are_not_artifacts(root: Path) -> None:
    for name in (".tmp-gpt-1/1", "gpt/.tmp-2", "gpt/0", "gpt/02", "gpt/latest", "gpt/2x", "gpt/1/1", "3"):
        (root / name).mkdir(parents=True)
    (root / "gpt" / "2").write_text("")
    assert [(found, version) for found, version, _ in find_artifacts(root)] == [("bert", 1), ("bert", 2), ("gpt", 1)]


def test_missing_repository_is_rejected(tmp_path: Path) -> None:
    message = f"the repository {tmp_path / 'no'} does not exist; `preblock export` makes one"
    assert refusal(tmp_path / "no") == message


def test_empty_repository_is_not_ready(tmp_path: Path) -> None:
    repository = Repository(tmp_path, aliases={"one": "gpt"})
    repository.check_aliases()
    with pytest.raises(Unavailable, match="no model is served"):
        repository.check_ready()
    copy_artifact("gpt", tmp_path)
    assert [state.state for state in repository.refresh()] == ["READY"]
    repository.check_ready()
    shutil.rmtree(tmp_path / "gpt")
    with pytest.raises(ArtifactError, match="holds no model"):  # perhaps an unmounted volume: the model keeps serving
        repository.refresh()
    repository.check_ready()
    repository.find("one")


@pytest.mark.parametrize("name", [MANIFEST, PARITY, GRAPH, DATA])
def test_missing_file_is_rejected(tmp_path: Path, name: str) -> None:
    (copy_artifact("bert", tmp_path) / name).unlink()
    reason = "is missing" if name in (GRAPH, DATA) else "cannot be read: no such file or directory"
    assert refusal(tmp_path) == f"bert/1/{name} {reason}"


@pytest.mark.parametrize(("name", "inputs"), [("gpt", ["input_ids"]), ("bert", ["input_ids", "offset", "positions"])])
def test_manifest_disagreeing_with_graph_is_rejected(tmp_path: Path, name: str, inputs: list[str]) -> None:
    tensors = [{"name": input_, "dtype": "int64", "shape": ["batch"]} for input_ in inputs]
    edit(copy_artifact(name, tmp_path) / MANIFEST, graphs={GRAPH: {"inputs": tensors, "outputs": []}})
    assert refusal(tmp_path).startswith(f"{name}/1/{MANIFEST} graphs.{GRAPH}.inputs: got input_ids int64 ['batch']")


@pytest.mark.parametrize(
    ("history", "field"),
    [
        (None, "history.tokens: got nothing"),
        ({"tokens": 3, "reset_id": 2}, "history.tokens: got {'ngram.ids.onnx': 3, 'ngrams.onnx': 3}"),
        ({"tokens": 2, "reset_id": 99}, "history.reset_id: got 99"),
        ({"tokens": 10**12, "reset_id": 2}, "history.tokens: got 1000000000000, expected at most 15"),
    ],
)
def test_history_inconsistent_with_graph_is_rejected(
    tmp_path: Path, history: dict[str, int] | None, field: str
) -> None:
    edit(copy_artifact("ngrams", tmp_path) / MANIFEST, history=history)
    assert refusal(tmp_path).startswith(f"ngrams/1/{MANIFEST} {field}")


@pytest.mark.parametrize("number", [2**62 + 1, 2**70])
def test_manifest_number_beyond_64_bits_is_rejected(tmp_path: Path, number: int) -> None:
    edit(copy_artifact("llama", tmp_path) / MANIFEST, max_len=number)
    assert refusal(tmp_path).startswith(f"llama/1/{MANIFEST} max_len: got {number}, expected at most {2**62}")


def test_model_folder_with_wrong_name_is_skipped(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("gpt\u00e9", "my copy"):
        shutil.copytree(root / "gpt", root / name)
    for _ in range(2):
        assert {model for model, _, _ in find_artifacts(root)} == {"bert", "gpt"}
    assert len(caplog.messages) == 2
    assert all("is skipped: its name may have only letters" in message for message in caplog.messages)


def test_model_is_visible_only_to_authorized_caller(tiny_repository: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(new_key("other", ("gpt",), admin=False)[1])
    repository = Repository(tiny_repository, access=Authenticator(keys))
    (other,) = read_keys(keys)
    for caller, names in ((NOBODY, []), (other, ["gpt"]), (SERVICE, ["bert", "gpt"])):
        assert list(repository.newest(caller)) == names
        assert sorted({model.name for model in repository.all(caller)}) == names
        assert sorted({state.name for state in repository.index(caller)}) == names
        if "bert" in names:
            assert repository.find("bert", caller=caller).version == 2
            continue
        with pytest.raises(Forbidden):
            repository.find("bert", caller=caller)
    with pytest.raises(Forbidden):
        repository.find("gpt")


ALIASES = {"embeddings": "bert", "words": "gpt"}


def test_alias_finds_every_version_of_its_model(tiny_repository: Path) -> None:
    repository = Repository(tiny_repository, aliases=ALIASES)
    repository.check_aliases()
    assert repository.find("embeddings") is repository.find("bert")
    assert repository.find("embeddings", "1") is repository.find("bert", "1")
    assert repository.versions("embeddings") == [1, 2]
    assert list(repository.newest()) == ["bert", "embeddings", "gpt", "words"]
    names = [(state.name, state.version, state.state) for state in repository.index()]
    assert names == [(name, version, "READY") for name in ("bert", "embeddings") for version in (1, 2)] + [
        ("gpt", 1, "READY"),
        ("words", 1, "READY"),
    ]
    assert len(repository.states()) == len(repository.all()) == 3
    with pytest.raises(NotFound, match="model: got nope, expected bert, embeddings, gpt, words"):
        repository.find("nope")


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"gpt": "bert"}, "the alias gpt of bert is the name of another model of the repository {root}"),
        ({"gpt": "gpt"}, "the alias gpt of gpt is the name of another model of the repository {root}"),
        ({"words": "nope"}, "alias words: the repository {root} has no model nope; it has bert, gpt"),
        ({"words": "gpt", "more": "words"}, "alias more: the repository {root} has no model words; it has bert, gpt"),
    ],
)
def test_invalid_alias_is_rejected(tiny_repository: Path, aliases: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid) as refused:
        Repository(tiny_repository, aliases=aliases).check_aliases()
    assert str(refused.value) == message.format(root=tiny_repository)


def test_alias_keeps_its_model_across_folder_changes(tmp_path: Path) -> None:
    root = make_repository(tmp_path, bert="bert", gpt="gpt")
    repository = Repository(root, aliases=ALIASES)
    shutil.copytree(root / "gpt", root / "embeddings")
    (change,) = repository.refresh()
    assert (change.name, change.state, change.reason) == ("embeddings", "UNAVAILABLE", "its name is an alias of bert")
    assert repository.find("embeddings").name == "bert"
    shutil.rmtree(root / "embeddings")
    shutil.move(root / "bert", root / ".bert")
    repository.refresh()
    with pytest.raises(NotFound, match="model: got embeddings, expected gpt, words"):
        repository.find("embeddings")
    shutil.move(root / ".bert", root / "bert")
    repository.refresh()
    assert repository.find("embeddings").name == "bert"


def test_alias_requires_access_to_its_model(tiny_repository: Path, tmp_path: Path) -> None:
    entries = [new_key("model", ("bert",), False)[1], new_key("alias", ("embeddings",), False)[1]]
    (tmp_path / "keys.toml").write_text("".join(entries))
    access = Authenticator(tmp_path / "keys.toml")
    repository = Repository(tiny_repository, access=access, aliases=ALIASES)
    by_model, by_alias = read_keys(tmp_path / "keys.toml")
    assert repository.find("embeddings", caller=by_model).name == "bert"
    assert list(repository.newest(by_model)) == ["bert", "embeddings"]
    message = "^this key lists the alias embeddings, but not its model; list both$"
    with pytest.raises(Forbidden, match=message):
        repository.find("embeddings", caller=by_alias)
    assert repository.index(by_alias) == []


def test_refused_alias_does_not_reveal_its_model(tiny_repository: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(new_key("gpt", ("gpt",), True)[1])
    access = Authenticator(tmp_path / "keys.toml")
    repository = Repository(tiny_repository, access=access, aliases=ALIASES)
    (of_gpt,) = read_keys(tmp_path / "keys.toml")
    control = ModelControl(repository, "explicit", 1)
    actions: list[Callable[[], object]] = [
        lambda: repository.find("embeddings", caller=of_gpt),
        lambda: asyncio.run(control.load("embeddings", of_gpt)),
        lambda: asyncio.run(control.unload("embeddings", of_gpt)),
    ]
    for act in actions:
        with pytest.raises(Forbidden) as refused:
            act()
        assert str(refused.value) == "this key may not use the model embeddings; it may use gpt"
        assert refused.value.got == "embeddings"


@pytest.mark.parametrize("level", [".", "gpt", "gpt/1"])
def test_repository_folders_may_be_symlinks(weighty_repository: Path, tmp_path: Path, level: str) -> None:
    """Modelcar links the folder of the models, and the storage initializer each entry of a volume."""
    link = tmp_path / "models" / level
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(weighty_repository / level)
    linked = Repository(tmp_path / "models").get("gpt")
    assert linked.identity == Repository(weighty_repository).get("gpt").identity


def test_files_may_have_several_hard_links(weighty_repository: Path, tmp_path: Path) -> None:
    """Storage initializers and container layers link files instead of copying them."""
    copied, linked = tmp_path / "copied", tmp_path / "linked"
    shutil.copytree(weighty_repository, copied)
    shutil.copytree(copied, linked, copy_function=os.link)
    assert (linked / "gpt/1" / GRAPH).stat().st_nlink == 2
    one, other = (Repository(folder).get("gpt").identity for folder in (copied, linked))
    assert one == other
