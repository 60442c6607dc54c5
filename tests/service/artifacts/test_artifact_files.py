"""Artifacts with broken files: hashes, links, special files, sizes."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preblock.service.artifacts.manifest import DATA, GRAPH, MANIFEST, PARITY, POSITIONED_GRAPH, TOKEN_GRAPH
from preblock.service.runtime import loader
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.session import Session, open_session
from tests.service.artifacts.broken_artifacts import edit, refusal


def test_resealed_artifact_is_served(folder: Path) -> None:
    edit(folder, lambda model: setattr(model, "producer_name", "another"))
    Repository(folder.parent.parent, CPU, 1)


@pytest.mark.parametrize("name", [GRAPH, POSITIONED_GRAPH, TOKEN_GRAPH, DATA])
@pytest.mark.parametrize("where", [0, -1])
def test_flipped_bit_is_rejected(folder: Path, name: str, where: int) -> None:
    content = bytearray((folder / name).read_bytes())
    content[where] ^= 1
    (folder / name).write_bytes(content)
    assert refusal(folder).startswith(f"{name}: got sha256 {hashlib.sha256(content).hexdigest()[:12]}…")


@pytest.mark.parametrize("name", [GRAPH, POSITIONED_GRAPH, TOKEN_GRAPH, DATA])
@pytest.mark.parametrize("change", [lambda content: content[:-1], lambda content: content + b"\0", lambda _: b""])
def test_file_with_wrong_length_is_rejected(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    assert refusal(folder).startswith(f"{name}: got sha256 ")


FILES = pytest.mark.parametrize("name", [MANIFEST, PARITY, GRAPH, POSITIONED_GRAPH, TOKEN_GRAPH, DATA])


@FILES
def test_symbolic_link_is_rejected(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "outside")
    (folder / name).symlink_to(folder.parent / "outside")
    assert refusal(folder) == f"{name}: got a symbolic link, expected a regular file"


@FILES
def test_second_hard_link_is_accepted(folder: Path, name: str) -> None:
    os.link(folder / name, folder.parent / "outside")
    Repository(folder.parent.parent, CPU, 1)


@FILES
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_special_file_is_rejected_without_blocking(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    (folder / name).unlink()
    make(folder / name)
    assert refusal(folder) == f"{name}: got a folder or device, expected a regular file"


@FILES
def test_device_is_rejected(folder: Path, name: str) -> None:
    (folder / name).unlink()
    try:
        os.mknod(folder / name, 0o020666, os.makedev(1, 5))  # /dev/zero has no end
    except PermissionError:
        pytest.skip("this user makes no devices")
    assert refusal(folder) == f"{name}: got a folder or device, expected a regular file"


@pytest.mark.parametrize(
    ("name", "most"), [(MANIFEST, 4 * 2**20), (PARITY, 4 * 2**20), (GRAPH, 16 * 2**20), (TOKEN_GRAPH, 16 * 2**20)]
)
def test_oversized_file_is_not_read(folder: Path, name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(folder / name, 2**30)
    # The hash, read in small chunks, agrees.
    monkeypatch.setattr(loader, "check_files", lambda *_: {})
    assert refusal(folder) == f"{name}: got more than {most} bytes, expected at most {most} bytes"


def test_file_changed_during_open_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Session:
        opened = open_session(*arguments)
        (folder / DATA).write_bytes((folder / DATA).read_bytes())
        return opened

    monkeypatch.setattr(loader, "open_session", slow)
    assert refusal(folder) == f"{DATA} changed while it was opened"
