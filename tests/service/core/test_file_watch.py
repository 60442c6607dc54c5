"""Files reloaded while the service runs: settings, TLS."""

import asyncio
import logging
import os
import resource
import shutil
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import trustme

from preblock.service.core.file_watch import POLL_INTERVAL_SECONDS, poll
from preblock.service.core.settings import LiveSettings, Settings
from preblock.service.core.tls import CertificateFiles


@contextmanager
def without_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


Watched = tuple[Path, str, Callable[[], bool]]
"""A watched file, new content of it, and a function that polls it and returns whether the change is known."""


def watch_settings(folder: Path) -> Watched:
    file = folder / "preblock.toml"
    file.write_text("")
    live = LiveSettings(Settings(config_file=file))
    live.reload()
    return file, "max_request_tokens = 77\n", live.reload


def certificate_in(folder: Path) -> CertificateFiles:
    made, file, key = trustme.CA().issue_cert("localhost"), folder / "certificate.pem", folder / "key.pem"
    made.cert_chain_pems[0].write_to_path(str(file))
    made.private_key_pem.write_to_path(str(key))
    return CertificateFiles(file, key, None)


def watch_certificate(folder: Path) -> Watched:
    files, file = certificate_in(folder), folder / "certificate.pem"

    def make() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=file)

    return file, file.read_text(), lambda: files.reload(make) is not None


def replace(file: Path, text: str) -> None:
    """Write a file anew, and rename it into place."""
    draft = file.with_suffix(".new")
    draft.write_text(text)
    draft.replace(file)


Watch = Callable[[Path], Watched]
WATCH = pytest.mark.parametrize("watch", [watch_settings, watch_certificate])


@WATCH
def test_unreadable_file_is_reloaded_later(watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, text, reload = watch(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with caplog.at_level(logging.WARNING):
        assert [reload(), reload()] == [False, False]
    (record,) = caplog.records
    assert "it is no regular file" in record.message
    caplog.clear()
    replace(file, text)
    with caplog.at_level(logging.WARNING), without_descriptors():
        assert [reload(), reload()] == [False, False]
    (record,) = caplog.records
    assert "too many open files" in record.message.lower()
    assert reload()


@WATCH
def test_link_to_replaced_folder_is_reloaded(watch: Watch, tmp_path: Path) -> None:
    """Kubernetes updates a mounted secret by renaming a link to a folder."""
    first, second, current = tmp_path / "first", tmp_path / "second", tmp_path / "..data"
    first.mkdir()
    current.symlink_to(first)
    file, text, reload = watch(current)
    shutil.copytree(first, second)
    (second / file.name).write_text(text)
    (tmp_path / "new").symlink_to(second)
    (tmp_path / "new").replace(current)
    assert reload()


def test_file_system_without_answer_does_not_block_the_loop() -> None:
    answer, used = Event(), list[bool]()

    async def run() -> None:
        polling = asyncio.create_task(poll(answer.wait, used.append))
        await asyncio.sleep(2 * POLL_INTERVAL_SECONDS)
        assert not polling.done()
        answer.set()
        await asyncio.wait_for(polling, 20)

    asyncio.run(run())
    assert used == [True]


def test_settings_from_pipe_are_kept() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"max_request_tokens = 77\n")
    os.close(writing)
    live = LiveSettings(Settings(config_file=f"/dev/fd/{reading}"))
    assert (live.reload(), live.current.max_request_tokens) == (False, 77)
    os.close(reading)
