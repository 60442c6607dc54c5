"""Drafts and versions of artifacts, and the remains of killed exports."""

import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from preblock.export import publication
from preblock.export.errors import ExportError
from preblock.export.layouts.triton import write_config
from preblock.export.publication import DRAFT, draft, publish
from preblock.export.verification import verify
from preblock.export.withdrawal import withdraw
from preblock.service.artifacts.catalog import find_artifacts
from preblock.service.artifacts.io import read, write
from preblock.service.artifacts.names import PARITY
from preblock.service.artifacts.parity import ParityReport
from preblock.service.runtime.providers import CPU
from tests.export.interruption import end_at, interrupt_at
from tests.support.artifacts import make_repository
from tests.support.permissions import limited, ordinary_user, public_folder


def add(repository: Path, name: str, content: str = "") -> int:
    """Publish an artifact of one file."""
    with draft(repository, name) as folder:
        (folder / "file").write_text(content)
        return publish(folder)


def test_folder_that_is_no_version_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a" / "20261127093000").mkdir(parents=True)
    with draft(tmp_path, "a") as folder:
        assert publish(folder) == 1
    (tmp_path / "a" / "999999999").mkdir()
    message = r"^version: got 1000000000, expected at most 999999999: remove the highest of "
    with pytest.raises(ExportError, match=message), draft(tmp_path, "a") as folder:
        publish(folder)
    assert [version for _, version, _ in find_artifacts(tmp_path)] == [1, 999999999]


def test_published_version_is_complete_and_world_readable(tmp_path: Path) -> None:
    add(tmp_path, "m", "content")
    folder = tmp_path / "m" / "1"
    assert (folder / "file").read_text() == "content"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "file").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", [".tmp-0123456789abcdef", ".preblock-mine", ".preblock-0123456789abcdef-copy"])
def test_export_keeps_folders_of_user(tmp_path: Path, name: str) -> None:
    """Neither an export nor a failed one removes folders that no export made."""
    (tmp_path / "m" / name).mkdir(parents=True)
    (tmp_path / "m" / name / "thesis.txt").touch()
    (tmp_path / "empty").mkdir()
    assert add(tmp_path, "m") == 1
    with pytest.raises(RuntimeError), draft(tmp_path, "empty"):
        raise RuntimeError
    assert (tmp_path / "m" / name / "thesis.txt").is_file()
    assert (tmp_path / "empty").is_dir()


DRAFT_AND_WAIT = """
import sys
from pathlib import Path
from preblock.export.publication import draft
with draft(Path(sys.argv[1]), "m") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_sweep_removes_draft_of_dead_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRAFT_AND_WAIT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert add(tmp_path, "m") == 1
        assert folder.is_dir()
        assert [version for _, version, _ in find_artifacts(tmp_path)] == [1]
        process.kill()
        process.wait()
    assert folder.is_dir()
    assert add(tmp_path, "m") == 2
    assert not folder.exists()


@pytest.mark.parametrize("command", ["export", "serve"])
@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_interrupted_export_leaves_no_files(
    large_checkpoint: Path, tmp_path: Path, number: signal.Signals, code: int, said: str, command: str
) -> None:
    """In the middle of the table; a server exports in a child, and its parent gets the signal."""
    root, further = tmp_path / "r", ("--dtype", "float16") if command == "export" else ("--port", "0")
    options = ("--name", "m", "--repository", root, *further)
    found, errors = end_at(number, root / "m", f"{DRAFT}*/model.onnx.data", command, large_checkpoint, *options)
    assert (found, errors.splitlines()[-1]) == (code, f"preblock: {said}")
    assert errors.count("preblock: ") == 1
    assert "Traceback" not in errors
    assert [*tmp_path.rglob("*")] == ([] if command == "export" else [root])


def test_draft_interrupted_at_any_line_leaves_no_files(tmp_path: Path) -> None:
    """Interrupts `draft` before each of its lines in turn, until the `with` block is reached."""

    reached = []

    def make() -> None:
        with draft(tmp_path / "repository", "m"):
            sys.settrace(None)
            reached.append("block")

    stopped = 0
    while interrupt_at(stopped, publication.__file__, make):
        stopped += 1
        assert not list((tmp_path / "repository").glob("**/*"))
    assert stopped > 10
    assert reached == ["block"]


def test_concurrent_drafts_publish_distinct_versions(tmp_path: Path) -> None:
    count, begin = 8, threading.Barrier(8)

    def run(number: int) -> list[int]:
        begin.wait()
        for _ in range(20):  # each end may remove the folder in which another draft begins
            with draft(tmp_path, "failing") as folder:
                assert folder.is_dir()
        return [add(tmp_path, "m", f"{number}.{repeat}") for repeat in range(10)]

    with ThreadPoolExecutor(count) as pool:
        found = [version for each in pool.map(run, range(count)) for version in each]
    assert sorted(found) == list(range(1, 81))
    contents = {(tmp_path / "m" / str(version) / "file").read_text() for version in found}
    assert len(contents) == 80
    assert len(list((tmp_path / "m").iterdir())) == 80
    assert not list(tmp_path.glob("failing/*"))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".x", "-x", "a b", "a\n", "ä", "x" * 129, "a\0"])
def test_invalid_artifact_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match="--name: got "), draft(tmp_path / "r", name):
        pass
    assert list(tmp_path.iterdir()) == []


def test_draft_in_repository_path_of_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for repository, name, place in ((tmp_path / "file", "m", "file/m"), (tmp_path, "file", "file")):
        with pytest.raises(NotADirectoryError, match=f"{tmp_path}/{place}'$"), draft(repository, name):
            pass


@pytest.fixture
def version() -> Iterator[Path]:
    with public_folder() as place:
        folder = make_repository(place, gpt="gpt") / "gpt/1"
        for made in (folder, folder.parent):
            made.chmod(0o755)
        yield folder


def test_version_of_another_user_stays(version: Path) -> None:
    before = sorted(version.parent.rglob("*"))
    with ordinary_user(), pytest.raises(ExportError, match=f"^{version}: Permission denied$"):
        withdraw([version])
    assert sorted(version.parent.rglob("*")) == before
    withdraw([version])
    assert not version.parent.exists()


def test_config_on_a_full_disk_is_not_written(version: Path) -> None:
    with limited(resource.RLIMIT_FSIZE, 0), pytest.raises(ExportError, match=r"config\.pbtxt: File too large$"):
        write_config(version.parent)
    assert [entry.name for entry in version.parent.iterdir()] == ["1"]


def test_proof_without_a_place_for_it_is_not_recorded(version: Path) -> None:
    recorded = read(ParityReport, version / PARITY)
    old = {CPU: recorded.providers[CPU].model_copy(update={"reference": "torch 0.1"})}
    write(recorded.model_copy(update={"providers": old}), version / PARITY)
    before = (version / PARITY).read_bytes()
    for refusing, reason in (
        (limited(resource.RLIMIT_FSIZE, 0), "File too large"),
        (ordinary_user(), "Permission den"),
    ):
        with refusing, pytest.raises(ExportError, match=rf"parity\.json: proven, but not recorded: {reason}"):
            verify(version)
    assert (version / PARITY).read_bytes() == before
