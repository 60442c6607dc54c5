"""Artifacts with broken files: hashes, links, special files, sizes."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST, PARITY, TOKEN_GRAPH
from preblock.service.runtime import loader
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.session import Session, open_session
from tests.service.artifacts.broken_artifacts import edit, refusal


def test_resealed_artifact_is_served(weighty_copy: Path) -> None:
    edit(weighty_copy, lambda model: setattr(model, "producer_name", "another"))
    Repository(weighty_copy.parent.parent, CPU, 1)


@pytest.mark.parametrize("name", [GRAPH, TOKEN_GRAPH, DATA])
@pytest.mark.parametrize("where", [0, -1])
def test_flipped_bit_is_rejected(weighty_copy: Path, name: str, where: int) -> None:
    content = bytearray((weighty_copy / name).read_bytes())
    content[where] ^= 1
    (weighty_copy / name).write_bytes(content)
    assert refusal(weighty_copy).startswith(f"{name}: got sha256 {hashlib.sha256(content).hexdigest()[:12]}…")


@pytest.mark.parametrize("name", [GRAPH, TOKEN_GRAPH, DATA])
@pytest.mark.parametrize("change", [lambda content: content[:-1], lambda content: content + b"\0", lambda _: b""])
def test_file_with_wrong_length_is_rejected(weighty_copy: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    (weighty_copy / name).write_bytes(change((weighty_copy / name).read_bytes()))
    assert refusal(weighty_copy).startswith(f"{name}: got sha256 ")


FILES = pytest.mark.parametrize("name", [MANIFEST, PARITY, GRAPH, TOKEN_GRAPH, DATA])


@FILES
def test_symbolic_link_is_rejected(weighty_copy: Path, name: str) -> None:
    (weighty_copy / name).rename(weighty_copy.parent / "outside")
    (weighty_copy / name).symlink_to(weighty_copy.parent / "outside")
    assert refusal(weighty_copy) == f"{name}: got a symbolic link, expected a regular file"


@FILES
def test_second_hard_link_is_accepted(weighty_copy: Path, name: str) -> None:
    os.link(weighty_copy / name, weighty_copy.parent / "outside")
    Repository(weighty_copy.parent.parent, CPU, 1)


@FILES
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_special_file_is_rejected_without_blocking(
    weighty_copy: Path, name: str, make: Callable[[Path], object]
) -> None:
    (weighty_copy / name).unlink()
    make(weighty_copy / name)
    assert refusal(weighty_copy) == f"{name}: got a folder or device, expected a regular file"


@FILES
def test_device_is_rejected(weighty_copy: Path, name: str) -> None:
    (weighty_copy / name).unlink()
    try:
        os.mknod(weighty_copy / name, 0o020666, os.makedev(1, 5))  # /dev/zero has no end
    except PermissionError:
        pytest.skip("this user makes no devices")
    assert refusal(weighty_copy) == f"{name}: got a folder or device, expected a regular file"


@pytest.mark.parametrize(
    ("name", "most"), [(MANIFEST, 4 * 2**20), (PARITY, 4 * 2**20), (GRAPH, 16 * 2**20), (TOKEN_GRAPH, 16 * 2**20)]
)
def test_oversized_file_is_not_read(weighty_copy: Path, name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(weighty_copy / name, 2**30)
    # The hash, read in small chunks, agrees.
    monkeypatch.setattr(loader, "check_files", lambda *_: {})
    assert refusal(weighty_copy) == f"{name}: got more than {most} bytes, expected at most {most} bytes"


def test_file_changed_during_open_is_rejected(weighty_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Session:
        opened = open_session(*arguments)
        (weighty_copy / DATA).write_bytes((weighty_copy / DATA).read_bytes())
        return opened

    monkeypatch.setattr(loader, "open_session", slow)
    assert refusal(weighty_copy) == f"{DATA} changed while it was opened"
