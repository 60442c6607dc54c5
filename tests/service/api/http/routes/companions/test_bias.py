"""Pairwise attention biases. The oracle is the PyTorch module."""

import base64
import io
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from safetensors.numpy import load

from tests.service.api.http.routes.companions.calls import IDS, H, decoded, error_of, frontend_of, infer, tensor
from tests.support.protocols import Clients

LENGTHS = [(0, 5, 5), (7, 1, 8), (3, 4, 2)]


@pytest.mark.parametrize(("name", "lengths"), [*product(("alibi", "t5"), LENGTHS), ("t5", (2**31 - 2, 2, 3))])
def test_bias_response_equals_module(catalogue_http: httpx.Client, name: str, lengths: tuple[int, int, int]) -> None:
    expected = frontend_of(name).bias(*lengths).detach().numpy()
    fields = dict(zip(("query_offset", "query_length", "key_length"), lengths, strict=True))
    answer = catalogue_http.post(f"/models/{name}/bias", json=fields).json()
    assert answer["shape"] == [1, H, lengths[1], lengths[2]]
    assert decoded(answer, "bias").tobytes() == expected.tobytes()
    found = infer(catalogue_http, name, [tensor(field, [value]) for field, value in fields.items()], "bias")
    assert found["bias"].tobytes() == expected.tobytes()


def test_bias_is_available_in_every_format(catalogue_http: httpx.Client) -> None:
    expected = frontend_of("t5").bias(2, 3, 5).detach().numpy()
    fields = {"query_offset": 2, "query_length": 3, "key_length": 5}
    raw = catalogue_http.post("/models/t5/bias", json=fields, headers={"Accept": "application/octet-stream"})
    assert (raw.headers["Preblock-Output"], raw.headers["Preblock-Shape"]) == ("bias", "1,3,3,5")
    assert raw.content == expected.tobytes()
    npy = catalogue_http.post("/models/t5/versions/1/bias", json=fields, headers={"Accept": "application/x-npy"})
    assert np.array_equal(np.load(io.BytesIO(npy.content)), expected)
    tensors = catalogue_http.post("/models/t5/bias", json=fields, headers={"Accept": "application/x-safetensors"})
    assert list(load(tensors.content)) == ["bias"]
    assert np.array_equal(load(tensors.content)["bias"], expected)
    narrow = catalogue_http.post(
        "/models/t5/bias", json=fields | {"dtype": "bfloat16"}, headers={"Accept": "application/x-npy"}
    )
    assert narrow.status_code == 406
    floats = catalogue_http.post("/models/t5/bias", json=fields | {"encoding": "float"}).json()["bias"]
    assert np.array_equal(np.array(floats, np.float32), expected)
    half = catalogue_http.post("/models/t5/bias", json=fields | {"dtype": "float16"}).json()
    assert base64.b64decode(half["bias"]) == expected.astype(np.float16).tobytes()


def test_relative_sinusoid_response_equals_module(catalogue_http: httpx.Client) -> None:
    answer = catalogue_http.post("/models/sinusoid/bias", json={"query_length": 3, "key_length": 5}).json()
    expected = frontend_of("sinusoid").bias(3, 5).numpy()
    np.testing.assert_allclose(decoded(answer, "relative_positions"), expected, rtol=0, atol=2.0**-23)


def test_bias_over_grpc_equals_module(catalogue_clients: Clients) -> None:
    inputs = []
    for name, value in (("query_offset", 4), ("query_length", 2), ("key_length", 6)):
        inputs.append(tritonclient.grpc.InferInput(name, [1], "INT64"))
        inputs[-1].set_data_from_numpy(np.array([value]))
    outputs = [tritonclient.grpc.InferRequestedOutput("bias")]
    found = catalogue_clients.grpc.infer("alibi", inputs, outputs=outputs).as_numpy("bias")
    assert found.tobytes() == frontend_of("alibi").bias(4, 2, 6).numpy().tobytes()


@pytest.mark.parametrize(
    ("name", "fields", "status", "message"),
    [
        ("levels", {}, 422, "bias: this model has no attention bias"),
        ("alibi", {"query_length": 0}, 422, "query_length: got 0"),
        ("alibi", {"key_length": 51}, 422, "key_length: got 51"),
        ("alibi", {"query_offset": 49}, 422, "query_offset + query_length: got 49 + 2 = 51"),
        ("alibi", {"query_offset": -1}, 422, "query_offset: got -1"),
        ("t5", {"query_length": 2**31, "key_length": 2**31}, 413, "query_length and key_length: got 13"),
        ("t5", {"query_offset": 2**31 - 1}, 422, "query_offset + query_length: got 2147483647 + 2 = 2147483649, expec"),
        ("t5", {"query_offset": 2**53}, 422, "query_offset + query_length: got 9007199254740992 + 2 = 90071992547409"),
        ("t5", {"query_offset": 2**63 - 1}, 422, "query_offset + query_length: got 9223372036854775807 + 2"),
        ("t5", {"query_length": 2**63}, 422, "query_length: got 9223372036854775808"),
        ("t5", {"key_length": "5"}, 422, "key_length: got '5'"),
        ("t5", {"key_length": None}, 422, "key_length: got None"),
        ("t5", {"dtype": "int8"}, 422, "dtype: got int8"),
        ("t5", {"encoding": "hex"}, 422, "encoding: got hex"),
        ("t5", {"input_ids": [1]}, 422, "unknown field input_ids"),
        ("sinusoid", {"query_offset": 1}, 422, "query_offset is not an input of this bias: its last query"),
        ("vit", {}, 422, "the model 'vit' takes pixel_values"),
    ],
)
def test_bad_bias_request_is_rejected(
    catalogue_http: httpx.Client, name: str, fields: dict[str, Any], status: int, message: str
) -> None:
    got, detail = error_of(
        catalogue_http.post(f"/models/{name}/bias", json={"query_length": 2, "key_length": 2} | fields)
    )
    assert (got, detail[: len(message)]) == (status, message)


def test_bias_with_other_outputs_is_rejected(catalogue_http: httpx.Client) -> None:
    body = {"inputs": [tensor("input_ids", IDS)], "outputs": [{"name": "embeddings"}, {"name": "bias"}]}
    status, message = error_of(catalogue_http.post("/v2/models/t5/infer", json=body))
    assert (status, message[:53]) == (400, "outputs: got ['embeddings', 'bias'], expected bias al")
