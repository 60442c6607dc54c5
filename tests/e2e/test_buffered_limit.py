"""Buffered answers have a size limit, streamed ones have none. Oracle: NumPy over the tables."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from preblock.client.errors import RequestError
from preblock.service.core.settings import Settings
from preblock.service.core.types import FLOAT32_BYTES
from preblock.service.runtime.session import INLINE_MAX_VALUES
from tests.support.artifacts import draw_tables, make_repository
from tests.support.decode_protocols import decode_frame, decode_json
from tests.support.open_inference import infer_message
from tests.support.own_client import own_client
from tests.support.protocols import (
    NATIVE,
    TENSORS,
    Clients,
    Protocol,
    RequestRefused,
    call_grpc,
    connect,
    grpc_raw,
    grpc_typed,
    native_npy,
    openai_base64,
    openai_mean,
    refusal_of,
)
from tests.support.servers import serve

MOST = 8 * 2**20
V, D, LONGEST = 7, 256, 9000
FITS = MOST // (4 * D)
"""Number of tokens of the largest buffered answer."""
IDS = np.random.default_rng(5).integers(0, V, LONGEST).tolist()
WHOLE: tuple[Protocol, ...] = (grpc_raw, grpc_typed, decode_frame, decode_json, openai_base64)
IN_PIECES: tuple[Protocol, ...] = (*NATIVE, native_npy, own_client, openai_mean, *TENSORS[:2])
TOKENS, POSITIONS = draw_tables(0, [V * D, LONGEST * D])
"""Of `gpt`."""


@pytest.fixture(scope="module")
def buffered_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    models = {name: f"{name}-7x256x9000" for name in ("gpt", "rotary", "alibi")}
    root = make_repository(tmp_path_factory.mktemp("whole"), vit="vit-2048", **models)
    with serve(root, PREBLOCK_MAX_BUFFERED_RESPONSE_BYTES=str(MOST)) as server, connect(server) as connected:
        yield connected


def expected(tokens: int) -> bytes:
    return vectors_of(IDS[:tokens], range(tokens)).tobytes()


def vectors_of(ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = TOKENS.reshape(V, D)[ids] + POSITIONS.reshape(LONGEST, D)[positions]
    return found


def message(size: int) -> str:
    return f"got {size} bytes of vectors, expected at most {MOST} in a buffered response"


@pytest.mark.parametrize("protocol", WHOLE)
def test_buffered_response_over_limit_is_rejected(buffered_clients: Clients, protocol: Protocol) -> None:
    for _ in range(2):
        with pytest.raises(RequestRefused) as refused:
            protocol(buffered_clients, "gpt", {"input_ids": [IDS[: FITS + 1]]})
        assert message(4 * D * (FITS + 1)) in refused.value.message
        assert refused.value.status in (400 if protocol is openai_base64 else 413, "StatusCode.RESOURCE_EXHAUSTED")
        assert protocol(buffered_clients, "gpt", {"input_ids": [IDS[:FITS]]}).tobytes() == expected(FITS)


@pytest.mark.parametrize("protocol", IN_PIECES)
def test_streamed_response_has_no_limit(buffered_clients: Clients, protocol: Protocol) -> None:
    found = protocol(buffered_clients, "gpt", {"input_ids": [IDS]})
    if protocol is openai_mean:
        assert found.shape == (1, D)
    else:
        assert found.tobytes() == expected(LONGEST)


def post(clients: Clients, path: str, document: dict[str, Any]) -> None:
    answer = clients.http.post(path, json=document)
    if answer.status_code != 200:
        raise refusal_of(answer)


def ask_for_means(clients: Clients, rows: int) -> None:
    vectors = openai_mean(clients, "gpt", {"input_ids": [[token] for token in IDS[:rows]]})
    assert vectors.tobytes() == vectors_of(IDS[:rows], [0] * rows).tobytes()


def ask_for_bytes_and_json(clients: Clients, tokens: int) -> None:
    document: dict[str, Any] = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, tokens]}]}
    document["inputs"][0]["data"] = IDS[:tokens]
    document["outputs"] = [{"name": "embeddings", "parameters": {"binary_data": True}}, {"name": "token_embeddings"}]
    post(clients, "/v2/models/gpt/infer", document)


def ask_for_angles(clients: Clients, tokens: int) -> None:
    outputs = ["embeddings", "rotary_cos", "rotary_sin"]
    post(clients, "/models/rotary/embed", {"input_ids": [IDS[:tokens]], "output": outputs})


def ask_for_bias(clients: Clients, keys: int) -> None:
    post(clients, "/models/alibi/bias", {"query_length": 1024, "key_length": keys})


def ask_for_images(clients: Clients, images: int) -> None:
    message = service_pb2.ModelInferRequest(model_name="vit", raw_input_contents=[bytes(4 * images * 3 * 8 * 8)])
    message.inputs.add(name="pixel_values", datatype="FP32", shape=[images, 3, 8, 8])
    assert call_grpc(clients, "ModelInfer", message).outputs[0].shape[0] == images


@pytest.mark.parametrize(
    ("ask", "field", "each"),
    [
        (ask_for_means, "input", 4 * D),
        (ask_for_bytes_and_json, "input_ids", 2 * 4 * D),
        (ask_for_angles, "input_ids", 4 * (D + 32 + 32)),
        (ask_for_bias, "query_length and key_length", 4 * 2 * 1024),
        (ask_for_images, "pixel_values", 4 * 2048 * 5),
    ],
)
def test_every_buffered_kind_of_answer_has_the_limit(
    buffered_clients: Clients, ask: Callable[[Clients, int], None], field: str, each: int
) -> None:
    """`each` is the number of bytes of one row, token, key or image."""
    most = MOST // each
    ask(buffered_clients, most)
    with pytest.raises(RequestRefused) as refused:
        ask(buffered_clients, most + 1)
    assert refused.value.message.startswith(f"{field}: {message(each * (most + 1))}")


def test_stream_continues_after_rejected_step(buffered_clients: Clients) -> None:
    with buffered_clients.own.decode("gpt") as stream:
        begun = stream.step([IDS[:1]])
        with pytest.raises(RequestError, match="in a buffered response"):
            stream.step([IDS[1 : FITS + 2]])
        rest = stream.step([IDS[1 : FITS + 1]])
    assert begun.tobytes() + rest.tobytes() == expected(FITS + 1)


def test_sequence_continues_after_rejected_step(buffered_clients: Clients) -> None:
    def ask(begin: int, end: int) -> service_pb2.ModelInferRequest:
        request = infer_message([IDS[begin:end]])
        request.parameters["sequence_id"].int64_param = 9
        request.parameters["sequence_start"].bool_param = begin == 0
        return request

    asked = iter([ask(0, 1), ask(1, FITS + 2), ask(1, FITS + 1)])
    first, refused, rest = buffered_clients.stub.ModelStreamInfer(asked)
    found = (*first.infer_response.raw_output_contents, *rest.infer_response.raw_output_contents)
    assert b"".join(found) == expected(FITS + 1)
    assert message(4 * D * (FITS + 1)) in refused.error_message


def test_minimum_limit_holds_one_chunk() -> None:
    (least,) = [bound.ge for bound in Settings.model_fields["max_buffered_response_bytes"].metadata]
    assert least >= FLOAT32_BYTES * INLINE_MAX_VALUES
