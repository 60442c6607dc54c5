"""Every code path of a request for vectors, as one row with one interface. A new path is one more row of `DIRECT`.

`make test` asks every question on `REPRESENTATIVES`, one for each piece of code; the folder `every_path` asks it on
`OTHERS`, in `make test-all` only.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.service.matrix import bodies
from tests.service.matrix.bodies import Ids
from tests.service.matrix.callers import Caller, Connect, Headers, PathAnswer, PathRequest, by_grpc, by_http, by_socket
from tests.support.servers import Server

PREBLOCK, UVICORN = "preblock", "uvicorn"
"""`preblock serve`, and the application under an unmodified uvicorn."""
Servers = Mapping[str, Server]


@dataclass(frozen=True)
class CodePath:
    """A row of the matrix.

    Args:
        name: of the row.
        protocol: label of its metrics.
        connect: opens a caller with headers for all of its requests.
        repeat: copies of its rows in a request; many make the answer large.
        known: whether an earlier request on the connection has prepared it.
        offsets: whether a request can state an offset.
        encoded: whether a request can have a Content-Encoding.
        server: PREBLOCK or UVICORN.

    """

    name: str
    protocol: str
    connect: Connect
    repeat: int = 1
    known: bool = False
    offsets: bool = True
    encoded: bool = True
    server: str = PREBLOCK

    @contextmanager
    def open(self, servers: Servers, headers: Headers = MappingProxyType({})) -> Iterator[Caller]:
        """Connect to the server of this path."""
        with self.connect(servers[self.server], headers) as caller:
            yield Repeating(caller, self.repeat) if self.repeat > 1 else caller

    def prepare(self, caller: Caller, ids: Ids, **options: Any) -> None:
        """Send two good requests of the same form, if the row is about prepared requests."""
        for _ in range(2 if self.known else 0):
            caller.ask(np.ones_like(ids), **options)


@dataclass(frozen=True)
class Repeating(Caller):
    """Repeats the rows of each request, and expects equal vectors of all repetitions."""

    caller: Caller
    repeat: int

    def send(self, request: PathRequest) -> PathAnswer:
        answer = self.caller.send(replace(request, ids=np.tile(request.ids, (self.repeat, 1))))
        if answer.status != 200:
            return answer
        content = answer.content[: len(answer.content) // self.repeat]
        assert content * self.repeat == answer.content
        return replace(answer, content=content)


LARGE_REPEAT = 150
"""With two tokens of 768 values, an answer of this many rows takes more than one chunk."""
NATIVE = bodies.write_native, bodies.read_bytes
JSON = bodies.write_json, bodies.read_base64
LONG_JSON = partial(bodies.write_json, length=bodies.LONG_BYTES), bodies.read_base64
V2_BINARY = bodies.write_v2_binary, bodies.read_v2_binary
DIRECT = (
    CodePath("native-known", "native", by_http(*NATIVE), known=True),
    CodePath("native-first", "native", by_http(*NATIVE, first=True)),
    CodePath("native-large-known", "native", by_http(*NATIVE), repeat=LARGE_REPEAT, known=True),
    CodePath("native-large-first", "native", by_http(*NATIVE, first=True), repeat=LARGE_REPEAT),
    CodePath("native-asgi", "native", by_http(*NATIVE, chunked=True)),
    CodePath("json-known", "native", by_http(*JSON), known=True),
    CodePath("json-first", "native", by_http(*JSON, first=True)),
    CodePath("json-asgi", "native", by_http(*JSON, chunked=True)),
    CodePath("json-long", "native", by_http(*LONG_JSON), known=True),
    CodePath("json-large-known", "native", by_http(*JSON), repeat=LARGE_REPEAT, known=True),
    CodePath("npy-known", "native", by_http(bodies.write_npy, bodies.read_npy), known=True),
    CodePath("v2-binary-known", "open-inference", by_http(*V2_BINARY), known=True),
    CodePath("v2-binary-first", "open-inference", by_http(*V2_BINARY, first=True)),
    CodePath("openai", "openai", by_http(bodies.write_openai, bodies.read_openai), offsets=False),
    CodePath("grpc-known", "grpc", by_grpc(), known=True),
    CodePath("grpc-first", "grpc", by_grpc(first=True)),
    CodePath("grpc-large", "grpc", by_grpc(), repeat=LARGE_REPEAT),
    CodePath("grpc-streamed", "grpc-stream", by_grpc(streamed=True)),
    CodePath("socket-frame", "decode", by_socket(binary=True), encoded=False),
    CodePath("socket-json", "decode", by_socket(binary=False), encoded=False),
    CodePath("ndjson", "decode", by_http(bodies.write_ndjson, bodies.read_ndjson), encoded=False),
    CodePath("events", "decode", by_http(bodies.write_events, bodies.read_event)),
)
PLAIN = tuple(
    replace(path, name=f"uvicorn-{path.name}", server=UVICORN)
    for path in DIRECT
    if not path.known and not path.protocol.startswith("grpc")
)
REPRESENTATIVES = tuple(
    path
    for path in DIRECT
    if (path.name.endswith(("-known", "-streamed")) and not path.name.startswith(("json-large", "npy")))
    or path.name in ("native-first", "native-asgi", "openai")
    or path.protocol == "decode"
)
OTHERS = tuple(path for path in DIRECT + PLAIN if path not in REPRESENTATIVES)
