"""Every code path of a request for vectors, as one row with one interface. A new path is one more row of `PATHS`."""

import base64
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from socket import SHUT_RDWR
from typing import Any

import grpc
import httpx
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc
from websockets import InvalidStatus
from websockets.sync.client import connect as connect_socket

from tests.support.connections import RawConnection
from tests.support.protocols import ERROR, FRAME, STEP
from tests.support.servers import Server

BYTES, NPY = "application/octet-stream", "application/x-npy"
BINARY = {"Content-Type": BYTES, "Accept": BYTES}
JSON = {"Content-Type": "application/json"}
HTTP_STATUS = {
    "OK": 200,
    "INVALID_ARGUMENT": 422,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
}
"""The HTTP status that a code of gRPC corresponds to."""
NUMBERS = count()
Ids = NDArray[np.int64]
Headers = dict[str, str]
Request = tuple[str, Headers, bytes]


@dataclass(frozen=True)
class PathAnswer:
    """An answer by any protocol.

    Args:
        status: of HTTP, or the one that the code of gRPC corresponds to.
        content: the vectors, float32 (B, L, D), or the message of the error.
        headers: of HTTP, or the metadata of gRPC.
        sizes: bytes of the request and of the answer, without their headers.

    """

    status: int
    content: bytes
    headers: Headers
    sizes: tuple[int, int] = (0, 0)


class Caller(ABC):
    """A client of one code path on one connection."""

    @abstractmethod
    def ask(
        self, ids: Ids, offset: int = 0, model: str = "gpt", cut: int = 0, headers: Headers | None = None
    ) -> PathAnswer:
        """Ask for vectors; `cut` bytes are left out of the end of the request's content."""

    @abstractmethod
    def leave(self, ids: Ids) -> None:
        """Send a request, and close the connection before the answer is read."""


@dataclass(frozen=True)
class CodePath:
    """A row of the matrix.

    Args:
        name: of the row.
        protocol: the label of its metrics.
        connect: opens a caller with headers that all of its requests carry.
        repeat: how often a request holds its rows, so that the answer is large.
        known: whether a request like the measured one came before on the connection.
        offsets: whether a request can state an offset.

    """

    name: str
    protocol: str
    connect: Callable[[Server, Headers], Any]
    repeat: int = 1
    known: bool = False
    offsets: bool = True

    @contextmanager
    def open(self, server: Server, headers: Headers | None = None) -> Iterator[Caller]:
        """Connect to `server`."""
        with self.connect(server, (headers or {})) as caller:
            yield Repeating(caller, self.repeat) if self.repeat > 1 else caller

    def prepare(self, caller: Caller, ids: Ids, offset: int = 0) -> None:
        """Send a good request of the same form, where the row is about the second of two."""
        for _ in range(2 if self.known else 0):
            caller.ask(np.ones_like(ids), offset)


@dataclass(frozen=True)
class Repeating(Caller):
    """Asks for the rows many times in one request, and checks that all of them have equal vectors."""

    caller: Caller
    repeat: int

    def ask(
        self, ids: Ids, offset: int = 0, model: str = "gpt", cut: int = 0, headers: Headers | None = None
    ) -> PathAnswer:
        answer = self.caller.ask(np.tile(ids, (self.repeat, 1)), offset, model, cut, headers)
        if answer.status != 200:
            return answer
        content = answer.content[: len(answer.content) // self.repeat]
        assert content * self.repeat == answer.content
        return PathAnswer(200, content, answer.headers, answer.sizes)

    def leave(self, ids: Ids) -> None:
        self.caller.leave(np.tile(ids, (self.repeat, 1)))


def problem_of(document: Any) -> bytes:
    """Return the message of an error, in the form of the native API, V2 or OpenAI."""
    error = document.get("error", document)
    return str(error if isinstance(error, str) else error.get("detail") or error["message"]).encode()


@dataclass(frozen=True)
class HttpCaller(Caller):
    """Sends what `write` makes of ids, and reads the vectors with `read`."""

    client: httpx.Client
    write: Callable[[Ids, int, str], Request]
    read: Callable[[httpx.Response], bytes]
    chunked: bool = False
    first: bool = False

    def ask(
        self, ids: Ids, offset: int = 0, model: str = "gpt", cut: int = 0, headers: Headers | None = None
    ) -> PathAnswer:
        path, own, body = self.write(ids, offset, model)
        body = body[: len(body) - cut]
        own = own | (headers or {}) | ({"X-Number": str(next(NUMBERS))} if self.first else {})
        content = iter((body[:3], body[3:])) if self.chunked else body
        answer = self.client.post(path, headers=own, content=content)
        told = dict(answer.headers)
        if answer.status_code != 200:
            return PathAnswer(answer.status_code, problem_of(answer.json()), told)
        try:
            return PathAnswer(200, self.read(answer), told, (len(body), len(answer.content)))
        except ProblemError as problem:
            return PathAnswer(problem.status, problem.message, told)

    def leave(self, ids: Ids) -> None:
        path, own, body = self.write(ids, 0, "gpt")
        own = {"Host": "x"} | dict(self.client.headers) | own | {"Content-Length": str(len(body))}
        own.pop("connection", None)
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in own.items())
        with RawConnection(str(self.client.base_url)) as connection:
            connection.send(head.encode() + b"\r\n" + body)


