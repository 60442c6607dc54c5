"""Buffered answers have a size limit, streamed ones have none. Oracle: NumPy over the tables."""

from collections.abc import Iterator, Sequence

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from preblock.client.errors import RequestError
from preblock.service.core.settings import Settings
from preblock.service.core.types import FLOAT32_BYTES
from preblock.service.runtime.session import INLINE_MAX_VALUES
from tests.support.artifacts import draw_tables, make_repository
from tests.support.decode_protocols import decode_frame, decode_json
from tests.support.open_inference import infer_message
from tests.support.own_client import own_client
from tests.support.protocols import (
    Clients,
    Protocol,
    RequestRefused,
    connect,
    grpc_raw,
    grpc_typed,
    native_bytes,
    native_float,
    native_json,
    native_npy,
    native_raw,
    native_safetensors,
    open_inference_binary,
    open_inference_json,
    openai_base64,
    openai_mean,
)
from tests.support.servers import serve

MOST = 8 * 2**20
V, D, LONGEST = 7, 256, 9000
FITS = MOST // (4 * D)
"""Number of tokens of the largest buffered answer."""
IDS = np.random.default_rng(5).integers(0, V, LONGEST).tolist()
WHOLE: tuple[Protocol, ...] = (grpc_raw, grpc_typed, decode_frame, decode_json, openai_base64)
IN_PIECES: tuple[Protocol, ...] = (
    *(native_json, native_float, native_bytes, native_npy, native_raw, native_safetensors, own_client, openai_mean),
    *(open_inference_json, open_inference_binary),
)
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


def message(tokens: int, width: int = D) -> str:
    return f"got {4 * tokens * width} bytes of vectors, expected at most {MOST} in a buffered response"


@pytest.mark.parametrize("protocol", WHOLE)
def test_buffered_response_over_limit_is_rejected(buffered_clients: Clients, protocol: Protocol) -> None:
    for _ in range(2):
        with pytest.raises(RequestRefused) as refused:
            protocol(buffered_clients, "gpt", {"input_ids": [IDS[: FITS + 1]]})
        assert message(FITS + 1) in refused.value.message
        assert refused.value.status in (400 if protocol is openai_base64 else 413, "StatusCode.RESOURCE_EXHAUSTED")
        assert protocol(buffered_clients, "gpt", {"input_ids": [IDS[:FITS]]}).tobytes() == expected(FITS)


@pytest.mark.parametrize("protocol", IN_PIECES)
def test_streamed_response_has_no_limit(buffered_clients: Clients, protocol: Protocol) -> None:
    found = protocol(buffered_clients, "gpt", {"input_ids": [IDS]})
    if protocol is openai_mean:
        assert found.shape == (1, D)
    else:
        assert found.tobytes() == expected(LONGEST)


def test_pooled_vectors_over_limit_are_rejected(buffered_clients: Clients) -> None:
    rows = [[token] for token in IDS[: FITS + 1]]
    with pytest.raises(RequestRefused) as refused:
        openai_mean(buffered_clients, "gpt", {"input_ids": rows})
    assert (refused.value.status, message(FITS + 1) in refused.value.message) == (400, True)
    expected = vectors_of(IDS[:FITS], [0] * FITS)
    assert openai_mean(buffered_clients, "gpt", {"input_ids": rows[:-1]}).tobytes() == expected.tobytes()


def test_stream_continues_after_rejected_step(buffered_clients: Clients) -> None:
    with buffered_clients.own.decode("gpt") as stream:
        begun = stream.step([IDS[:1]])
        with pytest.raises(RequestError, match="in a buffered response"):
            stream.step([IDS[1 : FITS + 2]])
        rest = stream.step([IDS[1 : FITS + 1]])
    assert begun.tobytes() + rest.tobytes() == expected(FITS + 1)


