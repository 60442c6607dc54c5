"""Models come, change and go while others are served."""

import asyncio
import errno
import gc
import os
import shutil
import subprocess
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from preblock.service.artifacts.checksums import Checksums
from preblock.service.artifacts.io import describe
from preblock.service.artifacts.names import DATA, GRAPH, SOFT_PROMPTS
from preblock.service.core.errors import ArtifactError, NotFound, Unavailable
from preblock.service.runtime.loader import ModelLoader
from preblock.service.runtime.model import ServedModel
from preblock.service.runtime.model_control import ModelControl
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.worker_states import (
    AppliedState,
    applied,
    applied_file,
    read_desired,
    write_change,
    write_desired,
)
from tests.support.artifacts import copy_artifact, make_repository
from tests.support.event_loops import WaitedTimeLoop
from tests.support.references import edit_manifest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository", bert="bert", gpt="gpt")


def states(repository: Repository) -> dict[tuple[str, int], str]:
    return {(state.name, state.version): state.state for state in repository.index()}


def test_new_version_is_opened_beside_others(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "preblock.service.runtime.repository")
    repository = Repository(root)
    before = repository.get("gpt")
    assert repository.refresh() == []
    copy_artifact("gpt-again", root, "gpt")
    (change,) = repository.refresh()
    assert (change.name, change.version, change.state) == ("gpt", 2, "READY")
    assert repository.get("gpt").version == 2
    assert repository.get("gpt", "1") is before
    assert states(repository) == dict.fromkeys([("bert", 1), ("gpt", 1), ("gpt", 2)], "READY")
    for file in (root / "gpt/2").iterdir():
        file.touch()
    for loaded in (None, {"bert"}):
        repository.refresh(loaded)
    changes = ["2 loaded", "2 replaced", "1 unloaded", "2 unloaded"]
    assert caplog.messages[-4:] == [f"model gpt version {change}" for change in changes]


def test_broken_new_version_keeps_old_one_serving(root: Path) -> None:
    repository = Repository(root)
    folder = copy_artifact("gpt-again", root, "gpt")
    sound = (folder / GRAPH).read_bytes()
    (folder / GRAPH).write_bytes(b"no graph")
    (change,) = repository.refresh()
    assert (change.state, change.reason[:17]) == ("UNAVAILABLE", "gpt/2/model.onnx:")
    assert repository.get("gpt").version == 1
    with pytest.raises(NotFound):
        repository.get("gpt", "2")
    assert repository.refresh() == []
    (folder / GRAPH).write_bytes(sound)
    assert [state.state for state in repository.refresh()] == ["READY"]
    assert repository.get("gpt").version == 2


def test_broken_update_of_version_keeps_it_serving(root: Path) -> None:
    repository = Repository(root)
    before = repository.get("gpt")
    broken = root / "gpt/1" / GRAPH
    broken.unlink()  # not changed in place: the open file is mapped
    broken.write_bytes(b"no graph")
    (change,) = repository.refresh()
    assert (change.state, change.reason[:17]) == ("READY", "gpt/1/model.onnx:")
    assert repository.get("gpt") is before


@pytest.mark.parametrize("name", [DATA, SOFT_PROMPTS])
def test_version_with_changed_mapped_file_stops(root: Path, name: str) -> None:
    folder = root / "gpt/1"
    np.ones((2, 4), np.float32).tofile(folder / SOFT_PROMPTS)
    described = describe(folder / SOFT_PROMPTS).model_dump()
    prompts = {"polite": {"first": 0, "rows": 2}}
    edit_manifest(folder, lambda manifest: manifest["files"].update({SOFT_PROMPTS: described}))
    edit_manifest(folder, lambda manifest: manifest.update(soft_prompts=prompts))
    os.link(folder / name, root.parent / "second")  # a storage initializer of KServe links files, too
    repository = Repository(root)
    os.link(folder / name, root.parent / "third")
    assert [change.state for change in repository.refresh()] == ["READY"]
    with (folder / name).open("r+b") as file:
        file.write(b"other")
    (change,) = repository.refresh()
    assert (change.state, change.reason.partition(":")[0]) == ("UNAVAILABLE", f"gpt/1/{name}")
    with pytest.raises(NotFound):
        repository.get("gpt")


