"""Large answers over gRPC, computed while their message is written. Oracle: the bytes of HTTP."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.open_inference import NO_LIMIT, infer_message, open_stub
from tests.support.servers import Server

WIDTH = 64
OUTPUTS = ("embeddings", "token_embeddings")
SHAPES = [(4, 5000), (20000, 1), (1, 4999), (3, 2731), (1, 1)]
"""Of more values than are computed at once, and of fewer; the fourth is one more than fits, to the token."""


@pytest.fixture(scope="module")
def stub(catalogue_server: Server) -> Iterator[Any]:
    with open_stub(catalogue_server.grpc, NO_LIMIT) as stub:
        yield stub


def over_http(server: Server, model: str, ids: NDArray[np.int64], output: str, dtype: str = "float32") -> bytes:
    shape = ",".join(map(str, ids.shape))
    types = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
    path = f"/models/{model}/embed?shape={shape}&output={output}&dtype={dtype}"
    return (
        httpx.post(server.address + path, content=ids.tobytes(), headers=types, timeout=60).raise_for_status().content
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", ["long", "long-bert"])
def test_large_grpc_message_equals_http_bytes(
    catalogue_server: Server, stub: Any, model: str, shape: tuple[int, int]
) -> None:
    ids = np.random.default_rng(7).integers(0, 300, shape)
    expected = over_http(catalogue_server, model, ids, "embeddings")
    message = infer_message(ids, model, id="mine")
    answer = stub.ModelInfer(message, timeout=60)
    (streamed,) = stub.ModelStreamInfer(iter([message]), timeout=60)
    for found in (answer, streamed.infer_response):
        assert (found.model_name, found.id, list(found.outputs[0].shape)) == (model, "mine", [*shape, WIDTH])
        assert list(found.raw_output_contents) == [expected]


def test_large_grpc_outputs_keep_their_order(catalogue_server: Server, stub: Any) -> None:
    ids = np.random.default_rng(8).integers(0, 300, (5, 4000))
    outputs = [{"name": name} for name in OUTPUTS]
    answer = stub.ModelInfer(infer_message(ids, "long-bert", outputs=outputs), timeout=60)
    assert [output.name for output in answer.outputs] == list(OUTPUTS)
    assert list(answer.raw_output_contents) == [
        over_http(catalogue_server, "long-bert", ids, output) for output in OUTPUTS
    ]


def test_float16_grpc_message_equals_http_bytes(catalogue_server: Server, stub: Any) -> None:
    ids = np.random.default_rng(9).integers(0, 300, (5, 4000))
    message = infer_message(ids, "long")
    message.parameters["dtype"].string_param = "float16"
    answer = stub.ModelInfer(message, timeout=60)
    assert list(answer.raw_output_contents) == [over_http(catalogue_server, "long", ids, "embeddings", "float16")]


def test_cancelled_grpc_calls_do_not_affect_others(catalogue_server: Server, stub: Any) -> None:
    ids = np.ones((13, 5000), np.int64)
    calls = [stub.ModelInfer.future(infer_message(ids, "long"), timeout=60) for _ in range(8)]
    for call in calls[:-1]:
        call.cancel()
    expected = over_http(catalogue_server, "long", ids, "embeddings")
    assert list(calls[-1].result().raw_output_contents) == [expected]
    assert httpx.get(f"{catalogue_server.address}/readyz", timeout=60).status_code == 200
