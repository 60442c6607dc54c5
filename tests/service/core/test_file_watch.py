"""Files reloaded while the service runs: keys, settings, TLS."""

import logging
import os
import resource
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from preblock.service.core.auth import Authenticator, new_key
from preblock.service.core.file_watch import POLL_INTERVAL_SECONDS
from preblock.service.core.settings import Settings
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.core.tls import CertificateFiles


@contextmanager
def without_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def watch_keys(folder: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return functions to change a watched file, and to reload it; the latter returns whether the change is known."""
    file = folder / "keys.toml"
    file.write_text(new_key("alice", (), admin=False)[1])
    access = Authenticator(file)

    def reload() -> bool:
        access.reload()
        return access.changes == 1

    return lambda: touch(file, new_key("bob", (), admin=False)[1]), reload


def watch_settings(folder: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    file = folder / "preblock.toml"
    file.write_text("")
    live = LiveSettings(Settings(config_file=file))
    live.reload()
    return lambda: touch(file, "max_request_tokens = 77\n"), live.reload


def watch_certificate(folder: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    made, file, key = trustme.CA().issue_cert("localhost"), folder / "certificate.pem", folder / "key.pem"
    made.cert_chain_pems[0].write_to_path(str(file))
    made.private_key_pem.write_to_path(str(key))
    files = CertificateFiles(file, key, None)

    def make() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=file)

    return lambda: touch(file, file.read_text()), lambda: files.reload(make) is not None


def touch(file: Path, text: str) -> None:
    """Write a file anew, and wait for the next poll."""
    draft = file.with_suffix(".new")
    draft.write_text(text)
    draft.replace(file)
    time.sleep(POLL_INTERVAL_SECONDS)


@pytest.mark.parametrize("watch", [watch_keys, watch_settings, watch_certificate])
def test_file_unreadable_for_a_moment_is_reloaded_later(
    watch: Callable[[Path], tuple[Callable[[], None], Callable[[], bool]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change, reload = watch(tmp_path)
    change()
    with caplog.at_level(logging.WARNING), without_descriptors():
        assert not reload()
        time.sleep(POLL_INTERVAL_SECONDS)
        assert not reload()
    (record,) = caplog.records
    assert "too many open files" in record.message.lower()
    time.sleep(POLL_INTERVAL_SECONDS)
    assert reload()


def test_settings_from_pipe_are_kept() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"max_request_tokens = 77\n")
    os.close(writing)
    live = LiveSettings(Settings(config_file=f"/dev/fd/{reading}"))
    time.sleep(POLL_INTERVAL_SECONDS)
    assert not live.reload()
    assert live.current.max_request_tokens == 77
    os.close(reading)