def test_removed_version_closes_after_its_last_request(root: Path) -> None:
    repository = Repository(root)
    held = repository.get("bert")
    session = weakref.ref(held.sessions[GRAPH])
    shutil.rmtree(root / "bert/1")
    (change,) = repository.refresh()
    assert (change.version, change.state, change.reason) == (1, "UNAVAILABLE", "gone")
    with pytest.raises(NotFound, match="model: got bert, expected gpt"):
        repository.get("bert")
    assert session() is not None
    del held
    gc.collect()
    assert session() is None


@pytest.mark.parametrize("empty", [True, False])
def test_unreadable_repository_changes_nothing(root: Path, empty: bool) -> None:
    repository = Repository(root)
    shutil.rmtree(root)
    if empty:
        root.mkdir()
    with pytest.raises(ArtifactError):
        repository.refresh()
    assert repository.get("gpt").version == 1
    assert set(states(repository).values()) == {"READY"}


@dataclass(frozen=True, kw_only=True)
class LackingLoader(ModelLoader):
    """Cannot open version 2 of `gpt` while it has a maker of an error."""

    faults: list[Callable[[], Exception]] = field(default_factory=list)

    def load(self, name: str, version: int, folder: Path, checksums: Checksums) -> ServedModel:
        if self.faults and (name, version) == ("gpt", 2):
            raise self.faults[0]()
        return super().load(name, version, folder, checksums)


@pytest.mark.parametrize(
    ("make_error", "reason", "is_tried_again"),
    [
        (lambda: OSError(errno.EMFILE, "Too many open files"), "gpt/2 cannot be opened now: too little", True),
        (lambda: PermissionError(errno.EACCES, "No permission", "a"), "gpt/2/a cannot be read: no permission", False),
    ],
)
def test_refresh_after_a_system_error_opens_other_versions(
    root: Path, make_error: Callable[[], OSError], reason: str, is_tried_again: bool
) -> None:
    loader = LackingLoader()
    repository = Repository(root, loader)
    for name in ("gpt/2", "gpt/3"):
        shutil.copytree(root / "gpt/1", root / name)
    loader.faults.append(make_error)
    changes = {change.version: change.reason for change in repository.refresh()}
    assert (changes[2].startswith(reason), changes[3]) == (True, ""), changes
    assert repository.versions("gpt") == [1, 3]
    assert repository.lacking == ({"gpt"} if is_tried_again else set())
    loader.faults.clear()
    assert [(change.version, change.state) for change in repository.refresh()] == [(2, "READY")] * is_tried_again
    assert not repository.lacking


def test_other_models_change_while_one_lacks_memory(root: Path) -> None:
    loader = LackingLoader()
    repository = Repository(root, loader)
    shutil.copytree(root / "gpt/1", root / "gpt/2")
    dropped = weakref.ref(repository.get("bert"))
    # As onnxruntime says it.
    loader.faults.append(lambda: RuntimeError("Failed to allocate memory for requested buffer of size 4096"))

    async def change() -> None:
        control = ModelControl(repository, "explicit", 1)
        with pytest.raises(Unavailable, match=r"^gpt/2 cannot be opened now: too little memory, or too many open "):
            await control.load("gpt")
        await control.unload("bert")
        gc.collect()
        assert dropped() is None  # an error may hold frames, and these the models
        await control.load("bert")
        following = asyncio.create_task(control.run())
        loader.faults.clear()
        while repository.versions("gpt") != [1, 2]:
            await asyncio.sleep(0.05)
        following.cancel()

    asyncio.run(asyncio.wait_for(change(), 60))


