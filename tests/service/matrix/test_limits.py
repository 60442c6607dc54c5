"""Keys and limits of every code path, on servers that all rows share: each row has keys of its own."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from preblock.service.core.auth import new_key
from tests.service.matrix.code_paths import PATHS, Caller, CodePath
from tests.support.connections import RawConnection
from tests.support.servers import Server, serve

GOOD = np.array([[3, 4]])
MAX_TOKENS, MAX_ROWS, RATE = 600, 200, 8


@dataclass(frozen=True)
class Guarded:
    """A server with keys, their file, and each key with its entry."""

    server: Server
    file: Path
    keys: dict[str, tuple[str, str]]

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name][0]}"}

    def revoke(self, name: str) -> None:
        """Take a key out of the file."""
        new = self.file.with_suffix(".new")
        new.write_text(self.file.read_text().replace(self.keys[name][1], ""))
        new.rename(self.file)


@pytest.fixture(scope="module")
def guarded(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Serve with keys and a rate for each of them."""
    names = [f"{path.name}-{purpose}" for path in PATHS for purpose in ("gpt", "other", "gone", "rate")]
    keys = {name: new_key(name, ("bert",) if name.endswith("-other") else ("gpt",), admin=False) for name in names}
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text("".join(entry for _, entry in keys.values()))
    with serve(models, "--api-keys-file", str(file), "--rate-limit-per-second", str(RATE)) as server:
        yield Guarded(server, file, keys)


@pytest.fixture(scope="module")
def strict_server(models: Path) -> Iterator[Server]:
    """Serve with near limits."""
    options = "--max-request-tokens", str(MAX_TOKENS), "--max-request-rows", str(MAX_ROWS)
    control = "--model-control", "explicit", "--max-concurrent-requests", "1"
    with serve(models, *options, *control) as server:
        yield server


def test_missing_or_wrong_key_is_refused(path: CodePath, guarded: Guarded) -> None:
    with path.open(guarded.server) as caller:
        assert caller.ask(GOOD).status == 401
        assert caller.ask(GOOD, headers={"authorization": "Bearer wrong"}).status == 401
        assert caller.ask(GOOD, headers=guarded.headers(f"{path.name}-other")).status == 403
        for _ in range(3):
            assert caller.ask(GOOD, headers=guarded.headers(f"{path.name}-gpt")).status == 200
        assert caller.ask(GOOD).status == 401
        assert caller.ask(GOOD, headers=guarded.headers(f"{path.name}-other")).status == 403


def test_revoked_key_is_refused_on_an_open_connection(path: CodePath, guarded: Guarded) -> None:
    name = f"{path.name}-gone"
    with path.open(guarded.server, guarded.headers(name)) as caller:
        path.prepare(caller, GOOD)
        assert caller.ask(GOOD).status == 200
        guarded.revoke(name)
        wait_for(caller, 401)


def test_rate_of_a_key_is_limited(path: CodePath, guarded: Guarded) -> None:
    with path.open(guarded.server, guarded.headers(f"{path.name}-rate")) as caller:
        statuses = [caller.ask(GOOD).status for _ in range(3 * RATE)]
        assert set(statuses) == {200, 429}
        assert set(statuses[: RATE // 2]) == {200}


def test_too_many_tokens_or_rows_are_refused(path: CodePath, strict_server: Server) -> None:
    with path.open(strict_server) as caller:
        path.prepare(caller, GOOD)
        for shape in ((1, MAX_TOKENS + 1), (MAX_ROWS + 1, 1)):
            assert caller.ask(np.ones(shape, np.int64)).status in (413, 429)
            assert caller.ask(GOOD).status == 200


def test_concurrent_requests_are_limited(path: CodePath, strict_server: Server) -> None:
    with path.open(strict_server) as caller:
        path.prepare(caller, GOOD)
        with ExitStack() as halves:
            for _ in range(20):  # the limit may refuse a half request itself, while it holds another
                half = halves.enter_context(RawConnection(strict_server.address))
                half.send(b"POST /models/gpt/embed HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
                time.sleep(0.05)
                if (found := caller.ask(GOOD)).status == 503:
                    break
            assert found.status == 503
        wait_for(caller, 200)


def test_unloaded_model_is_not_found(path: CodePath, strict_server: Server) -> None:
    with path.open(strict_server) as caller, httpx.Client(base_url=strict_server.address) as administrator:
        path.prepare(caller, GOOD)
        for change, status in (("unload", 404), ("load", 200)):
            assert administrator.post(f"/v2/repository/models/gpt/{change}").status_code == 200
            assert caller.ask(GOOD).status == status


def wait_for(caller: Caller, status: int) -> None:
    """Ask until the answer has this status."""
    deadline = time.monotonic() + 30
    while (found := caller.ask(GOOD)).status != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
