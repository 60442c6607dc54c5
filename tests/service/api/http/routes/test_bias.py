"""Other outputs and inputs: rotary angles, pairwise biases, extra inputs, and the vectors of images.

The oracle is the PyTorch module.
"""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from safetensors.numpy import load, save

from preblock.models.frontend import FrontEnd
from tests.data.make_artifacts import build_frontend
from tests.support.artifacts import copy_artifact
from tests.support.protocols import Clients, connect
from tests.support.servers import serve

V, D, H = 11, 4, 3
BIASES = ("alibi", "t5", "sinusoid")
MODELS = ("rotary", "levels", "segments", "vit", *BIASES)
Json = dict[str, Any]
IDS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    root: Path = tmp_path_factory.mktemp("companions")
    for name in MODELS:
        copy_artifact(name, root)
    with serve(root) as server, connect(server) as connected:
        yield connected


@pytest.fixture
def http(clients: Clients) -> httpx.Client:
    return clients.http


def frontend_of(name: str) -> FrontEnd:
    frontend = build_frontend(name)
    assert isinstance(frontend, FrontEnd)
    return frontend


def tensor(name: str, value: Any, datatype: str = "INT64") -> dict[str, Any]:
    array = np.array(value)
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}


def zeros(*shape: int) -> Json:
    return tensor("pixel_values", np.zeros(shape), "FP32")


def infer(http: httpx.Client, model: str, inputs: list[Json], *outputs: str) -> dict[str, NDArray[np.float32]]:
    body = {"inputs": inputs, "outputs": [{"name": name} for name in outputs]}
    answer = http.post(f"/v2/models/{model}/infer", json=body)
    assert answer.status_code == 200, answer.text
    return {o["name"]: np.array(o["data"], np.float32).reshape(o["shape"]) for o in answer.json()["outputs"]}


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("detail") or answer.json()["error"]


def decoded(answer: dict[str, Any], name: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(answer[name]), "<f4").reshape(answer["shape"])


@pytest.mark.parametrize("offset", [0, 13, [5, 9]])
def test_rotary_angles_are_returned_on_request(http: httpx.Client, offset: int | list[int]) -> None:
    names = ["embeddings", "rotary_cos", "rotary_sin", "rotary_cos_near", "rotary_sin_near"]
    fields = {"input_ids": IDS, "offset": offset, "output": names}
    found = http.post("/models/rotary/embed", json=fields).json()["outputs"]
    expected = frontend_of("rotary").rotary_outputs(torch.tensor(IDS), torch.tensor(offset).reshape(-1))
    assert list(found) == names
    for name, angles in expected.items():
        values = np.frombuffer(base64.b64decode(found[name]["data"]), "<f4").reshape(found[name]["shape"])
        np.testing.assert_allclose(values, angles.expand(2, 3, -1).numpy(), rtol=0, atol=2.0**-23)
    tensors = [tensor("input_ids", IDS), tensor("offset", offset if isinstance(offset, list) else [offset])]
    for name, values in infer(http, "rotary", tensors, *names).items():
        assert values.tobytes() == base64.b64decode(found[name]["data"])


def test_rotary_angles_of_unequal_rows_equal_single_rows(http: httpx.Client) -> None:
    def ask(rows: list[list[int]], offset: list[int]) -> bytes:
        fields = {"input_ids": rows, "offset": offset, "output": "rotary_cos"}
        return http.post("/models/rotary/embed", json=fields, headers={"Accept": "application/octet-stream"}).content

    assert ask([[1, 2, 3], [4]], [30, 2]) == ask([[1, 2, 3]], [30]) + ask([[4]], [2])


def test_rotary_output_has_its_own_max_len(http: httpx.Client) -> None:
    fields = {"input_ids": IDS, "offset": 14}
    assert http.post("/models/rotary/embed", json=fields).status_code == 200
    answer = http.post("/models/rotary/embed", json=fields | {"output": "rotary_cos_near"})
    status, detail = error_of(answer)
    assert (status, detail[:57]) == (422, "offset[0] + tokens: got 14 + 3 = 17, expected at most 16,")