@pytest.mark.parametrize("of_stream", [False, True])
def test_sequence_continues_after_rejected_step(buffered_clients: Clients, of_stream: bool) -> None:
    def ask(begin: int, end: int, start: bool = False) -> service_pb2.ModelInferRequest:
        request = infer_message([IDS[begin:end]])
        request.parameters["sequence_id"].int64_param = 9
        request.parameters["sequence_start"].bool_param = start
        return request

    asked = [ask(0, 1, start=True), ask(1, FITS + 2), ask(1, FITS + 1)]
    found, errors = [], []
    if of_stream:
        for answer in buffered_clients.stub.ModelStreamInfer(iter(asked)):
            errors += [answer.error_message] if answer.error_message else []
            found += answer.infer_response.raw_output_contents
    else:
        for request in asked:
            try:
                found += buffered_clients.stub.ModelInfer(request).raw_output_contents
            except grpc.RpcError as error:
                errors.append(error.details())
    assert b"".join(found) == expected(FITS + 1)
    (said,) = errors
    assert message(FITS + 1) in str(said)


def test_mixed_json_and_binary_output_over_limit_is_rejected(buffered_clients: Clients) -> None:
    inputs = tritonclient.http.InferInput("input_ids", [1, FITS + 1], "INT64")
    inputs.set_data_from_numpy(np.array([IDS[: FITS + 1]]))
    outputs = [
        tritonclient.http.InferRequestedOutput(name, binary_data=binary)
        for name, binary in (("embeddings", True), ("token_embeddings", False))
    ]
    with (
        tritonclient.http.InferenceServerClient(str(buffered_clients.http.base_url.netloc, "ascii")) as client,
        pytest.raises(InferenceServerException, match="in a buffered response") as refused,
    ):
        client.infer("gpt", [inputs], outputs=outputs)
    assert refused.value.status() == "413"


def refused(answer: httpx.Response, field: str, size: int) -> bool:
    problem = answer.json()
    allowed = f"at most {MOST} in a buffered response"
    found = (answer.status_code, problem["field"], problem["got"], problem["expected"])
    return bool(found == (413, field, f"{size} bytes of vectors", allowed))


def test_rotary_outputs_count_towards_limit(buffered_clients: Clients) -> None:
    width = D + 32 + 32
    most = MOST // (4 * width)
    fields = {"output": ["embeddings", "rotary_cos", "rotary_sin"]}
    assert (
        buffered_clients.http.post("/models/rotary/embed", json={"input_ids": [IDS[:most]]} | fields).status_code == 200
    )
    answer = buffered_clients.http.post("/models/rotary/embed", json={"input_ids": [IDS[: most + 1]]} | fields)
    assert refused(answer, "input_ids", 4 * (most + 1) * width)
    assert buffered_clients.http.post("/models/rotary/embed", json={"input_ids": [IDS]}).status_code == 200


def test_bias_over_limit_is_rejected(buffered_clients: Clients) -> None:
    lengths = {"query_length": 1024, "key_length": 1024}
    assert buffered_clients.http.post("/models/alibi/bias", json=lengths).status_code == 200
    answer = buffered_clients.http.post("/models/alibi/bias", json=lengths | {"key_length": 1025})
    assert refused(answer, "query_length and key_length", 4 * 2 * 1024 * 1025)


def test_image_vectors_over_limit_are_rejected(buffered_clients: Clients) -> None:
    most = MOST // (4 * 2048 * 5)

    def ask(images: int) -> int:
        pixels = tritonclient.grpc.InferInput("pixel_values", [images, 3, 8, 8], "FP32")
        pixels.set_data_from_numpy(np.zeros((images, 3, 8, 8), np.float32))
        return len(buffered_clients.grpc.infer("vit", [pixels]).as_numpy("embeddings"))

    assert ask(most) == most
    with pytest.raises(
        InferenceServerException, match=r"pixel_values: got .*, expected at most 8388608 in a buffered response"
    ):
        ask(most + 1)


def test_minimum_limit_holds_one_chunk() -> None:
    (least,) = [bound.ge for bound in Settings.model_fields["max_buffered_response_bytes"].metadata]
    assert least >= FLOAT32_BYTES * INLINE_MAX_VALUES
