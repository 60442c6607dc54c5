"""Calls that use the template of an earlier call. Oracle: the bytes of HTTP."""

from collections.abc import Iterator

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.servers import Server

SHAPES = [(1, 3), (3, 1), (2, 2)]
"""The first two make messages of one length."""


def request(model: str, ids: list[list[int]], version: str = "") -> service_pb2.ModelInferRequest:
    rows = np.array(ids, np.int64)
    message = service_pb2.ModelInferRequest(
        model_name=model, model_version=version, raw_input_contents=[rows.tobytes()]
    )
    message.inputs.add(name="input_ids", datatype="INT64", shape=rows.shape)
    return message


def over_http(server: Server, model: str, ids: list[list[int]]) -> bytes:
    headers = {"Accept": "application/octet-stream"}
    answer = httpx.post(f"{server.address}/models/{model}/embed", json={"input_ids": ids}, headers=headers, timeout=60)
    return answer.raise_for_status().content


@pytest.fixture
def stub(tiny_server: Server) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(tiny_server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_vectors_equal_those_of_http(
    tiny_server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str
) -> None:
    random = np.random.default_rng(3)
    for number in range(30):
        ids = random.integers(0, 5, SHAPES[number % 3]).tolist()
        expected = over_http(tiny_server, model, ids)
        answer = stub.ModelInfer(request(model, ids), timeout=60)
        (streamed,) = stub.ModelStreamInfer(iter([request(model, ids)]), timeout=60)
        for found in (answer, streamed.infer_response):
            assert (found.model_name, list(found.outputs[0].shape[:2])) == (model, list(np.shape(ids)))
            assert list(found.raw_output_contents) == [expected]


def test_concurrent_calls_have_their_own_vectors(
    tiny_server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    asked = [[[number % 5, number % 3, number % 4]] for number in range(60)]
    calls = [stub.ModelInfer.future(request("gpt", ids), timeout=60) for ids in asked]
    for ids, call in zip(asked, calls, strict=True):
        assert list(call.result().raw_output_contents) == [over_http(tiny_server, "gpt", ids)]


def test_unknown_field_is_not_taken_for_the_ids(tiny_server: Server) -> None:
    """A field that nobody knows follows the ids, and holds the same bytes, then others."""
    ids, others = np.array([[1, 2, 3]]), np.array([[4, 4, 4]])
    expected = over_http(tiny_server, "gpt", ids.tolist())
    known = request("gpt", ids.tolist()).SerializeToString()
    unknown = b"\xc2\x3e" + bytes([ids.nbytes])  # field 1000, of bytes
    with grpc.insecure_channel(tiny_server.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for content in (ids, ids, others, ids):
            answer = service_pb2.ModelInferResponse.FromString(call(known + unknown + content.tobytes(), timeout=60))
            assert list(answer.raw_output_contents) == [expected]
        inputs = known[: -ids.nbytes - 2]
        for message in (
            known + b"\xa2\x06\x03abc",  # a field that nobody knows, shorter than the ids
            known[-ids.nbytes - 2 :] + inputs,  # the ids first
            known + b"\xc2\x3e" + b"\xa0\x9c\x01" + bytes(20000),  # a long one
        ):
            for _ in range(2):
                answer = service_pb2.ModelInferResponse.FromString(call(message, timeout=60))
                assert list(answer.raw_output_contents) == [expected]


def test_more_lengths_than_the_cache_holds_are_answered(
    tiny_server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    """More than are remembered: each once more, in the other order."""
    lengths = [*range(1, 400), *range(399, 0, -1)]
    vectors = over_http(tiny_server, "gpt", [[1]])
    for rows in lengths:
        answer = stub.ModelInfer(request("gpt", [[1]] * rows), timeout=60)
        assert list(answer.raw_output_contents) == [vectors * rows]