def test_manifest_describes_rotary_outputs(http: httpx.Client) -> None:
    told = http.get("/models/rotary").json()["manifest"]["rotary"]
    assert [(rotary["cos"], rotary["width"], rotary["layout"], rotary["max_len"]) for rotary in told] == [
        ("rotary_cos", 6, "half", None),
        ("rotary_cos_near", 4, "interleaved", 16),
    ]


LENGTHS = [(0, 5, 5), (7, 1, 8), (3, 4, 2)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_bias_response_equals_module(http: httpx.Client, name: str, lengths: tuple[int, int, int]) -> None:
    expected = frontend_of(name).bias(*lengths).detach().numpy()
    fields = dict(zip(("query_offset", "query_length", "key_length"), lengths, strict=True))
    answer = http.post(f"/models/{name}/bias", json=fields).json()
    assert answer["shape"] == [1, H, lengths[1], lengths[2]]
    assert decoded(answer, "bias").tobytes() == expected.tobytes()
    found = infer(http, name, [tensor(field, [value]) for field, value in fields.items()], "bias")
    assert found["bias"].tobytes() == expected.tobytes()


def test_bias_is_available_in_every_format(http: httpx.Client) -> None:
    expected = frontend_of("t5").bias(2, 3, 5).detach().numpy()
    fields = {"query_offset": 2, "query_length": 3, "key_length": 5}
    raw = http.post("/models/t5/bias", json=fields, headers={"Accept": "application/octet-stream"})
    assert (raw.headers["Preblock-Output"], raw.headers["Preblock-Shape"]) == ("bias", "1,3,3,5")
    assert raw.content == expected.tobytes()
    npy = http.post("/models/t5/versions/1/bias", json=fields, headers={"Accept": "application/x-npy"})
    assert np.array_equal(np.load(io.BytesIO(npy.content)), expected)
    tensors = http.post("/models/t5/bias", json=fields, headers={"Accept": "application/x-safetensors"})
    assert list(load(tensors.content)) == ["bias"]
    assert np.array_equal(load(tensors.content)["bias"], expected)
    narrow = http.post("/models/t5/bias", json=fields | {"dtype": "bfloat16"}, headers={"Accept": "application/x-npy"})
    assert narrow.status_code == 406
    floats = http.post("/models/t5/bias", json=fields | {"encoding": "float"}).json()["bias"]
    assert np.array_equal(np.array(floats, np.float32), expected)
    half = http.post("/models/t5/bias", json=fields | {"dtype": "float16"}).json()
    assert base64.b64decode(half["bias"]) == expected.astype(np.float16).tobytes()


def test_relative_sinusoid_response_equals_module(http: httpx.Client) -> None:
    answer = http.post("/models/sinusoid/bias", json={"query_length": 3, "key_length": 5}).json()
    expected = frontend_of("sinusoid").bias(3, 5).numpy()
    np.testing.assert_allclose(decoded(answer, "relative_positions"), expected, rtol=0, atol=2.0**-23)


def test_bias_at_largest_offset_equals_module(http: httpx.Client) -> None:
    lengths = {"query_offset": 2**31 - 2, "query_length": 2, "key_length": 3}
    answer = http.post("/models/t5/bias", json=lengths).json()
    assert decoded(answer, "bias").tobytes() == frontend_of("t5").bias(*lengths.values()).detach().numpy().tobytes()


def test_bias_over_grpc_equals_module(clients: Clients) -> None:
    inputs = []
    for name, value in (("query_offset", 4), ("query_length", 2), ("key_length", 6)):
        inputs.append(tritonclient.grpc.InferInput(name, [1], "INT64"))
        inputs[-1].set_data_from_numpy(np.array([value]))
    outputs = [tritonclient.grpc.InferRequestedOutput("bias")]
    found = clients.grpc.infer("alibi", inputs, outputs=outputs).as_numpy("bias")
    assert found.tobytes() == frontend_of("alibi").bias(4, 2, 6).numpy().tobytes()


@pytest.mark.parametrize(
    ("name", "fields", "status", "message"),
    [
        ("levels", {}, 422, "bias: this model has no attention bias"),
        ("alibi", {"query_length": 0}, 422, "query_length: got 0, expected 1 to 50"),
        ("alibi", {"key_length": 51}, 422, "key_length: got 51, expected 1 to 50"),
        ("alibi", {"query_offset": 49}, 422, "query_offset + query_length: got 49 + 2 = 51, expected at most 50"),
        ("alibi", {"query_offset": -1}, 422, "query_offset: got -1, expected 0 or more"),
        ("t5", {"query_length": 0}, 422, "query_length: got 0, expected 1 to 2147483648"),
        ("t5", {"query_length": 2**31, "key_length": 2**31}, 413, "query_length and key_length: got 13"),
        ("t5", {"query_offset": 2**31 - 1}, 422, "query_offset + query_length: got 2147483647 + 2 = 2147483649, expec"),
        ("t5", {"query_offset": 2**53}, 422, "query_offset + query_length: got 9007199254740992 + 2 = 90071992547409"),
        ("t5", {"query_offset": 2**63 - 1}, 422, "query_offset + query_length: got 9223372036854775807 + 2"),
        ("t5", {"query_length": 2**63}, 422, "query_length: got 9223372036854775808, expected a 64-bit integer"),
        ("t5", {"key_length": "5"}, 422, "key_length: got '5', expected a 64-bit integer"),
        ("t5", {"key_length": None}, 422, "key_length: got None, expected a 64-bit integer"),
        ("t5", {"dtype": "int8"}, 422, "dtype: got int8, expected float32"),
        ("t5", {"encoding": "hex"}, 422, "encoding: got hex, expected base64, float"),
        ("t5", {"input_ids": [1]}, 422, "unknown field input_ids; expected query_length, key_length"),
        ("sinusoid", {"query_offset": 1}, 422, "query_offset is not an input of this bias: its last query"),
        ("vit", {}, 422, "the model 'vit' takes pixel_values"),
    ],
)
def test_bad_bias_request_is_rejected(
    http: httpx.Client, name: str, fields: dict[str, Any], status: int, message: str
) -> None:
    got, detail = error_of(http.post(f"/models/{name}/bias", json={"query_length": 2, "key_length": 2} | fields))
    assert (got, detail[: len(message)]) == (status, message)


def test_bias_with_other_outputs_is_rejected(http: httpx.Client) -> None:
    body = {"inputs": [tensor("input_ids", IDS)], "outputs": [{"name": "embeddings"}, {"name": "bias"}]}
    status, message = error_of(http.post("/v2/models/t5/infer", json=body))
    assert (status, message[:53]) == (400, "outputs: got ['embeddings', 'bias'], expected bias al")


def test_hierarchical_levels_are_named_inputs(http: httpx.Client) -> None:
    sentence, word = [[0, 0, 1], [2, 3, 4]], [[0, 1, 0], [5, 4, 3]]
    indices = {"sentence": torch.tensor(sentence), "word": torch.tensor(word)}
    expected = frontend_of("levels")(torch.tensor(IDS), indices=indices).detach().numpy()
    answer = http.post("/models/levels/embed", json={"input_ids": IDS, "sentence": sentence, "word": word}).json()
    assert decoded(answer, "embeddings").tobytes() == expected.tobytes()
    named = {"input_ids": np.array(IDS), "word": np.array(word), "sentence": np.array(sentence)}
    kind = {"Content-Type": "application/x-safetensors", "Accept": "application/x-safetensors"}
    found = http.post("/models/levels/embed", content=save(named), headers=kind)
    assert load(found.content)["embeddings"].tobytes() == expected.tobytes()
    tensors = [tensor("input_ids", IDS), tensor("word", word), tensor("sentence", sentence)]
    assert infer(http, "levels", tensors)["embeddings"].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"word": [[0, 1, 6], [0, 0, 0]]}, "word[0][2]: got 6, expected 0 to 5"),
        ({"word": [[0, 1], [0, 0, 0]]}, "word[0]: got 2 values, expected 3 values, as input_ids[0] has"),
        ({"token_type_ids": IDS}, "token_type_ids is not an input: this model has no segments"),
        (
            {"day": IDS},
            "unknown field day; expected input_ids, position_ids, attention_mask, token_type_ids, sentence",
        ),
    ],
)
def test_bad_level_input_is_rejected(http: httpx.Client, fields: dict[str, Any], message: str) -> None:
    status, detail = error_of(http.post("/models/levels/embed", json={"input_ids": IDS} | fields))
    assert (status, detail[: len(message)]) == (422, message)


