"""Clients with one interface, each for one protocol on one connection."""

import gzip
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
import httpx
import numpy as np
from websockets import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as connect_socket

from tests.service.api.http.streaming.frames import step as step_frame
from tests.service.matrix.bodies import Ids, ProblemError, Read, Write, message_of, read_step
from tests.support.decode_protocols import FRAME
from tests.support.open_inference import NO_LIMIT, OWN_CONNECTION, open_stub, tensor_message
from tests.support.protocols import ERROR
from tests.support.servers import Server

Headers = Mapping[str, str]
ENCODINGS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
GRPC_ENCODINGS = {"": None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
HTTP_STATUS = {
    "OK": 200,
    "INVALID_ARGUMENT": 422,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
}
"""HTTP status by gRPC status."""
STREAM_STATUS = {
    "this key": 403,
    "model:": 404,
    " a second": 429,
    " at a time": 503,
    "the queue": 503,
    "in a request": 413,
}
"""HTTP status by a part of an error message: an error within a gRPC stream has no status."""
CLOSE_STATUS = {1009: 413}
"""HTTP status by the close code of a WebSocket."""
NUMBERS = count()


@dataclass(frozen=True)
class PathRequest:
    """A request for vectors.

    Args:
        ids: int64 (B, L).
        offset: position of the first token of each row.
        model: name.
        cut: number of bytes left out at the end of the content.
        encoding: Content-Encoding of the content; "" for none.
        headers: headers of HTTP, or metadata of gRPC.

    """

    ids: Ids
    offset: int = 0
    model: str = "gpt"
    cut: int = 0
    encoding: str = ""
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True)
class PathAnswer:
    """An answer by any protocol.

    Args:
        status: HTTP status, or the HTTP equivalent of the gRPC status.
        content: vectors, float32 (B, L, D), or the message of the error.
        headers: headers of HTTP, or metadata of gRPC.
        sizes: bytes of the request and of the answer, without their headers.

    """

    status: int
    content: bytes
    headers: Headers
    sizes: tuple[int, int] = (0, 0)

    @property
    def message(self) -> str:
        """Return the message of an error."""
        return self.content.decode()


class Caller(ABC):
    """A client of one code path on one connection."""

    def ask(self, ids: Ids, **options: Any) -> PathAnswer:
        """Send a request for `ids` with the fields of `PathRequest`, and return its answer."""
        return self.send(PathRequest(ids, **options))

    @abstractmethod
    def send(self, request: PathRequest) -> PathAnswer:
        """Send a request, and return its answer."""


Connect = Callable[[Server, Headers], AbstractContextManager[Caller]]
"""Opens a caller with headers for all of its requests."""


@dataclass(frozen=True)
class HttpCaller(Caller):
    """Sends bodies of `write`, and reads vectors with `read`.

    Args:
        client: of the server.
        write: makes path, headers and body of a request.
        read: returns the vectors of an answer.
        chunked: whether bodies come in chunks of unknown number, so that they take the ASGI path.
        first: whether each request has a new header, so that none is prepared.

    """

    client: httpx.Client
    write: Write
    read: Read
    chunked: bool = False
    first: bool = False

    def send(self, request: PathRequest) -> PathAnswer:
        path, headers, body = self.write(request.ids, request.offset, request.model)
        headers = {**headers, **request.headers} | ({"X-Number": str(next(NUMBERS))} if self.first else {})
        if request.encoding:
            headers |= {"Content-Encoding": request.encoding}
            body = ENCODINGS.get(request.encoding, bytes)(body)
        body = body[: len(body) - request.cut]
        content = iter((body[:3], body[3:])) if self.chunked else body
        answer = self.client.post(path, headers=headers, content=content)
        if answer.status_code != 200:
            return PathAnswer(answer.status_code, message_of(answer.json()), answer.headers)
        try:
            return PathAnswer(200, self.read(answer), answer.headers, (len(body), len(answer.content)))
        except ProblemError as problem:
            return PathAnswer(problem.status, problem.message, answer.headers)


def by_http(write: Write, read: Read, **options: bool) -> Connect:
    @contextmanager
    def connect(server: Server, headers: Headers) -> Iterator[Caller]:
        headers = {"Accept-Encoding": "identity", **headers}
        with httpx.Client(base_url=server.address, headers=headers, timeout=60) as client:
            yield HttpCaller(client, write, read, **options)

    return connect