@pytest.mark.parametrize("shared", [False, True])
def test_models_are_loaded_and_unloaded_by_request(root: Path, tmp_path: Path, shared: bool) -> None:
    repository = Repository(root)
    (tmp_path / "shared").mkdir()

    async def change() -> None:
        control = ModelControl(repository, "explicit", 1, tmp_path / "shared" if shared else None)
        if shared:
            write_desired(tmp_path / "shared", control.first_state())
        following = asyncio.create_task(control.run())
        await control.unload("gpt")
        with pytest.raises(NotFound, match="model: got gpt, expected bert"):
            repository.get("gpt")
        assert [state.reason for state in repository.index() if state.name == "gpt"] == ["unloaded"]
        copy_artifact("gpt-again", root, "gpt")
        await control.load("gpt")
        assert repository.get("gpt").version == 2
        (copy_artifact("gpt-again", root, "gpt") / GRAPH).write_bytes(b"no graph")
        with pytest.raises(ArtifactError, match=r"gpt/3 cannot be opened: gpt/3/model\.onnx"):
            await control.load("gpt")
        assert repository.get("gpt").version == 2
        for call in (control.load, control.unload):
            with pytest.raises(NotFound, match="model: got nothing, expected bert, gpt"):
                await call("nothing")
        following.cancel()

    asyncio.run(change())


def test_load_overtaken_by_unload_raises_no_error(root: Path) -> None:
    async def change() -> None:
        control = ModelControl(Repository(root), "explicit", 1)

        async def unload_later() -> None:
            await asyncio.sleep(0.002)
            await control.unload("gpt")

        for _ in range(5):
            await asyncio.gather(*(control.load("gpt") for _ in range(3)), unload_later())

    asyncio.run(change())


@pytest.fixture
def worker(root: Path, tmp_path: Path) -> tuple[ModelControl, Path]:
    """Return the control of a worker that follows changes of others, and the folder through which they agree."""
    shared = tmp_path / "shared"
    shared.mkdir()
    control = ModelControl(Repository(root), "explicit", 1, shared)
    write_desired(shared, control.first_state())
    return control, shared


def test_worker_joins_with_the_latest_change(worker: tuple[ModelControl, Path], root: Path) -> None:
    control, shared = worker
    ended = subprocess.Popen(["true"])
    ended.wait()
    applied_file(shared, ended.pid).write_text(AppliedState().model_dump_json())
    number = write_change(shared, root, "gpt", unloaded=True)
    asyncio.run(control.join())
    assert applied(shared) == {os.getpid(): AppliedState(number=number)}
    assert not applied_file(shared, ended.pid).exists()  # changes would wait for the next process with this id
    with pytest.raises(NotFound):
        control._repository.get("gpt")


def test_model_that_another_worker_lacks_is_named(worker: tuple[ModelControl, Path]) -> None:
    control, shared = worker
    other = AppliedState(number=100, lacking=frozenset({"gpt"}))
    applied_file(shared, os.getppid()).write_text(other.model_dump_json())
    with pytest.raises(Unavailable, match="1 workers cannot open 'gpt' now"):
        asyncio.run(control.load("gpt"))
    asyncio.run(control.load("bert"))


def test_change_that_a_worker_does_not_apply_is_late(worker: tuple[ModelControl, Path]) -> None:
    control, shared = worker
    applied_file(shared, os.getppid()).write_text(AppliedState().model_dump_json())
    with (
        asyncio.Runner(loop_factory=WaitedTimeLoop) as runner,
        pytest.raises(Unavailable, match="1 workers have not applied the change of 'gpt' yet"),
    ):
        runner.run(control.unload("gpt"))


def test_worker_follows_on_after_errors_of_folders(
    worker: tuple[ModelControl, Path], root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    control, shared = worker

    async def follow() -> None:
        shared.rename(tmp_path / "away")
        await control.join()  # fails, and is tried again
        following = asyncio.create_task(control.run())
        while not caplog.messages:
            await asyncio.sleep(0.01)
        reason = "the folder of the workers cannot be used now: no such file or directory; try again later"
        assert caplog.messages == [f"{reason}; the next check follows"]
        root.rename(tmp_path / "models")
        desired = read_desired(tmp_path / "away")
        write_desired(tmp_path / "away", desired.model_copy(update={"number": 7}))
        (tmp_path / "away").rename(shared)
        while applied(shared).get(os.getpid(), AppliedState()).number != 7:
            await asyncio.sleep(0.01)
        following.cancel()

    asyncio.run(asyncio.wait_for(follow(), 60))
    assert caplog.messages[-1].startswith("the repository cannot be read; the loaded models keep serving: ")
    assert control._repository.get("gpt").version == 1
