"""Generated bad requests over every protocol: no 5xx, no hang, and good ones among them get the right bits.

`make reliability` sends a million.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tritonclient.grpc import service_pb2

from preblock.service.api.http.errors import STATUS, problem
from preblock.service.codecs.decode_json import write_error
from preblock.service.core.errors import INTERNAL_ERROR_MESSAGE, ArtifactError, Invalid, PreblockError, Unavailable
from tests.reliability.bad_requests import REFUSAL, Bad, message
from tests.reliability.good_requests import METHODS, PATHS
from tests.reliability.parsers import parsers
from tests.reliability.responses import WrongAnswer, refusal, worst
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, serve

GROWTH = 16 * 2**20
"""Limit of the server's memory growth in the second half, in bytes."""


@pytest.fixture(scope="module")
def reject_server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve also a stem, a model with a bias, and a spare one to load and unload."""
    repository = shutil.copytree(tiny_repository, tmp_path_factory.mktemp("every") / "repository")
    shutil.copytree(repository / "gpt", repository / "spare")
    copy_artifact("alibi-7x4x9", repository, "alibi")
    copy_artifact("vit-gray", repository, "vit")
    with serve(repository, "--model-control", "explicit", "--load-model", "*") as running:
        assert httpx.get(f"{running.address}/readyz", timeout=60).status_code == 200
        yield running


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        (0x82, b"\2" + bytes(15), 0),
        (0x82, b'\3{"type":"about:blank","status":503}', 503),
        (0x81, b'{"error": {"status": 422, "detail": "500"}}', 422),
        (0x88, (1011).to_bytes(2, "big") + b"why", 1011),
    ],
)
def test_error_status_in_websocket_message_is_detected(kind: int, content: bytes, expected: int) -> None:
    async def read() -> int:
        reader = asyncio.StreamReader()
        reader.feed_data(bytes([0x89, 0, kind, len(content)]) + content)  # behind a ping
        return await message(reader)

    assert asyncio.run(read()) == expected


ERROR = Unavailable("queue", "more than 30 s in it", "at most 30 s; try again later")


@pytest.mark.parametrize("begin", [b"", b"event: error\ndata: "])
@pytest.mark.parametrize("error", [ERROR, ArtifactError("bert/1", "what is broken", "an artifact that can be opened")])
def test_error_in_http_stream_is_detected(begin: bytes, error: PreblockError) -> None:
    head, good = b"HTTP/1.1 200 OK\r\n\r\n", b'9\r\n{"got":""}\r\n'
    assert worst(head + good) == 200
    assert worst(head + good + begin + write_error(problem(error)) + good) == STATUS[type(error)] >= 500


def test_error_in_grpc_stream_is_detected() -> None:
    def told(message: str) -> str:
        return refusal(service_pb2.ModelStreamInferResponse(error_message=message).SerializeToString())

    assert refusal(service_pb2.ModelStreamInferResponse(infer_response={"id": "a"}).SerializeToString()) == ""
    assert REFUSAL.match(told(str(Invalid("inputs[0].shape", [-1], "a list of sizes"))))
    for fault in (INTERNAL_ERROR_MESSAGE, str(ERROR)):
        assert told(fault) == fault
        assert not REFUSAL.match(fault)


@pytest.mark.timeout(14_400)
def test_bad_requests_do_not_affect_good_requests(
    reject_server: Server,
    good_answer: bytes,
    tmp_path: Path,
    long: bool,
    record_property: Callable[[str, object], None],
) -> None:
    bad = Bad(reject_server, parsers(tmp_path), good_answer)
    seen = asyncio.run(bad.run(1_000_000 if long else 6000))
    record_property("answers", dict(seen.answers))
    record_property("a second", seen.count / seen.seconds)
    half = len(seen.memory) // 2
    assert max(seen.memory[half:]) - max(seen.memory[:half]) < GROWTH
    reached = {protocol for protocol, status in map(str.split, seen.answers) if status in ("200", "0", "OK")}
    assert reached == {*PATHS, "lines", "events", "socket", *METHODS, "ModelInfer", "ModelStreamInfer"}


def test_wrong_response_bit_is_detected(reject_server: Server, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(Bad(reject_server, parsers(tmp_path), bytes(48)).run(100_000))
    assert raised.group_contains(WrongAnswer, match=r"^a good request: \(200, ")
