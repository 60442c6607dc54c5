"""Every protocol as a function with one signature: the fields of a native request in, the vectors (T, D) out."""

import asyncio
import base64
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import numpy as np
import tritonclient.grpc
from numpy.typing import NDArray
from safetensors.numpy import load, save
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import preblock
from preblock.client import AsyncClient, Client
from tests.support.open_inference import binary_infer
from tests.support.servers import Server

Fields = dict[str, Any]
Vectors = NDArray[np.float32]
STEP, VECTORS, ERROR = 1, 2, 3
EMBEDDINGS_OUTPUT = [{"name": "embeddings"}]


class RequestRefused(Exception):
    """A protocol's answer to a bad request.

    Args:
        status: of HTTP, or the name of a gRPC code.
        message: of the error.
        kind: name of the error's class; "" where the protocol has none.

    """

    def __init__(self, status: int | str, message: str, kind: str = "") -> None:
        super().__init__(status, message, kind)
        self.status, self.message, self.kind = status, message, kind


@dataclass(frozen=True)
class Clients:
    """A client for each protocol, connected to one server."""

    http: httpx.Client
    grpc: Any
    stub: Any
    socket: str
    own: Client
    own_async: AsyncClient
    runner: asyncio.Runner


Protocol = Callable[[Clients, str, Fields], Vectors]
"""The second argument is a model, or `name/versions/number`."""


@contextmanager
def connect(server: Server) -> Iterator[Clients]:
    """Connect to `server`, ready at every protocol once its readiness is answered."""
    with httpx.Client(base_url=server.address, timeout=60) as http:
        assert http.get("/readyz").status_code == 200
        with (
            tritonclient.grpc.InferenceServerClient(server.grpc) as client,
            grpc.insecure_channel(server.grpc, [("grpc.max_receive_message_length", -1)]) as channel,
            preblock.connect(server.address) as own,
            asyncio.Runner() as runner,
        ):
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            own_async = preblock.connect_async(server.address)
            yield Clients(http, client, stub, server.socket, own, own_async, runner)
            runner.run(own_async.aclose())


def named(model: str) -> tuple[str, str]:
    """Return name and version of a model, "" for its highest."""
    name, _, version = model.partition("/versions/")
    return name, version


def native_json(clients: Clients, model: str, fields: Fields) -> Vectors:
    answer = _accepted(clients.http.post(f"/models/{model}/embed", json=fields)).json()
    assert answer["encoding"] == "base64"
    return np.frombuffer(base64.b64decode(answer["embeddings"]), "<f4").reshape(-1, answer["shape"][-1])


def native_float(clients: Clients, model: str, fields: Fields) -> Vectors:
    answer = _accepted(clients.http.post(f"/models/{model}/embed", json=fields | {"encoding": "float"})).json()
    return np.array(answer["embeddings"], np.float32).reshape(-1, answer["shape"][-1])


def native_bytes(clients: Clients, model: str, fields: Fields) -> Vectors:
    headers = {"Accept": "application/octet-stream"}
    answer = _accepted(clients.http.post(f"/models/{model}/embed", json=fields, headers=headers))
    return np.frombuffer(answer.content, "<f4").reshape(-1, int(answer.headers["Preblock-Shape"].split(",")[-1]))


def native_npy(clients: Clients, model: str, fields: Fields) -> Vectors:
    """.npy in and out: `input_ids` in the body, the other fields in the query."""
    body = io.BytesIO()
    np.save(body, np.array(fields["input_ids"]))
    answer = clients.http.post(
        f"/models/{model}/embed",
        content=body.getvalue(),
        params={name: json.dumps(value) for name, value in fields.items() if name != "input_ids"},
        headers={"Accept": "application/x-npy", "Content-Type": "application/x-npy"},
    )
    vectors: Vectors = np.load(io.BytesIO(_accepted(answer).content), allow_pickle=False)
    return vectors.reshape(-1, vectors.shape[-1])


