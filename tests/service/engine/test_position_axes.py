"""Positions of three axes (m-RoPE) on every API. Oracle: the rotary module of transformers on the same positions."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from safetensors.numpy import load as read_safetensors
from safetensors.numpy import save as write_safetensors
from websockets.sync.client import connect

import preblock
from preblock.client.errors import RequestError, ServiceError
from preblock.client.sync_client import Client
from tests.clients.test_tritonclient import client_of
from tests.support.artifacts import copy_artifact
from tests.support.late import exporter, library_models, torch, transformers
from tests.support.servers import Server
from tests.support.shared import Shared

MODEL, INTERLEAVED = "qwen2_vl", "qwen3_5"
NAMES = ("rotary_cos", "rotary_sin")
IDS = np.array([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
# A text, an image of two rows and two columns, and a text.
POSITIONS = np.array([[[0, 1, 1, 1, 1]] * 2, [[0, 1, 1, 2, 2]] * 2, [[0, 1, 2, 1, 2]] * 2])
POSITIONS[:, 1] += 3
ZEROS = [[0] * 5] * 2
# The same in one row, with a text from the next position.
STREAM_IDS = np.arange(3, 12)[None]
STREAM_POSITIONS = np.array(
    [[0, 1, 2, 3, 3, 3, 3, 5, 6], [0, 1, 2, 3, 3, 4, 4, 5, 6], [0, 1, 2, 3, 4, 3, 4, 5, 6]],
)[:, None]
TEXT, IMAGE, REST = slice(0, 3), slice(3, 7), slice(7, 9)
STEPS = ((TEXT, [3]), (IMAGE, [5]), (REST, [7]))
"""Tokens of each step, and the next offsets; only the step with the image states positions."""
Expected = dict[str, NDArray[np.float32]]


def checkpoint(repository: Path, name: str) -> Path:
    return repository / "checkpoints" / name


@pytest.fixture(scope="module")
def axes_repository(shared: Shared) -> Path:
    """Return `qwen2_vl` in two layouts, `qwen3_5` with interleaved axes, checkpoints, and `llama` with one axis."""

    def fill(folder: Path) -> None:
        text = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        text |= {"vocab_size": 99, "num_hidden_layers": 1, "max_position_embeddings": 64}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
        config = transformers.Qwen2VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision)
        transformers.Qwen2VLModel(config).save_pretrained(checkpoint(folder, MODEL))
        library_models.save(f"{INTERLEAVED}/text", checkpoint(folder, INTERLEAVED))
        for name in (MODEL, INTERLEAVED):
            exporter.export(str(checkpoint(folder, name)), name, folder, side="text")
        exporter.export(str(checkpoint(folder, MODEL)), "fused", folder, side="text", rotary_layout="fused")
        copy_artifact("llama", folder)

    return shared.make("axes", fill)


@pytest.fixture(scope="module")
def axes_server(axes_repository: Path, shared: Shared) -> Server:
    return shared.server("axes", axes_repository)


@pytest.fixture(scope="module")
def axes_client(axes_server: Server) -> Iterator[Client]:
    with preblock.connect(axes_server.address) as client:
        yield client


@pytest.fixture(scope="module")
def library(axes_repository: Path) -> Any:
    return transformers.AutoModel.from_pretrained(checkpoint(axes_repository, MODEL))


def expected_of(library: Any, positions: NDArray[np.int64]) -> Expected:
    """Return the cosines and sines (B, L, R) of the library for positions (3, B, L)."""
    found = library.language_model.rotary_emb(torch.zeros(1), torch.from_numpy(positions))
    return dict(zip(NAMES, (part.numpy() for part in found), strict=True))


@pytest.fixture(scope="module")
def expected(library: Any) -> Expected:
    return expected_of(library, POSITIONS)


@pytest.fixture(scope="module")
def stream_cos(library: Any) -> NDArray[np.float32]:
    """The cosines (L, R) of the stream."""
    found: NDArray[np.float32] = expected_of(library, STREAM_POSITIONS)["rotary_cos"][0]
    return found


def assert_close(found: Any, wanted: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(np.array(found, np.float32), wanted, rtol=0, atol=2.0**-23)


def post(server: Server, model: str = MODEL, **fields: Any) -> httpx.Response:
    fields = {"input_ids": IDS.tolist(), "encoding": "float"} | fields
    return httpx.post(f"{server.address}/models/{model}/embed", json=fields)


@pytest.mark.parametrize("model", [MODEL, INTERLEAVED])
def test_rotary_outputs_equal_transformers(axes_server: Server, axes_repository: Path, model: str) -> None:
    library = transformers.AutoModel.from_pretrained(checkpoint(axes_repository, model))
    fields = {"position_ids": POSITIONS.tolist(), "output": [*NAMES, "embeddings"], "offset": 2}
    answer = post(axes_server, model, **fields).raise_for_status().json()
    for output, wanted in expected_of(library, POSITIONS).items():
        assert_close(answer["outputs"][output]["data"], wanted)
    vectors = np.array(answer["outputs"]["embeddings"]["data"], np.float32)
    assert np.array_equal(vectors, library.get_input_embeddings()(torch.from_numpy(IDS)).detach().numpy())
    assert answer["next_offset"] == [7, 7]
    assert answer["position_delta"] == [3 - 7, 6 - 7]


def test_equal_axes_give_the_bits_of_an_offset(axes_server: Server) -> None:
    same = np.tile(np.arange(5) + 4, (3, 2, 1))
    wanted = post(axes_server, offset=4, output="rotary_cos").json()
    found = post(axes_server, position_ids=same.tolist(), output="rotary_cos").json()
    assert found["rotary_cos"] == wanted["rotary_cos"]
    assert found["position_delta"] == [4, 4]
    assert "position_delta" not in wanted


def test_ragged_rows_have_their_own_axes(axes_server: Server, expected: Expected) -> None:
    rows = [[row[:size] for row, size in zip(axis, (5, 2), strict=True)] for axis in POSITIONS.tolist()]
    ids = [IDS[0].tolist(), IDS[1, :2].tolist()]
    answer = post(axes_server, input_ids=ids, position_ids=rows, output="rotary_cos").json()
    wanted = expected["rotary_cos"]
    assert_close(answer["rotary_cos"], np.concatenate([wanted[0], wanted[1, :2]]))
    assert (answer["lengths"], answer["position_delta"]) == ([5, 2], [3 - 5, 5 - 2])
    fused = post(axes_server, "fused", input_ids=ids, position_ids=rows, output="rotary_cos_sin").json()
    assert np.array_equal(np.array(fused["rotary_cos_sin"])[:, :4], np.array(answer["rotary_cos"])[:, :4])


def test_mask_leaves_padding_out_of_the_delta(axes_server: Server) -> None:
    fields = {"attention_mask": [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], "position_ids": POSITIONS.tolist()}
    answer = post(axes_server, output="rotary_cos", **fields).json()
    assert (answer["next_offset"], answer["position_delta"]) == ([3, 3], [3 - 3, 6 - 3])


def test_python_client_sends_arrays(axes_client: Client, expected: Expected) -> None:
    answer = axes_client.embed(IDS, model=MODEL, position_ids=POSITIONS, output="rotary_sin")
    lists = axes_client.embed(IDS.tolist(), model=MODEL, position_ids=POSITIONS.tolist(), output="rotary_sin")
    assert_close(answer.vectors, expected["rotary_sin"])
    assert np.array_equal(answer.vectors, lists.vectors)
    assert answer.position_delta is not None
    assert answer.position_delta.tolist() == [3 - 5, 6 - 5]
    assert axes_client.embed(IDS, model=MODEL).position_delta is None


def test_binary_answers_state_the_delta(axes_server: Server) -> None:
    address = f"{axes_server.address}/models/{MODEL}/embed"
    document = {"input_ids": IDS.tolist(), "position_ids": POSITIONS.tolist(), "output": "rotary_cos"}
    answer = httpx.post(address, json=document, headers={"Accept": "application/octet-stream"}).raise_for_status()
    assert answer.headers["Preblock-Position-Delta"] == "-2,1"
    assert answer.headers["Preblock-Next-Offset"] == "5"
    flat = {"input_ids": IDS.reshape(-1), "position_ids": POSITIONS.reshape(3, -1), "lengths": np.array([5, 5])}
    headers = {"Content-Type": "application/x-safetensors", "Accept": "application/x-safetensors"}
    answer = httpx.post(f"{address}?output=rotary_cos", content=write_safetensors(flat), headers=headers)
    assert read_safetensors(answer.raise_for_status().content)["position_delta"].tolist() == [-2, 1]


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_open_inference_protocol_takes_axes(module: Any, axes_server: Server, expected: Expected) -> None:
    client = client_of(module, axes_server)
    outputs = [module.InferRequestedOutput(name) for name in ("rotary_cos", "next_offset", "position_delta")]
    inputs = client.inputs(input_ids=IDS, position_ids=POSITIONS, offset=[2])
    answer = client.infer(MODEL, inputs, outputs=outputs)
    assert_close(answer.as_numpy("rotary_cos"), expected["rotary_cos"])
    assert answer.as_numpy("next_offset").tolist() == [7, 7]
    assert answer.as_numpy("position_delta").tolist() == [3 - 7, 6 - 7]
    plain = client.infer(MODEL, client.inputs(input_ids=IDS), outputs=outputs)
    assert plain.as_numpy("position_delta").tolist() == [0, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_ids": [ZEROS] * 2}, "got 2 lists of rows, expected 3, for time, height and"),
        ({"position_ids": [ZEROS, ZEROS, [0]]}, "position_ids[2]: got 1 rows, expected 2 rows"),
        ({"position_ids": [ZEROS, ZEROS, [[0], [0]]]}, "position_ids[2][0]: got 1 values, expected 5"),
        ({"position_ids": [ZEROS, ZEROS, [[64] * 5] * 2]}, "position_ids[2][0][0]: got 64, expected"),
        ({"position_ids": [[[-1] * 5] * 2] * 3}, "position_ids[0][0][0]: got -1, expected 0 to 63"),
        ({"position_ids": [[["a"] * 5] * 2] * 3}, "position_ids[0][0][0]: got 'a', expected a 64-bit"),
        ({"position_ids": [[[[0]]]] * 3}, "position_ids[0][0][0]: got "),
        ({"offset": 62}, "offset[0] + tokens: got 62 + 5 = 67, expected at most 64"),
        ({"truncate": "left"}, "truncate and position_ids exclude each other"),
    ],
)
def test_bad_value_is_named(axes_server: Server, fields: dict[str, Any], message: str) -> None:
    answer = post(axes_server, **{"position_ids": POSITIONS.tolist(), "output": "rotary_cos"} | fields)
    assert answer.status_code in (400, 422)
    assert message in answer.json()["detail"]


def test_open_inference_protocol_names_a_bad_shape(axes_server: Server) -> None:
    tensor = {"name": "position_ids", "datatype": "INT64", "shape": [2, 1, 2], "data": [0] * 4}
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
    answer = httpx.post(f"{axes_server.address}/v2/models/{MODEL}/infer", json={"inputs": [ids, tensor]})
    assert answer.status_code == 400
    assert "position_ids.shape: got [2, 1, 2], expected [batch, length], or [3, batch, length]" in answer.text


def stream_lines(server: Server, content: str, **headers: str) -> list[dict[str, Any]]:
    """Return the documents with cosines of a stream over HTTP."""
    address = f"{server.address}/models/{MODEL}/decode?output=rotary_cos&encoding=float"
    answer = httpx.post(
        address, content=content, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "rotary_cos" in line]
    return [json.loads(line) for line in lines]


def test_lines_continue_after_the_largest_position(axes_server: Server, stream_cos: NDArray[np.float32]) -> None:
    steps: list[dict[str, Any]] = [{"input_ids": STREAM_IDS[:, part].tolist()} for part, _ in STEPS]
    steps[1]["position_ids"] = STREAM_POSITIONS[:, :, IMAGE].tolist()
    body = "".join(json.dumps(step) + "\n" for step in steps)
    answers = stream_lines(axes_server, body, Content_Type="application/x-ndjson")
    for (part, offset), answer in zip(STEPS, answers, strict=True):
        assert_close(answer["rotary_cos"][0], stream_cos[part])
        assert answer["next_offset"] == offset
        assert "position_delta" not in answer


def test_known_positions_are_streamed_in_chunks(axes_server: Server, stream_cos: NDArray[np.float32]) -> None:
    for chunk in (1, 3, 9):
        body = {"input_ids": STREAM_IDS.tolist(), "position_ids": STREAM_POSITIONS.tolist(), "chunk": chunk}
        headers = {"Accept": "text/event-stream", "Content_Type": "application/json"}
        events = stream_lines(axes_server, json.dumps(body), **headers)
        found = [np.reshape(event["rotary_cos"], (-1, stream_cos.shape[1])) for event in events]
        assert_close(np.concatenate(found), stream_cos)
        assert events[-1]["next_offset"] == [7], chunk


def test_rows_of_other_lengths_keep_their_own_positions(axes_client: Client, stream_cos: NDArray[np.float32]) -> None:
    with axes_client.decode(MODEL, rows=2, output="rotary_cos") as stream:
        stream.step([STREAM_IDS[0, TEXT], STREAM_IDS[0, :1]])
        lists = [[axis[0, IMAGE].tolist(), []] for axis in STREAM_POSITIONS]
        ids = [STREAM_IDS[0, IMAGE].tolist(), []]
        image = stream.step(ids, position_ids=lists)
        assert stream.offset == [5, 1]
        stream.rewind([3, 1])
        assert np.array_equal(stream.step(ids, position_ids=lists), image)
        rest = stream.step([STREAM_IDS[0, REST], STREAM_IDS[0, :2]])
    with axes_client.decode(MODEL, offset=5, output="rotary_cos") as resumed:
        assert np.array_equal(resumed.step(STREAM_IDS[0, REST])[0], rest[0])
    assert_close(image, stream_cos[IMAGE])
    assert_close(rest, np.stack([stream_cos[REST], stream_cos[1:3]]))


def test_image_near_the_limit_is_judged_by_its_positions(axes_client: Client) -> None:
    """The running offset of 61 and the four tokens of the image exceed the limit of 64; its positions do not."""
    positions = STREAM_POSITIONS[:, :, IMAGE] + 58
    with axes_client.decode(MODEL, offset=61) as stream:
        stream.step(STREAM_IDS[:, IMAGE], position_ids=positions)
        assert stream.offset == [63]
        with pytest.raises(ServiceError, match=r"position_ids\[1\]\[0\]\[2\]: got 64, expected 0 to 63"):
            stream.step(STREAM_IDS[:, IMAGE], position_ids=positions + 2)
        assert stream.offset == [63]


def test_bad_positions_leave_the_stream_open(axes_server: Server) -> None:
    for model, positions, message in (
        ("llama", [[[0, 1]]] * 3, "position_ids: got three axes"),
        (MODEL, [[[0, 1]], [[0, "a"]], [[0, 1]]], "position_ids[1][0][1]: got 'a'"),
    ):
        with connect(f"{axes_server.socket}/models/{model}/decode?encoding=float") as stream:
            stream.send(json.dumps({"input_ids": [[3, 4]], "position_ids": positions}))
            assert json.loads(stream.recv())["error"]["detail"].startswith(message)
            stream.send(json.dumps({"input_ids": [[3, 4]]}))
            assert json.loads(stream.recv())["next_offset"] == [2]


def test_client_names_bad_axes(axes_client: Client) -> None:
    with axes_client.decode(MODEL) as stream:
        for positions, message in (
            (np.zeros((2, 1, 2), int), "position_ids: got 2 axes, expected 3, for time, height and width"),
            ([[[0, 1]], [[0, 1]], [[0, 1, 2]]], "position_ids[2]: got rows of [3], expected rows of [2]"),
            (np.zeros((3, 1, 3), int), "position_ids: got rows of [3], expected rows of [2], like input_ids"),
        ):
            with pytest.raises(RequestError, match=re.escape(message)):
                stream.step([[3, 4]], position_ids=positions)
        assert stream.step([[3, 4]]).shape[1] == 2
