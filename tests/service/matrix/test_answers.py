"""Answers and errors of every code path. Oracle: NumPy over the raw tables."""

import re
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.service.matrix.callers import ENCODINGS, Caller, HttpCaller
from tests.service.matrix.code_paths import CodePath, Repeating
from tests.support.servers import LOADING_HINT

Expect = Callable[..., bytes]
VOCABULARY, MAX_LEN = 50, 700
TIMING = re.compile(r"parse;dur=\d+\.\d{3}(, (queue|run);dur=\d+\.\d{3})*")
GOOD = np.array([[3, 4]])
BAD: list[tuple[list[list[int]], int, str]] = [
    ([[1, -1]], 0, "input_ids[0][1]: got -1, expected 0 to 49"),
    ([[-(2**63), 1]], 0, f"input_ids[0][0]: got {-(2**63)}, expected 0 to 49"),
    ([[1, VOCABULARY]], 0, "input_ids[0][1]: got 50, expected 0 to 49"),
    ([[1, 2**63 - 1]], 0, f"input_ids[0][1]: got {2**63 - 1}, expected 0 to 49"),
    ([[1, 2]], MAX_LEN - 1, ""),
    ([[1, 2]], MAX_LEN + 1, ""),
    ([[1, 2]], -1, ""),
    ([[1, 2]], 2**63 - 1, ""),
    ([[1] * (MAX_LEN + 1)], 0, ""),
]
"""Ids, offset, and a part of the error."""


def test_vectors_equal_the_tables(path: CodePath, caller: Caller, expect: Expect) -> None:
    for shape in ((1, 1), (1, 4), (3, 2)):
        random = np.random.default_rng(shape)
        for offset in (0, 2, MAX_LEN - shape[1]) if path.offsets else (0,):
            path.prepare(caller, np.ones(shape, np.int64), offset=offset)
            for _ in range(2):
                ids = random.integers(0, VOCABULARY, shape)
                answer = caller.ask(ids, offset=offset)
                assert (answer.status, answer.content) == (200, expect(ids, offset)), (answer, shape, offset)


def test_bad_request_does_not_affect_next_request(path: CodePath, caller: Caller, expect: Expect) -> None:
    path.prepare(caller, GOOD)
    for ids, offset, message in BAD:
        if path.offsets or not offset:
            answer = caller.ask(np.array(ids), offset=offset)
            assert answer.status in (400, 422), (answer, offset)
            if path.protocol == "openai":
                message = message.replace("input_ids", "input")
            assert message in answer.message
            assert re.search(": got .*, expected |maximum context length", answer.message)
            assert caller.ask(GOOD).content == expect(GOOD), (ids, offset)


def test_unknown_model_is_not_found(path: CodePath, caller: Caller) -> None:
    answer = caller.ask(np.array([[1]]), model="nope")
    openai = f"The model nope does not exist. Available models: gpt. ({LOADING_HINT})"
    message = openai if path.protocol == "openai" else f"model: got nope, expected gpt; {LOADING_HINT}"
    assert (answer.status, answer.message) == (404, message)


def test_content_with_wrong_size_is_rejected(path: CodePath, caller: Caller, expect: Expect) -> None:
    path.prepare(caller, GOOD)
    for cut in (3, 8):
        assert caller.ask(GOOD, cut=cut).status in (400, 422)
    assert caller.ask(GOOD).content == expect(GOOD)


def test_compressed_request_gets_same_response(path: CodePath, caller: Caller, expect: Expect) -> None:
    if not path.encoded:
        pytest.skip("a stream of messages")
    for encoding in ENCODINGS:
        for _ in range(3):
            answer = caller.ask(GOOD, encoding=encoding)
            assert (answer.status, answer.content) == (200, expect(GOOD)), (answer, encoding)
        if not path.protocol.startswith("grpc"):
            assert caller.ask(GOOD, encoding="br").status == 415
            assert caller.ask(GOOD, encoding=encoding, cut=1).status == 400, encoding
        assert caller.ask(GOOD).content == expect(GOOD)


def test_response_is_compressed_on_request(path: CodePath, caller: Caller, expect: Expect) -> None:
    client = caller.caller if isinstance(caller, Repeating) else caller
    if path.protocol == "decode" or not isinstance(client, HttpCaller):
        pytest.skip("a stream, or gRPC, which tests/service/api/grpc/test_answers.py measures")
    for encoding in ENCODINGS:
        accept = {"Accept-Encoding": encoding}
        path.prepare(caller, GOOD, headers=accept)
        for ids in (GOOD, GOOD + 1):
            answer = caller.ask(ids, headers=accept)
            assert (answer.status, answer.content, answer.headers["Content-Encoding"]) == (200, expect(ids), encoding)
            assert "Content-Encoding" not in caller.ask(ids).headers


def test_request_id_is_returned_or_generated(path: CodePath, caller: Caller) -> None:
    path.prepare(caller, GOOD)
    for ids in (GOOD, -GOOD):
        assert caller.ask(ids, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    made = {
        caller.ask(GOOD, headers=headers).headers["x-request-id"] for headers in ({}, {}, {"x-request-id": "x" * 200})
    }
    assert len(made) == 3
    assert all(len(name) < 100 for name in made)


def test_server_timing_header_shows_phases(path: CodePath, caller: Caller) -> None:
    if path.protocol in ("decode", "grpc-stream"):
        pytest.skip("the headers leave before the first step")
    path.prepare(caller, GOOD)
    began = time.perf_counter()
    found = caller.ask(GOOD).headers["server-timing"]
    milliseconds = 1000 * (time.perf_counter() - began)
    assert TIMING.fullmatch(found), found
    assert 0 < sum(float(part.partition("=")[2]) for part in found.split(", ")) <= milliseconds
    assert "server-timing" not in caller.ask(GOOD, model="none").headers
