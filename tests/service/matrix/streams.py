"""Open decode streams over a WebSocket and over gRPC."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event
from typing import Any

import grpc
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as connect_socket

from tests.service.matrix.callers import Headers
from tests.support.open_inference import infer_message, open_stub
from tests.support.servers import Server

SECONDS = 60
END = {"closing": "key", "next_offset": [1]}
CheckEnd = Callable[[], object]
"""Reads the end of a stream; its reason must be the key."""


@contextmanager
def open_socket(server: Server, headers: Headers) -> Iterator[CheckEnd]:
    with connect_socket(f"{server.socket}/models/gpt/decode", additional_headers=headers) as stream:
        stream.send('{"input_ids": [1]}')
        assert json.loads(stream.recv(SECONDS))["next_offset"] == [1]

        def check_end() -> None:
            assert json.loads(stream.recv(SECONDS)) == END
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(SECONDS)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, json.loads(closed.value.rcvd.reason)) == (1008, END)

        yield check_end


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


STREAMS: dict[str, Callable[[Server, Headers], AbstractContextManager[CheckEnd]]] = {
    "stream-socket": open_socket,
    "stream-grpc": open_calls,
}
"""Functions that open a stream with headers and feed one token, by name."""
