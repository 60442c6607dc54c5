"""Calls prepared by an earlier call. Oracle: the bytes of HTTP."""

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.support.open_inference import infer_message, open_stub
from tests.support.servers import Server


@pytest.fixture
def stub(tiny_server: Server) -> Iterator[Any]:
    with open_stub(tiny_server.grpc) as stub:
        yield stub


def over_http(server: Server, ids: list[list[int]]) -> bytes:
    headers = {"Accept": "application/octet-stream"}
    answer = httpx.post(f"{server.address}/models/gpt/embed", json={"input_ids": ids}, headers=headers, timeout=60)
    return answer.raise_for_status().content


def test_concurrent_calls_have_their_own_vectors(tiny_server: Server, stub: Any) -> None:
    asked = [[[number % 5, number % 3, number % 4]] for number in range(60)]
    calls = [stub.ModelInfer.future(infer_message(ids), timeout=60) for ids in asked]
    for ids, call in zip(asked, calls, strict=True):
        assert list(call.result().raw_output_contents) == [over_http(tiny_server, ids)]


def test_unknown_field_is_not_read_as_ids(tiny_server: Server) -> None:
    """An unknown field follows the ids, and holds the same bytes, then others."""
    ids, others = np.array([[1, 2, 3]]), np.array([[4, 4, 4]])
    expected = over_http(tiny_server, ids.tolist())
    known = infer_message(ids).SerializeToString()
    unknown = b"\xc2\x3e" + bytes([ids.nbytes])  # field 1000, of bytes
    with grpc.insecure_channel(tiny_server.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for content in (ids, ids, others, ids):
            answer = service_pb2.ModelInferResponse.FromString(call(known + unknown + content.tobytes(), timeout=60))
            assert list(answer.raw_output_contents) == [expected]
        inputs = known[: -ids.nbytes - 2]
        for message in (
            known + b"\xa2\x06\x03abc",  # an unknown field, shorter than the ids
            known[-ids.nbytes - 2 :] + inputs,  # the ids first
            known + b"\xc2\x3e" + b"\xa0\x9c\x01" + bytes(20000),  # a long one
        ):
            for _ in range(2):
                answer = service_pb2.ModelInferResponse.FromString(call(message, timeout=60))
                assert list(answer.raw_output_contents) == [expected]


def test_lengths_beyond_cache_size_are_answered(tiny_server: Server, stub: Any) -> None:
    lengths = [*range(1, 400), *range(399, 0, -1)]
    vectors = over_http(tiny_server, [[1]])
    for rows in lengths:
        answer = stub.ModelInfer(infer_message([[1]] * rows), timeout=60)
        assert list(answer.raw_output_contents) == [vectors * rows]
