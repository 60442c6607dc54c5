"""Models with other inputs and outputs: biases, images, levels, rotary angles. The oracle is the PyTorch module."""

from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from safetensors.numpy import load

from tests.service.api.http.native_requests import (
    BYTES,
    IDS,
    NPY,
    SAFETENSORS,
    ask,
    post_json,
    refusal,
    told,
    vectors_of,
)
from tests.service.api.http.routes.v2_calls import arrays_of, error_of, infer, outputs, tensor
from tests.support.late import make_artifacts, torch
from tests.support.open_inference import tensor_message
from tests.support.protocols import Clients, call_grpc

BIAS_FIELDS = ("query_offset", "query_length", "key_length")


def frontend_of(name: str) -> Any:
    """Return the PyTorch module of a stored artifact."""
    return make_artifacts.build_frontend(name)


def bias_of(http: httpx.Client, path: str, accept: str = "*/*", **fields: Any) -> httpx.Response:
    return http.post(f"/models/{path}/bias", json=fields, headers={"Accept": accept})


def test_bias_response_equals_module(catalogue_clients: Clients) -> None:
    catalogue_http = catalogue_clients.http
    for name in ("alibi", "t5"):
        for lengths in ((0, 5, 5), (7, 1, 8), (3, 4, 2), *([(2**31 - 2, 2, 3)] if name == "t5" else [])):
            expected = frontend_of(name).bias(*lengths).detach().numpy()
            fields: dict[str, Any] = dict(zip(BIAS_FIELDS, lengths, strict=True))
            answer = vectors_of(bias_of(catalogue_http, name, **fields).json(), "bias")
            assert (answer.shape, answer.tobytes()) == ((1, 3, *lengths[1:]), expected.tobytes())
            inputs = [tensor(field, [value]) for field, value in fields.items()]
            found = arrays_of(infer(catalogue_http, *inputs, model=name, outputs=outputs("bias")))
            assert found["bias"].tobytes() == expected.tobytes()
            given = {field: np.array([value]) for field, value in fields.items()}
            by_grpc = call_grpc(catalogue_clients, "ModelInfer", tensor_message(given, name, outputs=outputs("bias")))
            assert list(by_grpc.raw_output_contents) == [expected.tobytes()]
    sinusoid = bias_of(catalogue_http, "sinusoid", query_length=3, key_length=5).json()
    expected = frontend_of("sinusoid").bias(3, 5).numpy()
    np.testing.assert_allclose(vectors_of(sinusoid, "relative_positions"), expected, rtol=0, atol=2.0**-23)


def test_bias_is_available_as_bytes_and_tensors(catalogue_http: httpx.Client) -> None:
    expected = frontend_of("t5").bias(2, 3, 5).detach().numpy()
    fields: dict[str, Any] = dict(zip(BIAS_FIELDS, (2, 3, 5), strict=True))
    raw = bias_of(catalogue_http, "t5", BYTES, **fields)
    assert (raw.headers["Preblock-Output"], raw.headers["Preblock-Shape"]) == ("bias", "1,3,3,5")
    assert raw.content == expected.tobytes()
    tensors = load(bias_of(catalogue_http, "t5/versions/1", SAFETENSORS, **fields).content)
    assert (list(tensors), tensors["bias"].tobytes()) == (["bias"], expected.tobytes())
    assert bias_of(catalogue_http, "t5", NPY, dtype="bfloat16", **fields).status_code == 406
    half = bias_of(catalogue_http, "t5", BYTES, dtype="float16", **fields)
    assert half.content == expected.astype(np.float16).tobytes()


BAD_BIASES: list[tuple[str, dict[str, Any], int, str]] = [
    ("levels", {}, 422, "bias: this model has no attention bias"),
    ("alibi", {"query_length": 0}, 422, "query_length: got 0"),
    ("alibi", {"key_length": 51}, 422, "key_length: got 51"),
    ("alibi", {"query_offset": 49}, 422, "query_offset + query_length: got 49 + 2 = 51"),
    ("t5", {"query_length": 2**31, "key_length": 2**31}, 413, "query_length and key_length: got 13"),
    ("t5", {"query_offset": 2**31 - 1}, 422, "query_offset + query_length: got 2147483647 + 2 = 2147483649, expec"),
    ("t5", {"key_length": "5"}, 422, "key_length: got '5'"),
    ("t5", {"input_ids": [1]}, 422, "unknown field input_ids"),
    ("sinusoid", {"query_offset": 1}, 422, "query_offset is not an input of this bias: its last query"),
    ("vit", {}, 422, "the model 'vit' takes pixel_values"),
]