class ProblemError(Exception):
    """An error within the body of an answer of status 200, as a line or an event."""

    def __init__(self, document: Any) -> None:
        super().__init__(document)
        self.status = int(document["error"]["status"])
        self.message = problem_of(document)


def by_http(
    write: Callable[[Ids, int, str], Request], read: Callable[[httpx.Response], bytes], **options: bool
) -> Callable[[Server, Headers], Any]:
    @contextmanager
    def connect(server: Server, headers: Headers) -> Iterator[Caller]:
        headers = {"Accept-Encoding": "identity"} | headers
        with httpx.Client(base_url=server.address, headers=headers, timeout=60) as client:
            yield HttpCaller(client, write, read, **options)

    return connect


def write_native(ids: Ids, offset: int, model: str) -> Request:
    query = f"offset={offset}&shape={ids.shape[0]},{ids.shape[1]}"
    return f"/models/{model}/embed?{query}", BINARY, ids.astype("<i8").tobytes()


def write_native_json(ids: Ids, offset: int, model: str) -> Request:
    document = {"input_ids": ids.tolist(), "offset": offset}
    return f"/models/{model}/embed", JSON, json.dumps(document).encode()


def write_native_bytes(ids: Ids, offset: int, model: str) -> Request:
    path, headers, body = write_native_json(ids, offset, model)
    return path, headers | {"Accept": BYTES}, body


def write_native_float(ids: Ids, offset: int, model: str) -> Request:
    document = {"input_ids": ids.tolist(), "offset": offset, "encoding": "float"}
    return f"/models/{model}/embed", JSON, json.dumps(document).encode()


def write_npy(ids: Ids, offset: int, model: str) -> Request:
    body = io.BytesIO()
    np.save(body, ids)
    return f"/models/{model}/embed?offset={offset}", {"Content-Type": NPY, "Accept": NPY}, body.getvalue()


def read_npy(answer: httpx.Response) -> bytes:
    return bytes(np.load(io.BytesIO(answer.content)).tobytes())