@dataclass(frozen=True)
class GrpcCaller(Caller):
    """Calls `ModelInfer` or `ModelStreamInfer`; `first` requests have an id, so that none is prepared."""

    stub: Any
    headers: Headers = field(default_factory=dict)
    streamed: bool = False
    first: bool = False

    def send(self, request: PathRequest) -> PathAnswer:
        message = self._message(request)
        call = self._call(message, request)
        try:
            answer = next(call) if self.streamed else call.result()
        except grpc.RpcError:
            return PathAnswer(HTTP_STATUS[call.code().name], call.details().encode(), self._metadata(call))
        sizes = message.ByteSize(), answer.ByteSize()
        if self.streamed:
            assert list(call) == []
            if error := answer.error_message:
                status = next((STREAM_STATUS[part] for part in STREAM_STATUS if part in error), 422)
                return PathAnswer(status, error.encode(), self._metadata(call))
            answer = answer.infer_response
        return PathAnswer(200, answer.raw_output_contents[0], self._metadata(call), sizes)

    def _message(self, request: PathRequest) -> Any:
        tensors = {"offset": np.array([request.offset]), "input_ids": request.ids}
        message = tensor_message(tensors, request.model, id=str(next(NUMBERS)) if self.first else "")
        content = message.raw_input_contents[1]
        message.raw_input_contents[1] = content[: len(content) - request.cut]
        return message

    def _call(self, message: Any, request: PathRequest) -> Any:
        metadata = [(name.lower(), value) for name, value in {**self.headers, **request.headers}.items()]
        options = {"metadata": metadata, "timeout": 60, "compression": GRPC_ENCODINGS[request.encoding]}
        if self.streamed:
            return self.stub.ModelStreamInfer(iter((message,)), **options)
        return self.stub.ModelInfer.future(message, **options)

    @staticmethod
    def _metadata(call: Any) -> Headers:
        return dict([*call.initial_metadata(), *call.trailing_metadata()])


def by_grpc(**options: bool) -> Connect:
    @contextmanager
    def connect(server: Server, headers: Headers) -> Iterator[Caller]:
        with open_stub(server.grpc, NO_LIMIT, OWN_CONNECTION) as stub:
            yield GrpcCaller(stub, headers, **options)

    return connect


@dataclass(frozen=True)
class SocketCaller(Caller):
    """Opens a WebSocket for each step, a binary frame or JSON."""

    address: str
    headers: Headers
    binary: bool

    def send(self, request: PathRequest) -> PathAnswer:
        path = f"{self.address}/models/{request.model}/decode?rows={len(request.ids)}&offset={request.offset}"
        headers = {**self.headers, **request.headers}
        try:
            with connect_socket(path, additional_headers=headers, max_size=None) as stream:
                assert stream.response is not None
                found = httpx.Headers([*stream.response.headers.raw_items()])
                step = self._step(request.ids)
                step = step[: len(step) - request.cut]
                stream.send(step)
                answer = stream.recv(60)
        except InvalidStatus as refused:
            response = refused.response
            found = httpx.Headers([*response.headers.raw_items()])
            return PathAnswer(response.status_code, message_of(json.loads(response.body or b"{}")), found)
        except ConnectionClosed as closed:
            return PathAnswer(CLOSE_STATUS[closed.rcvd.code if closed.rcvd else 0], b"", found)
        try:
            return PathAnswer(200, self._vectors(answer), found, (len(step), len(answer)))
        except ProblemError as problem:
            return PathAnswer(problem.status, problem.message, found)

    def _step(self, ids: Ids) -> Any:
        return step_frame(ids.tolist()) if self.binary else json.dumps({"input_ids": ids.tolist()})

    @staticmethod
    def _vectors(answer: Any) -> bytes:
        if isinstance(answer, str):
            return read_step(json.loads(answer))
        rows, _, outputs = FRAME.unpack_from(answer)[5:8]
        content = answer[FRAME.size :]
        if answer[5] == ERROR:
            raise ProblemError({"error": json.loads(content[content.index(b"{") :])})
        return bytes(content[12 * rows + 4 * outputs :])


def by_socket(binary: bool) -> Connect:
    @contextmanager
    def connect(server: Server, headers: Headers) -> Iterator[Caller]:
        yield SocketCaller(server.socket, headers, binary)

    return connect