def test_missing_required_segments_are_rejected(http: httpx.Client) -> None:
    expected = frontend_of("segments")(torch.tensor(IDS), token_type_ids=torch.tensor(IDS)).detach().numpy()
    answer = http.post("/models/segments/embed", json={"input_ids": IDS, "token_type_ids": IDS}).json()
    assert decoded(answer, "embeddings").tobytes() == expected.tobytes()
    status, detail = error_of(http.post("/models/segments/embed", json={"input_ids": IDS}))
    assert (status, detail) == (
        422,
        "token_type_ids is missing: this model needs a value for each token",
    )


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (2, 3, 12, 16), (3, 3, 4, 4)])
def test_image_response_equals_module(http: httpx.Client, clients: Clients, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)
    with torch.inference_mode():
        expected = build_frontend("vit")(torch.from_numpy(pixels)).numpy()
    found = infer(http, "vit", [tensor("pixel_values", pixels, "FP32")])["embeddings"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    with tritonclient.http.InferenceServerClient(str(http.base_url).removeprefix("http://").rstrip("/")) as client:
        given = tritonclient.http.InferInput("pixel_values", list(shape), "FP32")
        given.set_data_from_numpy(pixels)
        assert client.infer("vit", [given]).as_numpy("embeddings").tobytes() == found.tobytes()
    given = tritonclient.grpc.InferInput("pixel_values", list(shape), "FP32")
    given.set_data_from_numpy(pixels)
    assert clients.grpc.infer("vit", [given]).as_numpy("embeddings").tobytes() == found.tobytes()


def test_patch_embedding_metadata_describes_its_input(http: httpx.Client) -> None:
    metadata = http.get("/v2/models/vit").json()
    assert metadata["inputs"] == [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
    assert metadata["outputs"] == [{"name": "embeddings", "datatype": "FP32", "shape": [-1, -1, 8]}]
    model = http.get("/models/vit").json()
    assert (model["max_len"], model["manifest"]["kind"], model["manifest"]["patch_size"]) == (None, "stem", 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (zeros(1, 3, 8, 10), "pixel_values.shape: got [1, 3, 8, 10], expected multiples of 4, or 8 by 8"),
        (zeros(1, 2, 8, 8), "pixel_values.shape: got [1, 2, 8, 8], expected [-1, 3, -1, -1]"),
        (zeros(3, 8, 8), "pixel_values.shape: got [3, 8, 8], expected [-1, 3, -1, -1]"),
        (zeros(1, 3, 8, 8) | {"datatype": "INT64"}, "pixel_values.datatype: got INT64, expected FP32"),
        (tensor("input_ids", IDS), "inputs.name: got input_ids, expected pixel_values"),
        (
            {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 4, 4], "data": [0] * 47 + [1e39]},
            "pixel_values.data[47]: got 1e+39, expected a number that float32 holds",
        ),
        (
            {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 4, 4], "data": [0] * 47 + [True]},
            "pixel_values.data[47]: got True, expected a number that float32 holds",
        ),
    ],
)
def test_bad_image_is_rejected(http: httpx.Client, given: dict[str, Any], message: str) -> None:
    status, error = error_of(http.post("/v2/models/vit/infer", json={"inputs": [given]}))
    assert (status, error[: len(message)]) == (400, message)


def test_token_ids_for_stem_are_rejected_with_its_protocol(http: httpx.Client) -> None:
    status, detail = error_of(http.post("/models/vit/embed", json={"input_ids": [1]}))
    expected = "the model 'vit' takes pixel_values by the Open Inference Protocol, not token ids"
    assert (status, detail) == (422, expected)
