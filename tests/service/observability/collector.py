"""A collector of traces in this process, and requests of every protocol to trace."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tritonclient.grpc import service_pb2
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as connect_socket

from tests.service.observability.test_logs import said
from tests.service.server.test_websocket import step
from tests.support.open_inference import infer_message, open_stub

BYTES = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
EMBED = "/models/gpt/embed"
INFER, STREAM = (f"inference.GRPCInferenceService/Model{method}" for method in ("Infer", "StreamInfer"))
TRACE = 0x0AF7651916CD43DD8448EB211C80319C
MANY = np.ones((2000, 3), np.int64)
"""Ids of a run of their own."""


@dataclass
class Told:
    """Spans, resources and log lines of a server."""

    spans: list[tuple[str, Span]] = field(default_factory=list)
    """Each with the sending instance of the service."""
    resources: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def of(self, parent: int) -> Span:
        """Return the only span with this parent."""
        (span,) = [span for _, span in self.spans if span.parent_span_id == parent.to_bytes(8, "big")]
        return span


def attributes(told: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in told.attributes}


@contextmanager
def collecting() -> Iterator[tuple[str, Told]]:
    """Take spans by OTLP over HTTP, and yield the address and the received data."""
    told = Told()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = attributes(batch.resource)
                told.resources.append(resource)
                for scope in batch.scope_spans:
                    told.spans += [(resource["service.instance.id"], span) for span in scope.spans]
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", told
        finally:
            server.shutdown()
            thread.join()


def told_by(repository: Path, ask: Callable[[str, str], None], *options: str, **environment: str) -> Told:
    """Return spans and log of the requests of `ask`; the server sends its spans at its end."""
    with collecting() as (collector, told), pytest.MonkeyPatch.context() as patch:

        def ask_first(address: str, calls: str) -> None:
            ask(address, calls)
            assert told.spans == []

        environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
        for name, value in environment.items():
            patch.setenv(name, value)
        told.lines = said(repository, ask_first, "--tracing", "otlp", *options)
    return told


def parent(span: int, sampled: str = "01", **more: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE:032x}-{span:016x}-{sampled}", **more}


def call(stub: Any, model: str, **metadata: str) -> str:
    """Ask for one token, and return the name of the status."""
    try:
        stub.ModelInfer(infer_message([[0]], model), metadata=list(metadata.items()), wait_for_ready=True)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def ask_everything(left_open: ExitStack, address: str, calls: str) -> None:
    ids = np.array([[1, 2], [3, 4]])
    with httpx.Client(base_url=address, timeout=30) as http:
        headers = BYTES | parent(1, tracestate="vendor=told") | {"X-Request-Id": "native-1"}
        assert http.post(f"{EMBED}?shape=2,2", content=ids.tobytes(), headers=headers).status_code == 200
        assert http.post(f"{EMBED}?shape=2000,3", content=MANY.tobytes(), headers=BYTES | parent(3)).is_success
        http.post(EMBED, json={"input_ids": [[1]]}, headers={"X-Request-Id": "alone"})
        newest = EMBED.replace("/embed", "/versions/1/embed")
        assert http.post(newest, json={"input_ids": [[7]]}, headers=parent(5)).status_code == 422
        assert http.get("/models/gpt", headers=parent(6)).status_code == 200
        assert http.get("/nowhere", headers=parent(7)).status_code == 404
        for path in ("/livez", "/readyz"):
            assert http.get(path, headers=parent(8)).status_code == 200
        http.get("/models", headers=parent(9, "00"))
        for wrong in ("", "ff", f"00-{0:032x}-{1:016x}-01"):
            http.get("/models", headers={"traceparent": wrong, "X-Request-Id": "wrong"})
        http.get("/models", headers=parent(10, tracestate="=,wrong\t,,", baggage="%%%"))
        wanted = parent(12, Accept="text/event-stream")
        events = http.post("/models/gpt/decode", json={"input_ids": [1, 2, 3], "chunk": 1}, headers=wanted)
        assert events.text.count("id: ") == 3
    decode = f"{address.replace('http', 'ws', 1)}/models/gpt/decode"
    with connect_socket(decode, additional_headers=parent(13)) as stream:
        for message in (json.dumps({"input_ids": [1]}), json.dumps({"input_ids": [7]}), *(step([[2]]),) * 3):
            stream.send(message)
            stream.recv()
        with pytest.raises(InvalidStatus):  # there may be one
            connect_socket(decode, additional_headers=parent(14))
    with open_stub(calls) as stub:
        assert call(stub, "gpt", **parent(15, tracestate="vendor=told")) == "OK"
        assert call(stub, "nope", **parent(16)) == "NOT_FOUND"
        messages = iter([infer_message([[0], [0]])] * 3)
        assert len(list(stub.ModelStreamInfer(messages, metadata=list(parent(17).items())))) == 3
        stub.ServerLive(service_pb2.ServerLiveRequest(), metadata=list(parent(18).items()))
    stream = left_open.enter_context(connect_socket(decode, additional_headers=parent(19)))
    stream.send(step([[1]]))
    stream.recv()
