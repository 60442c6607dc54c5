"""Open decode streams of each protocol."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as connect_socket

from tests.service.matrix.bodies import step_frame
from tests.service.matrix.callers import Headers
from tests.service.matrix.code_paths import PREBLOCK, UVICORN
from tests.support.connections import dial, http_request
from tests.support.open_inference import infer_message, open_stub
from tests.support.servers import Server

SECONDS = 60
END = {"closing": "key", "next_offset": [1]}
CheckEnd = Callable[[], object]
"""Reads the end of a stream; its reason must be the key."""


@contextmanager
def open_socket(server: Server, headers: Headers, binary: bool) -> Iterator[CheckEnd]:
    with connect_socket(f"{server.socket}/models/gpt/decode", additional_headers=headers) as stream:
        stream.send(step_frame(np.array([[1]])) if binary else '{"input_ids": [1]}')
        answer = stream.recv(SECONDS)
        assert answer[5] == 2 if binary else json.loads(answer)["next_offset"] == [1]

        def check_end() -> None:
            last: Any = stream.recv(SECONDS)
            assert last.endswith(b"\x01" + bytes(7) + b"key") if binary else json.loads(last) == END
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(SECONDS)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, json.loads(closed.value.rcvd.reason)) == (1008, END)

        yield check_end


@contextmanager
def open_lines(server: Server, headers: Headers) -> Iterator[CheckEnd]:
    headers = {**headers, "Content-Type": "application/x-ndjson", "Transfer-Encoding": "chunked"}
    with dial(server.address, SECONDS) as connection, connection.makefile("rb") as answer:

        def read(text: bytes) -> None:
            while text not in answer.readline():
                pass

        line = b'{"input_ids": [1]}\n'
        connection.sendall(http_request("/models/gpt/decode", headers=headers))
        connection.sendall(b"%x\r\n%b\r\n" % (len(line), line))
        read(b'"next_offset":[1]')
        yield partial(read, b'{"closing":"key","next_offset":[1]}\n')


@contextmanager
def open_calls(server: Server, headers: Headers) -> Iterator[CheckEnd]:
    done = Event()

    def messages() -> Iterator[Any]:
        yield infer_message([[1]])
        done.wait(SECONDS)

    with open_stub(server.grpc) as stub:
        answers = stub.ModelStreamInfer(messages(), metadata=[*headers.items()], timeout=SECONDS)
        assert not next(answers).error_message

        def check_end() -> None:
            with pytest.raises(grpc.RpcError, match="because of a removed or changed key"):
                next(answers)

        try:
            yield check_end
        finally:
            done.set()


STREAMS: dict[str, tuple[str, Callable[[Server, Headers], AbstractContextManager[CheckEnd]]]] = {
    "stream-frames": (PREBLOCK, partial(open_socket, binary=True)),
    "stream-json": (PREBLOCK, partial(open_socket, binary=False)),
    "stream-lines": (PREBLOCK, open_lines),
    "stream-grpc": (PREBLOCK, open_calls),
    "stream-uvicorn": (UVICORN, partial(open_socket, binary=False)),
}
"""Name of the server, and a function that opens a stream with headers and feeds one token, by name."""
