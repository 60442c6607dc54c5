"""Keys and limits of every code path, on servers for all rows. Each row has keys of its own."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from preblock.service.core.auth import new_key
from tests.service.matrix.callers import Caller, PathAnswer
from tests.service.matrix.code_paths import PREBLOCK, CodePath, Servers
from tests.service.matrix.conftest import Rows, serve_rows
from tests.service.matrix.streams import STREAMS
from tests.support.connections import RawConnection
from tests.support.waiting import wait_until

GOOD = np.array([[3, 4]])
MAX_TOKENS, MAX_ROWS, RATE = 600, 200, 8
MAX_BODY_BYTES = 2**8
ALWAYS_LONG = "-large", "-long", "v2-binary"
"""Parts of names of rows without a body within the limit."""
PURPOSES = "gpt", "other", "gone", "rate"


@dataclass(frozen=True)
class Guarded:
    """Servers with keys, their file, and each key with its entry."""

    servers: Servers
    file: Path
    keys: dict[str, tuple[str, str]]

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name][0]}"}

    def revoke(self, *names: str) -> None:
        """Take keys out of the file."""
        text = self.file.read_text()
        for name in names:
            text = text.replace(self.keys[name][1], "")
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.rename(self.file)


@pytest.fixture(scope="module")
def guarded(rows: Rows, wide_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Serve with keys and a rate for each of them."""
    names = [f"{path.name}-{purpose}" for path in rows for purpose in PURPOSES] + [*STREAMS]
    keys = {name: new_key(name, ("bert",) if name.endswith("-other") else ("gpt",), admin=False) for name in names}
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text("".join(entry for _, entry in keys.values()))
    limits = {"PREBLOCK_API_KEYS_FILE": str(file), "PREBLOCK_RATE_LIMIT_PER_SECOND": str(RATE)}
    with serve_rows(rows, wide_repository, **limits) as servers:
        yield Guarded(servers, file, keys)


@pytest.fixture(scope="module")
def strict_servers(rows: Rows, wide_repository: Path) -> Iterator[Servers]:
    """Serve with low limits."""
    limits = {"PREBLOCK_MAX_REQUEST_TOKENS": str(MAX_TOKENS), "PREBLOCK_MAX_REQUEST_ROWS": str(MAX_ROWS)}
    limits |= {"PREBLOCK_MODEL_CONTROL": "explicit", "PREBLOCK_LOAD_MODELS": "*"}
    limits["PREBLOCK_MAX_CONCURRENT_REQUESTS"] = "1"
    with serve_rows(rows, wide_repository, **limits) as servers:
        yield servers


@pytest.fixture(scope="module")
def narrow_servers(rows: Rows, wide_repository: Path) -> Iterator[Servers]:
    """Serve with a low limit of body bytes."""
    with serve_rows(rows, wide_repository, PREBLOCK_MAX_BODY_BYTES=str(MAX_BODY_BYTES)) as servers:
        yield servers


def test_missing_or_wrong_key_is_rejected(path: CodePath, guarded: Guarded) -> None:
    with path.open(guarded.servers) as caller:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = caller.ask(GOOD, headers=headers)
            assert (answer.status, "key" in answer.message) == (401, True)
            assert path.protocol.startswith("grpc") or answer.headers["WWW-Authenticate"] == "Bearer"
        assert caller.ask(GOOD, headers=guarded.headers(f"{path.name}-other")).status == 403
        for _ in range(3):
            assert caller.ask(GOOD, headers=guarded.headers(f"{path.name}-gpt")).status == 200
        assert caller.ask(GOOD).status == 401
        assert caller.ask(GOOD, headers=guarded.headers(f"{path.name}-other")).status == 403


