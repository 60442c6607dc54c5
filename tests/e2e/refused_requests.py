"""Requests that a server refuses, for each kind of error and each protocol."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.support.open_inference import infer_message
from tests.support.protocols import (
    Clients,
    Fields,
    Protocol,
    RequestRefused,
    call_grpc,
    grpc_raw,
    grpc_typed,
    native_json,
    open_inference_json,
    openai_base64,
    refusal_of,
)
from tests.support.servers import Server

KEY = "a key of the test"
SECONDS = 60
"""Limit of the attempts to fill the queue."""
PROTOCOLS = ("native", "/v2", "/v1", "gRPC")


@dataclass(frozen=True)
class Place:
    """Servers with low limits, with `KEY` as the only key, for `bert`, and with a low rate."""

    clients: Clients
    server: Server
    guarded: Clients
    sparing: Clients


Provoke = Callable[[Place], RequestRefused]


def post(path: str, content: Any = b"", kind: str = "application/json", **headers: str) -> Provoke:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    def provoke(place: Place) -> RequestRefused:
        return refusal_of(place.clients.http.post(path, content=body, headers={"Content-Type": kind, **headers}))

    return provoke


def ask(protocol: Protocol, model: str, fields: Fields) -> Provoke:
    def provoke(place: Place) -> RequestRefused:
        with pytest.raises(RequestRefused) as raised:
            protocol(place.clients, model, fields)
        return raised.value

    return provoke


def with_key(path: str, content: Any, key: str) -> Provoke:
    def provoke(place: Place) -> RequestRefused:
        return refusal_of(place.guarded.http.post(path, json=content, headers={"Authorization": f"Bearer {key}"}))

    return provoke


def grpc_refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> RequestRefused:
    with pytest.raises(grpc.RpcError) as raised:
        call(*arguments, **options)
    error: Any = raised.value
    return RequestRefused(str(error.code()), error.details())


def call_with_key(key: str) -> Provoke:
    message, metadata = service_pb2.ModelMetadataRequest(name="gpt"), [("authorization", f"Bearer {key}")]
    return lambda place: grpc_refusal(place.guarded.stub.ModelMetadata, message, metadata=metadata)


def at_each_protocol(key: str) -> dict[str, Provoke]:
    """Ask for `gpt` with a key."""
    return {
        "native": with_key(EMBED, {}, key),
        "/v2": with_key(INFER, {}, key),
        "/v1": with_key(EMBEDDINGS, {"model": "gpt", "input": [1]}, key),
        "gRPC": call_with_key(key),
    }


def bytes_over_grpc(place: Place) -> RequestRefused:
    with grpc.insecure_channel(place.server.grpc) as channel:
        return grpc_refusal(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer"), b"\xff\xff\xff")


def step_of_a_stream(place: Place) -> RequestRefused:
    """Send a step with another offset than its stream."""
    lines = b'{"input_ids": [1]}\n{"input_ids": [2], "offset": 5}\n'
    answer = place.clients.http.post(
        "/models/gpt/decode", content=lines, headers={"Content-Type": "application/x-ndjson"}
    )
    problem = json.loads(answer.text.splitlines()[1])["error"]
    return RequestRefused(problem["status"], problem["detail"], problem["title"])


def request_of_a_sequence(protocol: Callable[[Clients, dict[str, Any]], Any]) -> Provoke:
    """Go on with a sequence where it is not."""

    def provoke(place: Place) -> RequestRefused:
        protocol(place.clients, {"sequence_id": 5, "sequence_start": True})
        with pytest.raises(RequestRefused) as raised:
            protocol(place.clients, {"sequence_id": 5, "offset": 3})
        return raised.value

    return provoke


def infer(clients: Clients, parameters: dict[str, Any]) -> None:
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}
    answer = clients.http.post(INFER, json={"inputs": [tensor], "parameters": parameters})
    if answer.status_code != 200:
        raise refusal_of(answer)


def infer_over_grpc(clients: Clients, parameters: dict[str, Any]) -> None:
    message = infer_message([[1]])
    for name, value in parameters.items():
        setattr(message.parameters[name], "bool_param" if value is True else "int64_param", value)
    call_grpc(clients, "ModelInfer", message)


def too_many(protocol: Protocol) -> Provoke:
    """Ask twice."""

    def provoke(place: Place) -> RequestRefused:
        try:
            for _ in range(2):
                protocol(place.sparing, "gpt", {"input_ids": [[1]]})
        except RequestRefused as error:
            return error
        raise AssertionError("nothing was refused")

    return provoke


def too_busy(protocol: Protocol, rows: int = 5000) -> Provoke:
    """Send a large request while others fill the queue; small ones would not wait."""
    # Slow to read, and refused at the end: a client busy with a large answer would send nothing.
    body = json.dumps({"input_ids": [*([[1] * 6] * 10000), [7]]}).encode()

    def provoke(place: Place) -> RequestRefused:
        done = Event()

        def load() -> None:
            while not done.is_set():
                place.clients.http.post(EMBED, content=body)

        with ThreadPoolExecutor(8) as threads:
            for _ in range(8):
                threads.submit(load)
            until = time.monotonic() + SECONDS
            try:
                while time.monotonic() < until:
                    try:
                        protocol(place.clients, "gpt", {"input_ids": [[1, 1]] * rows})
                    except RequestRefused as error:
                        return error
            finally:
                done.set()
        raise AssertionError("nothing was refused")

    return provoke


def everywhere(model: str, fields: Fields) -> dict[str, Provoke]:
    protocols = (native_json, open_inference_json, openai_base64, grpc_typed)
    return {name: ask(protocol, model, fields) for name, protocol in zip(PROTOCOLS, protocols, strict=True)}


EMBED, INFER, EMBEDDINGS = "/models/gpt/embed", "/v2/models/gpt/infer", "/v1/embeddings"
LOAD = "/v2/repository/models/gpt/load"
PROVOKE: dict[str, dict[str, Provoke]] = {
    "Malformed": {
        "native": post(EMBED, b"{"),
        "/v2": post(INFER, b"{"),
        "/v1": post(EMBEDDINGS, b"{"),
        "gRPC": bytes_over_grpc,
    },
    "Unauthenticated": at_each_protocol("another"),
    "Forbidden": at_each_protocol(KEY),
    "NotFound": everywhere("nope", {"input_ids": [[1]]}),
    "Misdirected": {
        name: post(path, {}, Host="other.example")
        for name, path in (("native", EMBED), ("/v2", INFER), ("/v1", EMBEDDINGS))
    },
    "NotAcceptable": {"native": post(EMBED, {"input_ids": [1]}, Accept="text/plain")},
    "Conflict": {
        "native": step_of_a_stream,
        "/v2": request_of_a_sequence(infer),
        "gRPC": request_of_a_sequence(infer_over_grpc),
    },
    "TooLarge": everywhere("gpt", {"input_ids": [[1]] * 65537}),
    "RateLimited": {
        name: too_many(protocol)
        for name, protocol in zip(PROTOCOLS, (native_json, open_inference_json, openai_base64, grpc_raw), strict=True)
    },
    "UnsupportedFormat": {
        name: post(path, {}, kind="text/plain")
        for name, path in (("native", EMBED), ("/v2", INFER), ("/v1", EMBEDDINGS))
    },
    "Invalid": everywhere("gpt", {"input_ids": [[7]]}),
    "ArtifactError": {
        "native": post("/models/changed/embed", {"text": "a"}),
        "/v2": post(LOAD),
        "/v1": post(EMBEDDINGS, {"model": "changed", "input": "a", "pooling": "mean"}),
        "gRPC": lambda place: grpc_refusal(
            place.clients.stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest(model_name="gpt")
        ),
    },
    "ProviderError": {},
    "Unavailable": {
        "native": too_busy(native_json),
        "/v2": too_busy(open_inference_json),
        "/v1": too_busy(openai_base64),
        "gRPC": too_busy(grpc_typed, 20000),
    },
}