def native_raw(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Bytes in and out: the ids of all rows in the body, their lengths and the other fields in the query."""
    rows = fields["input_ids"]
    query = {name: value for name, value in fields.items() if name != "input_ids"} | {"lengths": list(map(len, rows))}
    answer = clients.http.post(
        f"/models/{model}/embed",
        content=np.array([identifier for row in rows for identifier in row], "<i8").tobytes(),
        params={name: json.dumps(value) for name, value in query.items()},
        headers={"Accept": "application/octet-stream", "Content-Type": "application/octet-stream"},
    )
    width = int(_accepted(answer).headers["Preblock-Shape"].split(",")[-1])
    return np.frombuffer(answer.content, "<f4").reshape(-1, width)


def native_safetensors(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Tensors in and out; rows of several lengths stand one after another, and a tensor tells the lengths."""
    lengths = [len(row) for row in fields["input_ids"]]
    tensors = {name: np.array(value) for name, value in fields.items() if name == "offset" or len(set(lengths)) == 1}
    if len(set(lengths)) > 1:
        tensors |= {name: np.concatenate(value) for name, value in fields.items() if name != "offset"}
        tensors["lengths"] = np.array(lengths)
    kind = "application/x-safetensors"
    answer = clients.http.post(
        f"/models/{model}/embed", content=save(tensors), headers={"Accept": kind, "Content-Type": kind}
    )
    found = load(_accepted(answer).content)
    assert found["lengths"].tolist() == lengths
    vectors: Vectors = found["embeddings"]
    return vectors.reshape(-1, vectors.shape[-1])


def openai_mean(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Ask for one vector for each row, the mean of its tokens."""
    data = _openai(clients, model, fields, "mean")
    return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])


def openai_base64(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Ask for a vector for each token."""
    data = _openai(clients, model, fields, "none")
    rows = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4").reshape(item["shape"]) for item in data]
    return np.concatenate(rows)


def _openai(clients: Clients, model: str, fields: Fields, pooling: str) -> list[Fields]:
    name = ":".join(filter(None, named(model)))
    document = {"model": name, "input": fields["input_ids"], "encoding_format": "base64", "pooling": pooling}
    data: list[Fields] = _accepted(clients.http.post("/v1/embeddings", json=document)).json()["data"]
    return data


def open_inference_json(clients: Clients, model: str, fields: Fields) -> Vectors:
    inputs = [
        {"name": name, "datatype": "INT64", "shape": shape_of(name, value), "data": value}
        for name, value in _tensors(fields).items()
    ]
    document = {"inputs": inputs, "outputs": EMBEDDINGS_OUTPUT}
    output = _accepted(clients.http.post(f"/v2/models/{model}/infer", json=document)).json()["outputs"][0]
    return np.array(output["data"], np.float32).reshape(-1, output["shape"][-1])


def open_inference_binary(clients: Clients, model: str, fields: Fields) -> Vectors:
    arrays = {name: np.array(value, "<i8") for name, value in _tensors(fields).items()}
    headers, content = binary_infer(arrays, parameters={"binary_data_output": True})
    headers["Content-Type"] = "application/octet-stream"
    answer = _accepted(clients.http.post(f"/v2/models/{model}/infer", content=content, headers=headers))
    length = int(answer.headers["Inference-Header-Content-Length"])
    output = json.loads(answer.content[:length])["outputs"][0]
    return np.frombuffer(answer.content[length:], "<f4").reshape(-1, output["shape"][-1])


def grpc_raw(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Send bytes with tritonclient."""
    name, version = named(model)
    inputs, outputs = [], [tritonclient.grpc.InferRequestedOutput("embeddings")]
    for tensor, value in _tensors(fields).items():
        array = np.array(value, np.int64)
        inputs.append(tritonclient.grpc.InferInput(tensor, list(array.shape), "INT64"))
        inputs[-1].set_data_from_numpy(array)
    try:
        vectors: Vectors = clients.grpc.infer(name, inputs, version, outputs).as_numpy("embeddings")
    except InferenceServerException as error:
        raise RequestRefused(str(error.status()), str(error.message())) from error
    return vectors.reshape(-1, vectors.shape[-1])


def grpc_typed(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Send typed contents, as messages of tritonclient."""
    model_name, model_version = named(model)
    request = service_pb2.ModelInferRequest(
        model_name=model_name, model_version=model_version, outputs=EMBEDDINGS_OUTPUT
    )
    for name, value in _tensors(fields).items():
        tensor = request.inputs.add(name=name, datatype="INT64", shape=shape_of(name, value))
        tensor.contents.int64_contents.extend(np.array(value, np.int64).ravel().tolist())
    answer = call_grpc(clients, "ModelInfer", request)
    return np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(-1, answer.outputs[0].shape[-1])


def call_grpc(clients: Clients, method: str, request: Any) -> Any:
    """Call a method of the service with a message of tritonclient's own."""
    try:
        return getattr(clients.stub, method)(request)
    except grpc.RpcError as error:
        raise RequestRefused(str(error.code()), str(error.details())) from error


def shape_of(name: str, value: Any) -> list[int]:
    if name == "offset":
        return [len(value)]
    return [len(value), len(value[0]) if value else 0]


TENSORS: tuple[Protocol, ...] = (open_inference_json, open_inference_binary, grpc_raw, grpc_typed)
"""Protocols of rectangular tensors."""

NATIVE: tuple[Protocol, ...] = (native_json, native_float, native_bytes, native_raw, native_safetensors)
"""Protocols for every request."""


def _tensors(fields: Fields) -> Fields:
    offset = fields.get("offset")
    return fields | ({"offset": [offset]} if "offset" in fields and not isinstance(offset, list) else {})


def _accepted(response: httpx.Response) -> httpx.Response:
    """Return an answer of status 200, and raise RequestRefused for another."""
    if response.status_code == 200:
        return response
    raise refusal_of(response)


ITEM_FIELDS = {"bad_indices", "bad_count"}
"""Fields of an error about items of a list, beside those of its protocol."""


def refusal_of(response: httpx.Response) -> RequestRefused:
    """Return the error of an HTTP answer, and check the form of its protocol."""
    document, path, status = response.json(), response.request.url.path, response.status_code
    if path.startswith(("/v1", "/v2")):
        assert response.headers["Content-Type"] == "application/json"
        assert set(document) - ITEM_FIELDS == {"error"}
        error = document["error"]
        if path.startswith("/v2"):
            return RequestRefused(status, error)
        assert set(error) - ITEM_FIELDS == {"message", "type", "param", "code"}
        assert (error["type"] == "server_error") == (status >= 500)
        return RequestRefused(status, error["message"])
    assert response.headers["Content-Type"] == "application/problem+json"
    assert (document["status"], document["type"]) == (status, f"urn:preblock:error:{document['title']}")
    assert document.keys() >= {"field", "got", "expected"}
    return RequestRefused(status, document["detail"], document["title"])
