"""Positions of three axes in streams and sequences. Oracle: the rotary module of transformers on the same positions."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from numpy.typing import NDArray
from websockets.sync.client import connect

import preblock
from preblock.client.errors import RequestError, ServiceError
from tests.support.late import exporter, library_models, torch
from tests.support.servers import Server, serve

IDS = np.arange(3, 12)[None]
# A text, an image of two rows and two columns, and a text from the next position.
POSITIONS = np.array([[0, 1, 2, 3, 3, 3, 3, 5, 6], [0, 1, 2, 3, 3, 4, 4, 5, 6], [0, 1, 2, 3, 4, 3, 4, 5, 6]])[:, None]
TEXT, IMAGE, REST = slice(0, 3), slice(3, 7), slice(7, 9)
STEPS = ((TEXT, False), (IMAGE, True), (REST, False))
"""Tokens of each step, and whether the step states positions."""
OFFSETS = [[3], [5], [7]]
PATH = "/models/qwen2_vl/decode?output=rotary_cos&encoding=float"


@pytest.fixture(scope="module")
def axes_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    library_models.save("qwen2_vl/text", folder / "checkpoint")
    exporter.export(str(folder / "checkpoint"), "qwen2_vl", folder, side="text")
    library_models.save("llama", folder / "other")
    exporter.export(str(folder / "other"), "llama", folder)
    return folder


@pytest.fixture(scope="module")
def axes_server(axes_repository: Path) -> Iterator[Server]:
    with serve(axes_repository) as running:
        yield running


@pytest.fixture(scope="module")
def expected(axes_repository: Path) -> NDArray[np.float32]:
    """The cosines (L, R) of the library."""
    model = library_models.TransformersModel.load("qwen2_vl/text", axes_repository / "checkpoint")
    cos, _ = model.whole.language_model.rotary_emb(torch.zeros(1), torch.from_numpy(POSITIONS))
    found: NDArray[np.float32] = cos[0].numpy()
    return found


def messages() -> list[dict[str, Any]]:
    """Return the steps as JSON objects."""
    return [
        {"input_ids": IDS[:, part].tolist()} | ({"position_ids": POSITIONS[:, :, part].tolist()} if stated else {})
        for part, stated in STEPS
    ]


def client(server: Server) -> list[tuple[Any, list[int]]]:
    answers = []
    with preblock.connect(server.address) as service, service.decode("qwen2_vl", output="rotary_cos") as stream:
        for part, stated in STEPS:
            positions = POSITIONS[:, :, part] if stated else None
            answers.append((stream.step(IDS[:, part], position_ids=positions)[0], stream.offset))
    return answers


def websocket(server: Server) -> list[tuple[Any, list[int]]]:
    answers = []
    with connect(f"ws{server.address.removeprefix('http')}{PATH}") as stream:
        for message in messages():
            stream.send(json.dumps(message))
            answer = json.loads(stream.recv())
            assert "position_delta" not in answer
            answers.append((answer["rotary_cos"], answer["next_offset"]))
    return answers


def ndjson(server: Server) -> list[tuple[Any, list[int]]]:
    body = "".join(json.dumps(message) + "\n" for message in messages())
    answer = httpx.post(server.address + PATH, content=body, headers={"Content-Type": "application/x-ndjson"})
    documents = [json.loads(line) for line in answer.text.splitlines() if "rotary_cos" in line]
    return [(document["rotary_cos"], document["next_offset"]) for document in documents]


def triton_sequence(library: Any, address: str) -> list[tuple[Any, list[int]]]:
    answers = []
    with library.InferenceServerClient(address) as service:
        for part, stated in STEPS:
            given = {"input_ids": IDS[:, part]} | ({"position_ids": POSITIONS[:, :, part]} if stated else {})
            inputs = [
                library.InferInput(name, list(values.shape), "INT64").set_data_from_numpy(np.ascontiguousarray(values))
                for name, values in given.items()
            ]
            wanted = [library.InferRequestedOutput(name) for name in ("rotary_cos", "next_offset", "position_delta")]
            turn = {"sequence_id": 7, "sequence_start": part is TEXT, "sequence_end": part is REST}
            answer = service.infer("qwen2_vl", inputs, outputs=wanted, **turn)
            assert answer.as_numpy("position_delta").tolist() == [0]
            answers.append((answer.as_numpy("rotary_cos")[0], answer.as_numpy("next_offset").tolist()))
    return answers


def sequence_http(server: Server) -> list[tuple[Any, list[int]]]:
    return triton_sequence(triton, server.address.removeprefix("http://"))


def sequence_grpc(server: Server) -> list[tuple[Any, list[int]]]:
    return triton_sequence(triton_grpc, server.grpc)


@pytest.mark.parametrize("feed", [client, websocket, ndjson, sequence_http, sequence_grpc])
def test_text_after_an_image_follows_its_largest_position(
    axes_server: Server, expected: NDArray[np.float32], feed: Callable[[Server], list[tuple[Any, list[int]]]]
) -> None:
    answers = feed(axes_server)
    assert [list(offset) for _, offset in answers] == OFFSETS
    found = np.concatenate([np.reshape(np.array(values, np.float32), (-1, expected.shape[1])) for values, _ in answers])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-23)


@pytest.mark.parametrize("chunk", [1, 3, 9])
def test_known_positions_are_streamed_in_chunks(axes_server: Server, expected: NDArray[np.float32], chunk: int) -> None:
    body = {"input_ids": IDS.tolist(), "position_ids": POSITIONS.tolist(), "output": "rotary_cos", "chunk": chunk}
    address = f"{axes_server.address}/models/qwen2_vl/decode"
    answer = httpx.post(address, json=body | {"encoding": "float"}, headers={"Accept": "text/event-stream"})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if '"rotary_cos"' in line]
    found = np.concatenate([np.reshape(event["rotary_cos"], (-1, expected.shape[1])) for event in events])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-23)
    assert events[-1]["next_offset"] == [7]


def test_rows_of_other_lengths_keep_their_own_positions(axes_server: Server, expected: NDArray[np.float32]) -> None:
    with preblock.connect(axes_server.address) as service:
        with service.decode("qwen2_vl", rows=2, output="rotary_cos") as stream:
            stream.step([IDS[0, TEXT], IDS[0, :1]])
            lists = [[axis[0, IMAGE].tolist(), []] for axis in POSITIONS]
            ids = [IDS[0, IMAGE].tolist(), []]
            image = stream.step(ids, position_ids=lists)
            assert stream.offset == [5, 1]
            stream.rewind([3, 1])
            assert np.array_equal(stream.step(ids, position_ids=lists), image)
            rest = stream.step([IDS[0, REST], IDS[0, :2]])
        with service.decode("qwen2_vl", offset=5, output="rotary_cos") as resumed:
            assert np.array_equal(resumed.step(IDS[0, REST])[0], rest[0])
    np.testing.assert_allclose(image, expected[IMAGE], rtol=0, atol=2.0**-23)
    np.testing.assert_allclose(rest, [expected[REST], expected[1:3]], rtol=0, atol=2.0**-23)


def test_image_near_the_limit_is_judged_by_its_positions(axes_server: Server) -> None:
    """The running offset of 61 and the four tokens of the image exceed the limit of 64; its positions do not."""
    positions = POSITIONS[:, :, IMAGE] + 58
    with preblock.connect(axes_server.address) as service, service.decode("qwen2_vl", offset=61) as stream:
        stream.step(IDS[:, IMAGE], position_ids=positions)
        assert stream.offset == [63]
        with pytest.raises(ServiceError, match=r"position_ids\[1\]\[0\]\[2\]: got 64, expected 0 to 63"):
            stream.step(IDS[:, IMAGE], position_ids=positions + 2)
        assert stream.offset == [63]


@pytest.mark.parametrize(
    ("model", "positions", "message"),
    [
        ("llama", [[[0, 1]]] * 3, "position_ids: got three axes, expected one position for each token: this model"),
        ("qwen2_vl", [[[0, 1]]] * 2, "position_ids: got 2 lists of rows, expected 3, for time, height and width"),
        ("qwen2_vl", [[[0, 1]], [[0, 1]], [[0]]], "position_ids[2][0]: got 1 values, expected 2"),
        ("qwen2_vl", [[[0, 1]], [[0, "a"]], [[0, 1]]], "position_ids[1][0][1]: got 'a', expected a 64-bit"),
    ],
)
def test_bad_positions_of_a_step_are_named(axes_server: Server, model: str, positions: Any, message: str) -> None:
    with connect(f"ws{axes_server.address.removeprefix('http')}/models/{model}/decode?encoding=float") as stream:
        stream.send(json.dumps({"input_ids": [[3, 4]], "position_ids": positions}))
        assert message in json.loads(stream.recv())["error"]["detail"]
        stream.send(json.dumps({"input_ids": [[3, 4]]}))
        assert json.loads(stream.recv())["next_offset"] == [2]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.zeros((2, 1, 2), int), r"position_ids: got 2 axes, expected 3, for time, height and width"),
        ([[[0, 1]], [[0, 1]], [[0, 1, 2]]], r"position_ids\[2\]: got rows of \[3\], expected rows of \[2\]"),
        (np.zeros((3, 1, 3), int), r"position_ids: got rows of \[3\], expected rows of \[2\], like input_ids"),
    ],
)
def test_client_names_bad_axes(axes_server: Server, positions: Any, message: str) -> None:
    with preblock.connect(axes_server.address) as service, service.decode("qwen2_vl") as stream:
        with pytest.raises(RequestError, match=message):
            stream.step([[3, 4]], position_ids=positions)
        assert stream.step([[3, 4]]).shape[1] == 2
