"""Artifacts with broken files: hashes, links, special files, sizes."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST, PARITY, TOKEN_GRAPH
from preblock.service.runtime import loader
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.session import Session, open_session
from tests.service.artifacts.broken_artifacts import edit, refusal


@pytest.mark.parametrize("name", [GRAPH, TOKEN_GRAPH, DATA])
def test_changed_file_is_rejected(weighty_copy: Path, name: str) -> None:
    content = (weighty_copy / name).read_bytes()
    flipped = [bytes([content[0] ^ 1]) + content[1:], content[:-1] + bytes([content[-1] ^ 1])]
    for changed in (*flipped, content[:-1], content + b"\0", b""):
        (weighty_copy / name).write_bytes(changed)
        assert refusal(weighty_copy).startswith(f"{name}: got sha256 {hashlib.sha256(changed).hexdigest()[:12]}…")


FILES = pytest.mark.parametrize("name", [MANIFEST, PARITY, GRAPH, TOKEN_GRAPH, DATA])


@FILES
def test_link_out_of_the_folder_is_rejected(weighty_copy: Path, name: str) -> None:
    outside = (weighty_copy / name).rename(weighty_copy.parent / "outside").resolve()
    (weighty_copy / name).symlink_to(outside)
    assert refusal(weighty_copy) == f"{name} is a link to {outside}, expected a file in its folder or its hub cache"


def test_second_hard_links_are_accepted(weighty_copy: Path) -> None:
    for file in list(weighty_copy.iterdir()):
        os.link(file, weighty_copy.parent / f"outside-{file.name}")
    edit(weighty_copy, lambda model: setattr(model, "producer_name", "another"))
    Repository(weighty_copy.parent.parent)


@FILES
def test_special_file_is_rejected_without_blocking(weighty_copy: Path, name: str) -> None:
    def make_device(file: Path) -> None:
        with suppress(PermissionError):  # most users make no devices
            os.mknod(file, 0o020666, os.makedev(1, 5))  # /dev/zero has no end

    file = weighty_copy / name
    file.unlink()
    for make, remove in ((Path.mkdir, Path.rmdir), (os.mkfifo, Path.unlink), (make_device, Path.unlink)):
        make(file)
        if file.exists():
            assert refusal(weighty_copy) == f"{name}: got a folder or device, expected a regular file"
            remove(file)


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
