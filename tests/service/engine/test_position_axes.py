"""Positions of three axes (m-RoPE) on every API. Oracle: the rotary module of transformers on the same positions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from numpy.typing import NDArray
from safetensors.numpy import load as read_safetensors
from safetensors.numpy import save as write_safetensors

import preblock
from preblock.service.artifacts.manifest import Manifest
from tests.support.late import exporter, library_models, torch
from tests.support.servers import Server, serve

FAMILIES = ("qwen2_vl", "qwen3_5", "glm4v", "ernie4_5_vl_moe")
NAMES = ("rotary_cos", "rotary_sin")
IDS = np.array([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
# A text, an image of two rows and two columns, and a text.
POSITIONS = np.array([[[0, 1, 1, 1, 1]] * 2, [[0, 1, 1, 2, 2]] * 2, [[0, 1, 2, 1, 2]] * 2])
POSITIONS[:, 1] += 3
ZEROS = [[0] * 5] * 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in FAMILIES:
        library_models.save(f"{name}/text", folder / name)
    return {name: library_models.TransformersModel.load(f"{name}/text", folder / name) for name in FAMILIES}


@pytest.fixture(scope="module")
def axes_repository(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name, model in models.items():
        exporter.export(model.whole.config._name_or_path, name, folder, side="text")
    exporter.export(models["qwen2_vl"].whole.config._name_or_path, "fused", folder, side="text", rotary_layout="fused")
    library_models.save("llama", folder / "checkpoint")
    exporter.export(str(folder / "checkpoint"), "llama", folder)
    return folder


@pytest.fixture(scope="module")
def axes_server(axes_repository: Path) -> Iterator[Server]:
    with serve(axes_repository) as running:
        yield running


def expected(model: Any, positions: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
    """Return the cosines and sines (B, L, R) of the library for positions (3, B, L)."""
    found = library_models.in_our_form(
        model.whole.language_model.rotary_emb(torch.zeros(1), torch.from_numpy(positions))
    )
    return dict(zip(NAMES, (part.numpy() for part in found), strict=True))


def post(server: Server, model: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.address}/models/{model}/embed", json=fields)


@pytest.mark.parametrize("name", FAMILIES)
def test_rotary_outputs_equal_transformers(name: str, axes_server: Server, models: dict[str, Any]) -> None:
    fields = {"position_ids": POSITIONS.tolist(), "output": [*NAMES, "embeddings"], "encoding": "float", "offset": 2}
    answer = post(axes_server, name, input_ids=IDS.tolist(), **fields).raise_for_status().json()
    for output, wanted in expected(models[name], POSITIONS).items():
        found = np.array(answer["outputs"][output]["data"], np.float32)
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2.0**-23)
    vectors = np.array(answer["outputs"]["embeddings"]["data"], np.float32)
    assert np.array_equal(vectors, models[name].first_block_input(IDS))
    assert answer["next_offset"] == [7, 7]
    assert answer["position_delta"] == [3 - 7, 6 - 7]


def test_equal_axes_give_the_bits_of_an_offset(axes_server: Server) -> None:
    same = np.tile(np.arange(5) + 4, (3, 2, 1))
    wanted = post(axes_server, "qwen2_vl", input_ids=IDS.tolist(), offset=4, output="rotary_cos").json()
    found = post(
        axes_server, "qwen2_vl", input_ids=IDS.tolist(), position_ids=same.tolist(), output="rotary_cos"
    ).json()
    assert found["rotary_cos"] == wanted["rotary_cos"]
    assert found["position_delta"] == [4, 4]
    assert "position_delta" not in wanted


def test_ragged_rows_and_other_forms(axes_server: Server, models: dict[str, Any]) -> None:
    wanted = expected(models["qwen2_vl"], POSITIONS)["rotary_cos"]
    rows = [[row[:size] for row, size in zip(axis, (5, 2), strict=True)] for axis in POSITIONS.tolist()]
    ids = [IDS[0].tolist(), IDS[1, :2].tolist()]
    fields = {"position_ids": rows, "encoding": "float"}
    answer = post(axes_server, "qwen2_vl", input_ids=ids, output="rotary_cos", **fields).json()
    flat = np.concatenate([wanted[0], wanted[1, :2]])
    np.testing.assert_allclose(np.array(answer["rotary_cos"], np.float32), flat, rtol=0, atol=2.0**-23)
    assert (answer["lengths"], answer["position_delta"]) == ([5, 2], [3 - 5, 5 - 2])
    fused = post(axes_server, "fused", input_ids=ids, output="rotary_cos_sin", **fields).json()
    assert np.array_equal(np.array(fused["rotary_cos_sin"])[:, :4], np.array(answer["rotary_cos"])[:, :4])


def test_mask_leaves_padding_out_of_the_delta(axes_server: Server) -> None:
    fields = {"attention_mask": [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], "position_ids": POSITIONS.tolist()}
    answer = post(axes_server, "qwen2_vl", input_ids=IDS.tolist(), output="rotary_cos", **fields).json()
    assert answer["next_offset"] == [3, 3]
    assert answer["position_delta"] == [3 - 3, 6 - 3]


def test_embeddings_alone_do_not_depend_on_the_axes(axes_server: Server) -> None:
    fields = {"input_ids": IDS.tolist(), "encoding": "float"}
    answer = post(axes_server, "qwen2_vl", position_ids=POSITIONS.tolist(), **fields).json()
    assert answer["embeddings"] == post(axes_server, "qwen2_vl", **fields).json()["embeddings"]
    assert answer["position_delta"] == [3 - 5, 6 - 5]


def test_python_client_sends_arrays(axes_server: Server, models: dict[str, Any]) -> None:
    with preblock.connect(axes_server.address) as client:
        answer = client.embed(IDS, model="qwen3_5", position_ids=POSITIONS, output="rotary_sin")
        lists = client.embed(IDS.tolist(), model="qwen3_5", position_ids=POSITIONS.tolist(), output="rotary_sin")
        wanted = expected(models["qwen3_5"], POSITIONS)["rotary_sin"]
        np.testing.assert_allclose(answer.vectors, wanted, rtol=0, atol=2.0**-23)
        assert np.array_equal(answer.vectors, lists.vectors)
        assert answer.position_delta is not None
        assert answer.position_delta.tolist() == [3 - 5, 6 - 5]
        assert client.embed(IDS, model="qwen3_5").position_delta is None


def test_binary_answer_states_the_delta_in_a_header(axes_server: Server) -> None:
    document = {"input_ids": IDS.tolist(), "position_ids": POSITIONS.tolist(), "output": "rotary_cos"}
    headers = {"Accept": "application/octet-stream", "Content-Type": "application/json"}
    address = f"{axes_server.address}/models/qwen2_vl/embed"
    answer = httpx.post(address, content=json.dumps(document), headers=headers).raise_for_status()
    assert answer.headers["Preblock-Position-Delta"] == "-2,1"
    assert answer.headers["Preblock-Next-Offset"] == "5"


def test_flat_arrays_have_axes_beside_lengths(axes_server: Server) -> None:
    body = write_safetensors(
        {"input_ids": IDS.reshape(-1), "position_ids": POSITIONS.reshape(3, -1), "lengths": np.array([5, 5])}
    )
    headers = {"Content-Type": "application/x-safetensors", "Accept": "application/x-safetensors"}
    answer = httpx.post(f"{axes_server.address}/models/qwen2_vl/embed?output=rotary_cos", content=body, headers=headers)
    assert read_safetensors(answer.raise_for_status().content)["position_delta"].tolist() == [-2, 1]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_open_inference_protocol_takes_axes(protocol: str, axes_server: Server, models: dict[str, Any]) -> None:
    library: Any = triton if protocol == "http" else triton_grpc
    address = axes_server.address.removeprefix("http://") if protocol == "http" else axes_server.grpc
    inputs = []
    for name, values in (("input_ids", IDS), ("position_ids", POSITIONS), ("offset", np.array([2]))):
        tensor = library.InferInput(name, list(values.shape), "INT64")
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    outputs = [library.InferRequestedOutput(name) for name in ("rotary_cos", "next_offset", "position_delta")]
    with library.InferenceServerClient(address) as client:
        answer = client.infer("qwen2_vl", inputs, outputs=outputs)
        wanted = expected(models["qwen2_vl"], POSITIONS)["rotary_cos"]
        np.testing.assert_allclose(answer.as_numpy("rotary_cos"), wanted, rtol=0, atol=2.0**-23)
        assert answer.as_numpy("next_offset").tolist() == [7, 7]
        assert answer.as_numpy("position_delta").tolist() == [3 - 7, 6 - 7]
        plain = client.infer("qwen2_vl", inputs[:1], outputs=outputs)
        assert plain.as_numpy("position_delta").tolist() == [0, 0]


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("llama", {}, "position_ids: got three axes, expected one position for each token: this model has one axis"),
        ("qwen2_vl", {"position_ids": [ZEROS] * 2}, "got 2 lists of rows, expected 3, for time, height and"),
        ("qwen2_vl", {"position_ids": [ZEROS, ZEROS, [0]]}, r"position_ids[2]: got 1 rows, expected 2 rows"),
        (
            "qwen2_vl",
            {"position_ids": [ZEROS, ZEROS, [[0], [0]]]},
            "position_ids[2][0]: got 1 values, expected 5",
        ),
        (
            "qwen2_vl",
            {"position_ids": [ZEROS, ZEROS, [[64] * 5] * 2]},
            "position_ids[2][0][0]: got 64, expected",
        ),
        ("qwen2_vl", {"position_ids": [[[-1] * 5] * 2] * 3}, "position_ids[0][0][0]: got -1, expected 0 to 63"),
        ("qwen2_vl", {"position_ids": [[["a"] * 5] * 2] * 3}, "position_ids[0][0][0]: got 'a', expected a 64-bit"),
        ("qwen2_vl", {"position_ids": [[[[0]]]] * 3}, "position_ids[0][0][0]: got "),
        ("qwen2_vl", {"offset": 62}, "offset[0] + tokens: got 62 + 5 = 67, expected at most 64"),
        ("qwen2_vl", {"truncate": "left"}, "truncate and position_ids exclude each other"),
    ],
)
def test_bad_value_is_named(axes_server: Server, model: str, fields: dict[str, Any], message: str) -> None:
    given = {"input_ids": IDS.tolist(), "position_ids": POSITIONS.tolist(), "output": "rotary_cos"} | fields
    answer = post(axes_server, model, **given)
    assert answer.status_code in (400, 422)
    assert message in answer.json()["detail"]


def test_open_inference_protocol_names_a_bad_shape(axes_server: Server) -> None:
    tensor = {"name": "position_ids", "datatype": "INT64", "shape": [2, 1, 2], "data": [0] * 4}
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
    answer = httpx.post(f"{axes_server.address}/v2/models/qwen2_vl/infer", json={"inputs": [ids, tensor]})
    assert answer.status_code == 400
    assert "position_ids.shape: got [2, 1, 2], expected [batch, length], or [3, batch, length]" in answer.text


def test_manifest_names_the_axes(axes_repository: Path) -> None:
    manifest = Manifest.model_validate_json((axes_repository / "qwen3_5/1/manifest.json").read_text())
    assert manifest.rotary[0].axes == (0, 1, 2, 0)
    llama = Manifest.model_validate_json((axes_repository / "llama/1/manifest.json").read_text())
    assert "axes" not in llama.rotary[0].model_dump()
