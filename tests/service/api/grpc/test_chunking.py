"""Large answers over gRPC, computed while their message is written. Oracle: the bytes that HTTP answers with."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, serve

WIDTH, MAX_LEN = 64, 5000
OUTPUTS = ("embeddings", "token_embeddings")
SHAPES = [(4, 5000), (20000, 1), (1, 4999), (3, 2731), (1, 1)]
"""Of more values than are computed at once, and of fewer; the fourth is one more than fits, to the token."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root: Path = tmp_path_factory.mktemp("large")
    for name in ("gpt", "bert"):
        copy_artifact(f"{name}-300x64x5000", root, name)
    with serve(root) as running:
        yield running


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc, [("grpc.max_receive_message_length", -1)]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(model: str, ids: NDArray[np.int64], *outputs: str, dtype: str = "") -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=model, id="mine", raw_input_contents=[ids.tobytes()])
    message.inputs.add(name="input_ids", datatype="INT64", shape=ids.shape)
    for output in outputs:
        message.outputs.add(name=output)
    if dtype:
        message.parameters["dtype"].string_param = dtype
    return message


def over_http(server: Server, model: str, ids: NDArray[np.int64], output: str, dtype: str = "float32") -> bytes:
    shape = ",".join(map(str, ids.shape))
    types = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
    path = f"/models/{model}/embed?shape={shape}&output={output}&dtype={dtype}"
    return (
        httpx.post(server.address + path, content=ids.tobytes(), headers=types, timeout=60).raise_for_status().content
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_message_has_the_bytes_of_http(
    server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str, shape: tuple[int, int]
) -> None:
    ids = np.random.default_rng(7).integers(0, 300, shape)
    expected = over_http(server, model, ids, "embeddings")
    answer = stub.ModelInfer(request(model, ids), timeout=60)
    (streamed,) = stub.ModelStreamInfer(iter([request(model, ids)]), timeout=60)
    for found in (answer, streamed.infer_response):
        assert (found.model_name, found.id, list(found.outputs[0].shape)) == (model, "mine", [*shape, WIDTH])
        assert list(found.raw_output_contents) == [expected]


def test_several_outputs_stand_one_after_another(
    server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    ids = np.random.default_rng(8).integers(0, 300, (5, 4000))
    answer = stub.ModelInfer(request("bert", ids, *OUTPUTS), timeout=60)
    assert [output.name for output in answer.outputs] == list(OUTPUTS)
    assert list(answer.raw_output_contents) == [over_http(server, "bert", ids, output) for output in OUTPUTS]


def test_a_narrow_type_has_them_too(server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    ids = np.random.default_rng(9).integers(0, 300, (5, 4000))
    answer = stub.ModelInfer(request("gpt", ids, dtype="float16"), timeout=60)
    assert list(answer.raw_output_contents) == [over_http(server, "gpt", ids, "embeddings", "float16")]


def test_who_leaves_stops_the_work_and_others_are_answered(
    server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    ids = np.ones((13, 5000), np.int64)
    calls = [stub.ModelInfer.future(request("gpt", ids), timeout=60) for _ in range(8)]
    for call in calls[:-1]:
        call.cancel()
    expected = over_http(server, "gpt", ids, "embeddings")
    assert list(calls[-1].result().raw_output_contents) == [expected]
    assert httpx.get(f"{server.address}/readyz", timeout=60).status_code == 200