def write_v2_binary(ids: Ids, offset: int, model: str) -> Request:
    tensors = {"input_ids": ids.astype("<i8"), "offset": np.array([offset])}
    inputs = [
        {"name": name, "shape": tensor.shape, "datatype": "INT64", "parameters": {"binary_data_size": tensor.nbytes}}
        for name, tensor in tensors.items()
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = header + b"".join(tensor.tobytes() for tensor in tensors.values())
    return f"/v2/models/{model}/infer", {"Inference-Header-Content-Length": str(len(header))}, body


def write_v2_json(ids: Ids, offset: int, model: str) -> Request:
    tensors = {"input_ids": ids, "offset": np.array([offset])}
    inputs = [
        {"name": name, "shape": tensor.shape, "datatype": "INT64", "data": tensor.ravel().tolist()}
        for name, tensor in tensors.items()
    ]
    return f"/v2/models/{model}/infer", JSON, json.dumps({"inputs": inputs}).encode()


def write_openai(ids: Ids, offset: int, model: str) -> Request:
    document = {"model": model, "input": ids.tolist(), "encoding_format": "base64", "pooling": "none"}
    assert offset == 0
    return "/v1/embeddings", JSON, json.dumps(document).encode()


def write_ndjson(ids: Ids, offset: int, model: str) -> Request:
    path = f"/models/{model}/decode?rows={len(ids)}&offset={offset}"
    body = json.dumps({"input_ids": ids.tolist()}).encode() + b"\n"
    return path, {"Content-Type": "application/x-ndjson"}, body


def write_events(ids: Ids, offset: int, model: str) -> Request:
    document = {"input_ids": ids.tolist(), "offset": offset, "chunk": max(1, ids.shape[1])}
    return f"/models/{model}/decode", JSON | {"Accept": "text/event-stream"}, json.dumps(document).encode()


def read_v2_binary(answer: httpx.Response) -> bytes:
    return answer.content[int(answer.headers["Inference-Header-Content-Length"]) :]


def read_openai(answer: httpx.Response) -> bytes:
    return b"".join(base64.b64decode(item["embedding"]) for item in answer.json()["data"])


def read_step(document: Any) -> bytes:
    """Return the vectors of a line, an event or a message."""
    if "error" in document:
        raise ProblemError(document)
    return base64.b64decode(document["embeddings"])


def read_event(answer: httpx.Response) -> bytes:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return read_step(json.loads(lines[0]))


def read_floats(numbers: Any) -> bytes:
    return np.array(numbers, np.float32).tobytes()


@dataclass(frozen=True)
class GrpcCaller(Caller):
    """Calls `ModelInfer` or `ModelStreamInfer`."""

    channel: grpc.Channel
    headers: Headers = field(default_factory=dict)
    streamed: bool = False
    first: bool = False

    def ask(
        self, ids: Ids, offset: int = 0, model: str = "gpt", cut: int = 0, headers: Headers | None = None
    ) -> PathAnswer:
        request = self._request(ids, offset, model, cut)
        call = self._call(request, headers)
        try:
            message = next(call) if self.streamed else call.result()
        except grpc.RpcError:
            return PathAnswer(HTTP_STATUS[call.code().name], call.details().encode(), self._metadata(call))
        sizes = request.ByteSize(), message.ByteSize()
        if self.streamed:
            assert list(call) == []
            if message.error_message:
                return PathAnswer(
                    status_of(message.error_message), message.error_message.encode(), self._metadata(call)
                )
            message = message.infer_response
        return PathAnswer(200, message.raw_output_contents[0], self._metadata(call), sizes)

    def leave(self, ids: Ids) -> None:
        self._call(self._request(ids, 0, "gpt", 0), None).cancel()

    def _request(self, ids: Ids, offset: int, model: str, cut: int) -> service_pb2.ModelInferRequest:
        contents = ids.astype("<i8").tobytes()
        request = service_pb2.ModelInferRequest(model_name=model, id=str(next(NUMBERS)) if self.first else "")
        for name, tensor, content in (
            ("offset", np.array([offset]), np.array([offset]).tobytes()),
            ("input_ids", ids, contents[: len(contents) - cut]),
        ):
            request.inputs.add(name=name, datatype="INT64", shape=tensor.shape)
            request.raw_input_contents.append(content)
        return request

    def _call(self, request: service_pb2.ModelInferRequest, headers: Headers | None) -> Any:
        metadata = [(name.lower(), value) for name, value in (self.headers | (headers or {})).items()]
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        if self.streamed:
            return stub.ModelStreamInfer(iter((request,)), metadata=metadata, timeout=60)
        return stub.ModelInfer.future(request, metadata=metadata, timeout=60)

    @staticmethod
    def _metadata(call: Any) -> Headers:
        return dict([*call.initial_metadata(), *call.trailing_metadata()])


def status_of(message: str) -> int:
    """Return the status that an error of a streamed answer would have elsewhere: there it is only a message."""
    for part, status in (
        ("this key", 403),
        ("model:", 404),
        (" a second", 429),
        (" at a time", 503),
        (" in a request", 413),
    ):
        if part in message:
            return status
    return 422


def by_grpc(**options: bool) -> Callable[[Server, Headers], Any]:
    @contextmanager
    def connect(server: Server, headers: Headers) -> Iterator[Caller]:
        limit = ("grpc.max_receive_message_length", -1)
        local = ("grpc.use_local_subchannel_pool", 1)
        with grpc.insecure_channel(server.grpc, [limit, local]) as channel:
            yield GrpcCaller(channel, headers, **options)

    return connect


@dataclass(frozen=True)
class SocketCaller(Caller):
    """Opens a WebSocket for one step."""

    address: str
    headers: Headers
    binary: bool

    def ask(
        self, ids: Ids, offset: int = 0, model: str = "gpt", cut: int = 0, headers: Headers | None = None
    ) -> PathAnswer:
        path = f"{self.address}/models/{model}/decode?rows={len(ids)}&offset={offset}"
        try:
            with connect_socket(path, additional_headers=self.headers | (headers or {}), max_size=None) as stream:
                assert stream.response is not None
                told = {name.lower(): value for name, value in stream.response.headers.raw_items()}
                step = self._step(ids)
                stream.send(step[: len(step) - cut])
                answer = stream.recv(60)
        except InvalidStatus as refused:
            told = {name.lower(): value for name, value in refused.response.headers.raw_items()}
            message = problem_of(json.loads(refused.response.body or b"{}"))
            return PathAnswer(refused.response.status_code, message, told)
        try:
            return PathAnswer(200, self._vectors(answer), told, (len(step) - cut, len(answer)))
        except ProblemError as problem:
            return PathAnswer(problem.status, problem.message, told)

    def leave(self, ids: Ids) -> None:
        path = f"{self.address}/models/gpt/decode?rows={len(ids)}"
        with connect_socket(path, additional_headers=self.headers) as stream:
            stream.send(self._step(ids))
            stream.socket.shutdown(SHUT_RDWR)

    def _step(self, ids: Ids) -> Any:
        if not self.binary:
            return json.dumps({"input_ids": ids.tolist()})
        header = FRAME.pack(b"PRBK", 2, STEP, 0, 0, len(ids), ids.size, 0, bytes(3))
        return header + ids.astype("<i8").tobytes() + np.full(len(ids), ids.shape[1], "<u4").tobytes()

    @staticmethod
    def _vectors(answer: Any) -> bytes:
        if isinstance(answer, str):
            return read_step(json.loads(answer))
        rows, _, outputs = FRAME.unpack_from(answer)[5:8]
        content = answer[FRAME.size :]
        if answer[5] == ERROR:
            raise ProblemError({"error": json.loads(content[content.index(b"{") :])})
        return bytes(content[12 * rows + 4 * outputs :])


def by_socket(binary: bool) -> Callable[[Server, Headers], Any]:
    @contextmanager
    def connect(server: Server, headers: Headers) -> Iterator[Caller]:
        yield SocketCaller(server.socket, headers, binary)

    return connect


def content_of(answer: httpx.Response) -> bytes:
    return answer.content


def read_base64(answer: httpx.Response) -> bytes:
    return read_step(answer.json())


LARGE_REPEAT = 150
"""So often, two tokens of 768 values take more than one chunk."""
NATIVE = write_native, content_of
PATHS = (
    CodePath("native-known", "native", by_http(*NATIVE), known=True),
    CodePath("native-first", "native", by_http(*NATIVE, first=True)),
    CodePath("native-large-known", "native", by_http(*NATIVE), repeat=LARGE_REPEAT, known=True),
    CodePath("native-large-first", "native", by_http(*NATIVE, first=True), repeat=LARGE_REPEAT),
    CodePath("native-asgi", "native", by_http(*NATIVE, chunked=True)),
    CodePath("json-known", "native", by_http(write_native_json, read_base64), known=True),
    CodePath("json-first", "native", by_http(write_native_json, read_base64, first=True)),
    CodePath("json-asgi", "native", by_http(write_native_json, read_base64, chunked=True)),
    CodePath("json-bytes-known", "native", by_http(write_native_bytes, content_of), known=True),
    CodePath("json-large-known", "native", by_http(write_native_json, read_base64), repeat=LARGE_REPEAT, known=True),
    CodePath("npy-known", "native", by_http(write_npy, read_npy), known=True),
    CodePath("json-float", "native", by_http(write_native_float, lambda a: read_floats(a.json()["embeddings"]))),
    CodePath("v2-binary-known", "open-inference", by_http(write_v2_binary, read_v2_binary), known=True),
    CodePath("v2-binary-first", "open-inference", by_http(write_v2_binary, read_v2_binary, first=True)),
    CodePath(
        "v2-json", "open-inference", by_http(write_v2_json, lambda a: read_floats(a.json()["outputs"][0]["data"]))
    ),
    CodePath("openai", "openai", by_http(write_openai, read_openai), offsets=False),
    CodePath("grpc-known", "grpc", by_grpc(), known=True),
    CodePath("grpc-first", "grpc", by_grpc(first=True)),
    CodePath("grpc-large", "grpc", by_grpc(), repeat=LARGE_REPEAT),
    CodePath("grpc-streamed", "grpc-stream", by_grpc(streamed=True)),
    CodePath("socket-frame", "decode", by_socket(binary=True)),
    CodePath("socket-json", "decode", by_socket(binary=False)),
    CodePath("ndjson", "decode", by_http(write_ndjson, lambda a: read_step(json.loads(a.text.splitlines()[0])))),
    CodePath("events", "decode", by_http(write_events, read_event)),
)