def test_revoked_keys_are_rejected_on_open_connections(rows: Rows, guarded: Guarded) -> None:
    """One change of the file revokes the keys of all rows, because a server reads the file only now and then."""
    with ExitStack() as stack:
        callers = []
        for path in rows:
            caller = stack.enter_context(path.open(guarded.servers, guarded.headers(f"{path.name}-gone")))
            path.prepare(caller, GOOD)
            assert caller.ask(GOOD).status == 200
            callers.append(caller)
        streams = [
            stack.enter_context(open_stream(guarded.servers[PREBLOCK], guarded.headers(name)))
            for name, open_stream in STREAMS.items()
        ]
        guarded.revoke(*(f"{path.name}-gone" for path in rows), *STREAMS)
        for caller in callers:
            wait_for(caller, 401)
        for check_end in streams:
            check_end()


def test_rate_of_key_is_limited(path: CodePath, guarded: Guarded) -> None:
    with path.open(guarded.servers, guarded.headers(f"{path.name}-rate")) as caller:
        answers = [caller.ask(GOOD) for _ in range(3 * RATE)]
        statuses = [answer.status for answer in answers]
        assert set(statuses) == {200, 429}
        assert set(statuses[: RATE // 2]) == {200}
        check_retry(path, next(answer for answer in answers if answer.status == 429))


def test_too_many_tokens_or_rows_are_rejected(path: CodePath, strict_servers: Servers) -> None:
    with path.open(strict_servers) as caller:
        path.prepare(caller, GOOD)
        for shape in ((1, MAX_TOKENS + 1), (MAX_ROWS + 1, 1)):
            answer = caller.ask(np.ones(shape, np.int64))
            assert answer.status in (400 if path.protocol == "openai" else 413, 429)
            assert re.search(r": got \d+ (tokens|rows), expected at most \d+ (tokens|rows) in", answer.message)
            assert caller.ask(GOOD).status == 200


def test_too_large_body_is_rejected(path: CodePath, narrow_servers: Servers) -> None:
    accepted: list[int] = []
    with path.open(narrow_servers) as caller:
        for shape in ((1, 2), (21, 1), (1, 600)):  # a frame with the second one is a simple step over the limit
            for _ in range(3):  # the third request is prepared
                answer = caller.ask(np.ones(shape, np.int64))
                assert answer.status in (200, 413, 429), answer
                accepted += [answer.sizes[0]] if answer.status == 200 else []
    assert max(accepted, default=0) <= MAX_BODY_BYTES
    assert len(accepted) >= 3 or any(name in path.name for name in ALWAYS_LONG)


def test_concurrent_requests_are_limited(path: CodePath, strict_servers: Servers) -> None:
    half = b"POST /models/gpt/embed HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    with path.open(strict_servers) as caller:
        path.prepare(caller, GOOD)
        with ExitStack() as halves:
            for _ in range(20):  # the limit may refuse a half request itself, while it holds another
                halves.enter_context(RawConnection(strict_servers[path.server].address)).send(half)
                time.sleep(0.05)
                if (found := caller.ask(GOOD)).status == 503:
                    break
            assert found.status == 503
            assert "the limit of 1 requests at a time is reached; try again later" in found.message
            check_retry(path, found)
        wait_for(caller, 200)


def test_unloaded_model_is_not_found(path: CodePath, strict_servers: Servers) -> None:
    address = strict_servers[path.server].address
    with path.open(strict_servers) as caller, httpx.Client(base_url=address) as administrator:
        path.prepare(caller, GOOD)
        for change, status in (("unload", 404), ("load", 200)):
            assert administrator.post(f"/v2/repository/models/gpt/{change}").status_code == 200
            assert caller.ask(GOOD).status == status


def check_retry(path: CodePath, answer: PathAnswer) -> None:
    """Check that a refusal says when to try again; within a stream, it has no headers."""
    assert path.protocol in ("decode", "grpc-stream") or answer.headers["retry-after"] == "1"


def wait_for(caller: Caller, status: int) -> None:
    wait_until(lambda: caller.ask(GOOD).status == status)
