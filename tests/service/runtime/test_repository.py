"""The models of a folder: discovery, names, and the errors of broken ones."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from preblock.service.artifacts.catalog import find_artifacts
from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST, PARITY
from preblock.service.core.auth import Authenticator, new_key, read_keys
from preblock.service.core.errors import ArtifactError, Forbidden, NotFound, Unavailable
from preblock.service.runtime.model_control import ModelControl
from preblock.service.runtime.repository import Repository
from tests.support.artifacts import copy_artifact, make_repository


@pytest.fixture
def root(tiny_repository: Path, tmp_path: Path) -> Path:
    """A copy of the tiny repository, to break."""
    return shutil.copytree(tiny_repository, tmp_path / "root")


def test_highest_version_is_the_default(root: Path) -> None:
    shutil.rmtree(root / "bert/1")
    shutil.move(root / "bert/2", root / "bert/10")
    copy_artifact("bert", root)
    repository = Repository(root)
    assert [repository.get("bert", version).version for version in (None, "", "1")] == [10, 10, 1]
    assert repository.versions("bert") == [1, 10]
    assert [(model.name, model.version) for model in repository.all()] == [("bert", 1), ("bert", 10), ("gpt", 1)]
    assert {name: model.version for name, model in repository.newest().items()} == {"bert": 10, "gpt": 1}


def test_version_in_another_spelling_is_not_found(tiny_repository: Path) -> None:
    repository = Repository(tiny_repository)
    for version in ("1\n", "../bert/1", "\u0661", "9" * 5000):  # the third one is a digit in Arabic
        with pytest.raises(NotFound, match=r"^version: got "):
            repository.get("bert", version)


@pytest.mark.parametrize("name", [MANIFEST, PARITY, GRAPH, DATA])
def test_missing_file_is_rejected(tmp_path: Path, name: str) -> None:
    (copy_artifact("bert", tmp_path) / name).unlink()
    reason = "is missing" if name in (GRAPH, DATA) else "cannot be read: no such file or directory"
    with pytest.raises(ArtifactError, match=f"^bert/1/{name} {reason}$"):
        Repository(tmp_path)


def test_empty_repository_is_not_ready(tmp_path: Path) -> None:
    repository = Repository(tmp_path, aliases={"one": "gpt"})
    repository.check_aliases()
    with pytest.raises(Unavailable, match="no model is served"):
        repository.check_ready()
    copy_artifact("gpt", tmp_path)
    assert [state.state for state in repository.refresh()] == ["READY"]
    repository.check_ready()
    assert repository.find("one").name == "gpt"


def test_model_folder_with_wrong_name_is_skipped(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("gpt\u00e9", "my copy"):
        shutil.copytree(root / "gpt", root / name)
    for _ in range(2):
        assert {model for model, _, _ in find_artifacts(root)} == {"bert", "gpt"}
    assert len(caplog.messages) == 2
    assert all("is skipped: its name may have only letters" in message for message in caplog.messages)


ALIASES = {"embeddings": "bert", "words": "gpt"}


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


def test_alias_requires_access_and_does_not_reveal_its_model(tiny_repository: Path, tmp_path: Path) -> None:
    keys = (("model", "bert", False), ("alias", "embeddings", False), ("other", "gpt", True))
    (tmp_path / "keys.toml").write_text("".join(new_key(name, (scope,), admin)[1] for name, scope, admin in keys))
    access = Authenticator(tmp_path / "keys.toml")
    repository = Repository(tiny_repository, access=access, aliases=ALIASES)
    by_model, by_alias, other = read_keys(tmp_path / "keys.toml")
    assert repository.find("embeddings", caller=by_model).name == "bert"
    assert list(repository.newest(by_model)) == ["bert", "embeddings"]
    with pytest.raises(Forbidden, match=r"^this key lists the alias embeddings, but not its model; list both$"):
        repository.find("embeddings", caller=by_alias)
    assert repository.index(by_alias) == []
    control = ModelControl(repository, "explicit", 1)
    actions: list[Callable[[], object]] = [
        lambda: repository.find("embeddings", caller=other),
        lambda: asyncio.run(control.load("embeddings", other)),
        lambda: asyncio.run(control.unload("embeddings", other)),
    ]
    for act in actions:
        with pytest.raises(Forbidden, match=r"^this key may not use the model embeddings; it may use gpt$") as refused:
            act()
        assert refused.value.got == "embeddings"


@pytest.mark.parametrize("level", [".", "gpt", "gpt/1"])
def test_repository_folders_may_be_symlinks(weighty_repository: Path, tmp_path: Path, level: str) -> None:
    """Modelcar links the folder of the models, and the storage initializer each entry of a volume."""
    link = tmp_path / "models" / level
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(weighty_repository / level)
    linked = Repository(tmp_path / "models").get("gpt")
    assert linked.identity == Repository(weighty_repository).get("gpt").identity