def test_bad_bias_request_is_rejected(catalogue_http: httpx.Client) -> None:
    for name, fields, status, message in BAD_BIASES:
        got, detail = refusal(bias_of(catalogue_http, name, **{"query_length": 2, "key_length": 2} | fields))
        assert (got, detail[: len(message)]) == (status, message), fields
    both = infer(catalogue_http, tensor(), model="t5", outputs=outputs("embeddings", "bias"))
    assert error_of(both).startswith("outputs: got ['embeddings', 'bias'], expected bias al")


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (2, 3, 12, 16), (3, 3, 4, 4)])
def test_image_response_equals_module(catalogue_clients: Clients, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)
    with torch.inference_mode():
        expected = frontend_of("vit")(torch.from_numpy(pixels)).numpy()
    http = catalogue_clients.http
    given = tensor("pixel_values", pixels.ravel().tolist(), datatype="FP32", shape=shape)
    found = arrays_of(infer(http, given, model="vit"))["embeddings"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    image = tritonclient.grpc.InferInput("pixel_values", list(shape), "FP32").set_data_from_numpy(pixels)
    assert catalogue_clients.grpc.infer("vit", [image]).as_numpy("embeddings").tobytes() == found.tobytes()


def image(*shape: int, **more: Any) -> dict[str, Any]:
    zeros = {"name": "pixel_values", "datatype": "FP32", "data": [0] * int(np.prod(shape))}
    return zeros | {"shape": shape} | more


def test_bad_image_is_rejected(catalogue_http: httpx.Client) -> None:
    for given, message in (
        (image(1, 3, 8, 10), "pixel_values.shape: got [1, 3, 8, 10]"),
        (image(1, 2, 8, 8), "pixel_values.shape: got [1, 2, 8, 8]"),
        (image(3, 8, 8), "pixel_values.shape: got [3, 8, 8]"),
        (image(1, 3, 8, 8, datatype="INT64"), "pixel_values.datatype: got INT64"),
        (image(1, 3, 4, 4, data=[0] * 47 + [1e39]), "pixel_values.data[47]: got 1e+39"),
        (image(1, 3, 4, 4, data=[0] * 47 + [True]), "pixel_values.data[47]: got True"),
        (tensor(), "inputs.name: got input_ids"),
    ):
        assert error_of(infer(catalogue_http, given, model="vit")).startswith(message), message
    expected = "the model 'vit' takes pixel_values by the Open Inference Protocol, not token ids"
    assert refusal(post_json(catalogue_http, "vit", input_ids=[1])) == (422, expected)


def test_patch_embedding_metadata_describes_its_input(catalogue_http: httpx.Client) -> None:
    metadata = catalogue_http.get("/v2/models/vit").json()
    assert metadata["inputs"] == [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
    assert metadata["outputs"] == [{"name": "embeddings", "datatype": "FP32", "shape": [-1, -1, 8]}]
    model = catalogue_http.get("/models/vit").json()
    assert (model["max_len"], model["manifest"]["kind"], model["manifest"]["patch_size"]) == (None, "stem", 4)


def test_levels_and_segments_are_named_inputs(catalogue_http: httpx.Client) -> None:
    levels = {"sentence": [[0, 0, 1], [2, 3, 4]], "word": [[0, 1, 0], [5, 4, 3]]}
    indices = {name: torch.tensor(value) for name, value in levels.items()}
    expected = frontend_of("levels")(torch.tensor(IDS), indices=indices).detach().numpy().tobytes()
    assert vectors_of(told(catalogue_http, "levels", input_ids=IDS, **levels)).tobytes() == expected
    inputs = [tensor(), *(tensor(name, value) for name, value in levels.items())]
    assert arrays_of(infer(catalogue_http, *inputs, model="levels"))["embeddings"].tobytes() == expected
    expected = frontend_of("segments")(torch.tensor(IDS), token_type_ids=torch.tensor(IDS)).detach().numpy().tobytes()
    assert vectors_of(told(catalogue_http, "segments", input_ids=IDS, token_type_ids=IDS)).tobytes() == expected
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("levels", {"word": [[0, 1, 6], [0, 0, 0]]}, "word[0][2]: got 6"),
        ("levels", {"word": [[0, 1], [0, 0, 0]]}, "word[0]: got 2 values"),
        ("segments", {}, "token_type_ids is missing: this model needs a value for each token"),
    ]
    for model, fields, message in bad:
        status, detail = refusal(post_json(catalogue_http, model, input_ids=IDS, **fields))
        assert (status, detail[: len(message)]) == (422, message)


@pytest.mark.parametrize("offset", [0, 13, [5, 9]])
def test_rotary_angles_are_returned_on_request(catalogue_http: httpx.Client, offset: Any) -> None:
    names = ["embeddings", "rotary_cos", "rotary_sin", "rotary_cos_near", "rotary_sin_near"]
    found = told(catalogue_http, "rotary", input_ids=IDS, offset=offset, output=names)
    expected = frontend_of("rotary").rotary_outputs(torch.tensor(IDS), torch.tensor(offset).reshape(-1))
    assert list(found["outputs"]) == names
    for name, angles in expected.items():
        values = angles.expand(2, 3, -1).numpy()
        np.testing.assert_allclose(vectors_of(found, name), values, rtol=0, atol=2.0**-23)
    tensors = [tensor(), tensor("offset", offset if isinstance(offset, list) else [offset])]
    for name, values in arrays_of(infer(catalogue_http, *tensors, model="rotary", outputs=outputs(*names))).items():
        assert values.tobytes() == vectors_of(found, name).tobytes()


def test_rotary_angles_of_unequal_rows_equal_single_rows(catalogue_http: httpx.Client) -> None:
    def angles(rows: list[list[int]], offset: list[int]) -> bytes:
        return ask(catalogue_http, "rotary", BYTES, input_ids=rows, offset=offset, output="rotary_cos").content

    assert angles([[1, 2, 3], [4]], [30, 2]) == angles([[1, 2, 3]], [30]) + angles([[4]], [2])
    assert post_json(catalogue_http, "rotary", input_ids=IDS, offset=14).status_code == 200
    refused = post_json(catalogue_http, "rotary", input_ids=IDS, offset=14, output="rotary_cos_near")
    assert refusal(refused)[1].startswith("offset[0] + tokens: got 14 + 3 = 17, expected at most 16,")
