"""Row ids and stored rows of n-gram tables over every protocol. Oracle: transformers and its tables in bfloat16."""

import base64
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from safetensors.torch import load, load_file
from websockets.sync.client import connect

import preblock
from preblock.client import errors
from preblock.client.sync_client import Client
from preblock.export.exporter import export
from tests.clients.shared_memory.shared_client import Client as SharedClient
from tests.export.qwen4 import LAYERS, WIDTH, random_ids, run_transformers, save_qwen4
from tests.support.servers import Server, serve

ROWS, ROW_IDS = "ngram_embeddings", "ngram_row_ids"
HEADS = 4
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
IDS = random_ids(2, 9, seed=3)
JSON, BYTES, NPY = "application/json", "application/octet-stream", "application/x-npy"


class Expected:
    """Row ids (B, L, N, H) and stored rows (B, L, N, E) of `IDS`, as transformers computes and stores them."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        tensors = load_file(checkpoint / "model.safetensors")
        names = [f"model.layers.{layer}.ple.ple_embedding.ngram_embedding" for layer in range(LAYERS)]
        self._tables = [torch.cat([tensors[f"{name}.shard_{shard}.weight"] for shard in range(4)]) for name in names]
        self.ids = self.row_ids(IDS)
        self.rows = self.of(self.ids)

    def row_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return run_transformers(self.checkpoint, [ids])[0]

    def of(self, row_ids: NDArray[np.int64]) -> NDArray[Any]:
        found = [
            table.to(torch.bfloat16)[torch.from_numpy(row_ids[:, :, layer])].flatten(2)
            for layer, table in enumerate(self._tables)
        ]
        return torch.stack(found, 2).view(torch.int16).numpy().view(BFLOAT16)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(save_qwen4(tmp_path_factory.mktemp("qwen4")))


@pytest.fixture(scope="module")
def rows_server(expected: Expected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("repository")
    export(str(expected.checkpoint), "m", root, dtype="bfloat16")
    with serve(root, "--max-shared-memory-bytes", str(2**24), "--table-memory-budget-bytes", str(2**27)) as server:
        yield server


@pytest.fixture
def client(rows_server: Server) -> Iterator[Client]:
    with preblock.connect(rows_server.address) as client:
        yield client


def ask(server: Server, accept: str, **fields: Any) -> httpx.Response:
    body = {"input_ids": IDS.tolist(), "output": ROWS} | fields
    return httpx.post(f"{server.address}/models/m/embed", json=body, headers={"Accept": accept})


def test_python_client(client: Client, expected: Expected) -> None:
    answer = client.embed(IDS, model="m", output=ROWS, dtype="stored")
    assert answer.vectors.dtype == BFLOAT16
    assert answer.vectors.tobytes() == expected.rows.tobytes()
    assert answer.vectors.shape == (2, 9, LAYERS, WIDTH)
    assert client.embed(IDS, model="m", output=ROWS).vectors.tobytes() == expected.rows.astype(np.float32).tobytes()
    ids = client.embed(IDS.tolist(), model="m", output=ROW_IDS)
    assert ids.use_as == "rows of the n-gram tables of some layers"
    assert ids.vectors.dtype == np.int64
    assert np.array_equal(ids.vectors, expected.ids)
    assert client.model("m").outputs[ROW_IDS] == LAYERS * HEADS


def test_json(rows_server: Server, expected: Expected) -> None:
    answer = ask(rows_server, JSON, dtype="stored").json()
    assert (answer["dtype"], answer["shape"]) == ("bfloat16", [2, 9, LAYERS, WIDTH])
    assert base64.b64decode(answer[ROWS]) == expected.rows.tobytes()
    numbers = ask(rows_server, JSON, dtype="stored", encoding="float").json()
    assert np.array_equal(np.array(numbers[ROWS], np.float32), expected.rows.astype(np.float32))
    for encoding in ("base64", "float"):
        both = ask(rows_server, JSON, output=[ROW_IDS, ROWS], encoding=encoding).json()["outputs"]
        assert {name: output["dtype"] for name, output in both.items()} == {ROW_IDS: "int64", ROWS: "float32"}
        found = both[ROW_IDS]["data"]
        ids = np.frombuffer(base64.b64decode(found), np.int64) if encoding == "base64" else np.array(found)
        assert np.array_equal(ids.reshape(expected.ids.shape), expected.ids)


def test_large_answers_are_streamed(rows_server: Server, expected: Expected) -> None:
    ids = random_ids(1200, 50, seed=8)
    row_ids = expected.row_ids(ids)
    headers = {"Content-Type": BYTES, "Accept": BYTES}
    for output, dtype, right in ((ROWS, "stored", expected.of(row_ids)), (ROW_IDS, "float32", row_ids)):
        url = f"{rows_server.address}/models/m/embed?output={output}&dtype={dtype}&shape=1200,50"
        answer = httpx.post(url, content=ids.tobytes(), headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.headers["Preblock-Dtype"] == right.dtype.name
        assert answer.headers["Content-Length"] == str(right.nbytes)
        assert answer.content == right.tobytes()
    url = f"{rows_server.address}/models/m/embed?output={ROWS}&encoding=float&shape=1200,50"
    answer = httpx.post(url, content=ids.tobytes(), headers={"Content-Type": BYTES}, timeout=60)
    found = np.array(answer.json()[ROWS], np.float32)
    assert np.array_equal(found, expected.of(row_ids).astype(np.float32))


def test_binary_formats(rows_server: Server, expected: Expected) -> None:
    answer = ask(rows_server, BYTES, dtype="stored")
    assert answer.headers["Preblock-Dtype"] == "bfloat16"
    assert answer.headers["Preblock-Shape"] == f"2,9,{LAYERS},{WIDTH}"
    assert answer.content == expected.rows.tobytes()
    assert ask(rows_server, BYTES, output=ROW_IDS).content == expected.ids.tobytes()
    assert ask(rows_server, NPY, output=ROW_IDS).content.endswith(expected.ids.tobytes())
    refused = ask(rows_server, NPY, dtype="stored")
    assert refused.status_code == 406
    assert refused.json()["detail"].endswith("application/x-safetensors for bfloat16")
    tensors = load(ask(rows_server, "application/x-safetensors", output=[ROWS, ROW_IDS], dtype="stored").content)
    assert np.array_equal(tensors[ROW_IDS].numpy(), expected.ids)
    assert tensors[ROWS].view(torch.int16).numpy().tobytes() == expected.rows.tobytes()


@pytest.mark.parametrize("dtype", ["stored", "float32", "float16"])
def test_row_ids_have_one_type(dtype: str, rows_server: Server, expected: Expected) -> None:
    assert ask(rows_server, BYTES, output=ROW_IDS, dtype=dtype).content == expected.ids.tobytes()


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_open_inference_protocol(module: Any, rows_server: Server, expected: Expected) -> None:
    address = rows_server.grpc if module is tritonclient.grpc else rows_server.address.removeprefix("http://")
    with module.InferenceServerClient(address) as triton:
        ids = module.InferInput("input_ids", list(IDS.shape), "INT64").set_data_from_numpy(IDS)
        outputs = [module.InferRequestedOutput(name) for name in (ROWS, ROW_IDS)]
        answer = triton.infer("m", [ids], outputs=outputs, parameters={"dtype": "stored"})
        assert np.array_equal(answer.as_numpy(ROW_IDS), expected.ids)
        assert np.array_equal(answer.as_numpy(ROWS), expected.rows.astype(np.float32))  # the client widens BF16
        first = answer.get_response() if module is tritonclient.http else answer.get_response(as_json=True)
        assert [output["datatype"] for output in first["outputs"]] == ["BF16", "INT64"]
        answer = triton.infer("m", [ids])  # all outputs
        assert np.array_equal(answer.as_numpy(ROW_IDS), expected.ids)
        metadata: Any = triton.get_model_metadata("m", **({"as_json": True} if module is tritonclient.grpc else {}))
        (described,) = (output for output in metadata["outputs"] if output["name"] == ROW_IDS)
        assert described["datatype"] == "INT64"
        assert [int(size) for size in described["shape"]] == [-1, -1, LAYERS, HEADS]


def test_json_of_the_open_inference_protocol(rows_server: Server, expected: Expected) -> None:
    body: dict[str, Any] = {
        "inputs": [{"name": "input_ids", "shape": IDS.shape, "datatype": "INT64", "data": IDS.tolist()}],
        "outputs": [{"name": ROW_IDS}],
    }
    url = f"{rows_server.address}/v2/models/m/infer"
    (output,) = httpx.post(url, json=body).json()["outputs"]
    assert (output["datatype"], output["shape"]) == ("INT64", list(expected.ids.shape))
    assert output["data"] == expected.ids.ravel().tolist()
    body |= {"outputs": [{"name": ROWS}], "parameters": {"dtype": "stored"}}
    assert "BF16 has no form in JSON" in httpx.post(url, json=body).json()["error"]
    body |= {"outputs": [{"name": "embeddings"}]}
    assert "embeddings has no stored" in httpx.post(url, json=body).json()["error"]
    body |= {"outputs": [{"name": ROWS, "parameters": {"dtype": "FP16"}}, {"name": "embeddings"}]}
    assert "got stored, expected FP16, because all outputs have one type" in httpx.post(url, json=body).json()["error"]


def test_sequence_has_the_dimensions_of_the_metadata(rows_server: Server, expected: Expected) -> None:
    with tritonclient.http.InferenceServerClient(rows_server.address.removeprefix("http://")) as triton:
        found = []
        for begin in range(9):
            tensor = tritonclient.http.InferInput("input_ids", [2, 1], "INT64")
            tensor.set_data_from_numpy(np.ascontiguousarray(IDS[:, begin : begin + 1]))
            outputs = [tritonclient.http.InferRequestedOutput(ROW_IDS)]
            options: dict[str, Any] = {"sequence_id": 5, "sequence_start": begin == 0, "sequence_end": begin == 8}
            found.append(triton.infer("m", [tensor], outputs=outputs, **options).as_numpy(ROW_IDS))
    assert np.array_equal(np.concatenate(found, axis=1), expected.ids)


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_shared_memory(module: Any, rows_server: Server, expected: Expected) -> None:
    address = rows_server.grpc if module is tritonclient.grpc else rows_server.address.removeprefix("http://")
    with ExitStack() as stack:
        client = SharedClient(module, address, stack)
        regions = {ROWS: expected.rows.nbytes, ROW_IDS: expected.ids.nbytes}
        handles = {name: client.region(name, np.zeros(size, np.uint8)) for name, size in regions.items()}
        outputs = [client.output(name, size, name=name) for name, size in regions.items()]
        client.infer("m", [client.plain_input(IDS)], outputs=outputs, parameters={"dtype": "stored"})
        for name, right in ((ROWS, expected.rows), (ROW_IDS, expected.ids)):
            assert bytes(handles[name]._mpsm_handle.buf[: right.nbytes]) == right.tobytes()
            client.unregister_system_shared_memory(name)


def test_stream_token_by_token(client: Client, expected: Expected) -> None:
    with client.decode("m", output=ROWS, companions=[ROW_IDS], rows=2, dtype="stored") as stream:
        for step in range(9):
            rows = stream.step(IDS[:, step : step + 1].tolist())
            ids = stream.companions[ROW_IDS]
            assert rows.dtype == BFLOAT16
            assert ids.dtype == np.int64
            assert rows.tobytes() == expected.rows[:, step].tobytes()
            assert ids.tobytes() == expected.ids[:, step].tobytes()


def test_stream_through_rewind_and_reorder(client: Client, expected: Expected) -> None:
    first, second = IDS.tolist()
    with client.decode("m", output=ROW_IDS, rows=2) as stream:
        stream.step([first[:5], second[:5]])
        stream.rewind([2, 4])
        stream.reorder([1, 0, 1])
        found = stream.step([[50], [51], [52]])
        fed = [[*second[:4], 50], [*first[:2], 51], [*second[:4], 52]]
        for row, ids in enumerate(fed):
            assert np.array_equal(found[row].ravel(), expected.row_ids(np.array([ids]))[0, -1].ravel())
        uneven = stream.step([[], [60, 61], [62]])
        right = [
            expected.row_ids(np.array([fed[1] + [60, 61]]))[0, -2:],
            expected.row_ids(np.array([fed[2] + [62]]))[0, -1:],
        ]
        assert np.array_equal(uneven, np.concatenate([part.reshape(-1, LAYERS * HEADS) for part in right]))


@pytest.mark.parametrize("dtype", ["float32", "stored"])
def test_stream_of_parts_returns_each_output_in_its_dtype(client: Client, expected: Expected, dtype: Any) -> None:
    with client.decode("m", output=ROWS, companions=[ROW_IDS], dtype=dtype) as stream:
        rows = stream.step(parts=[{"input_ids": IDS[0].tolist()}])
        assert rows.tobytes() == expected.rows[0].astype(rows.dtype).tobytes()
        assert rows.dtype == (BFLOAT16 if dtype == "stored" else np.float32)
        assert stream.companions[ROW_IDS].tobytes() == expected.ids[0].tobytes()


def test_messages_of_a_stream(rows_server: Server, expected: Expected) -> None:
    with connect(f"{rows_server.socket}/models/m/decode?output={ROW_IDS}&encoding=float") as stream:
        stream.send(json.dumps({"input_ids": IDS[0].tolist()}))
        assert np.array_equal(np.array(json.loads(stream.recv())[ROW_IDS]).ravel(), expected.ids[0].ravel())
    with connect(f"{rows_server.socket}/models/m/decode?output={ROW_IDS},{ROWS}") as stream:
        head = struct.pack("<4sBBHIIIB3s", b"PRBK", 2, 1, 0, 1, 1, 9, 0, bytes(3))
        stream.send(head + IDS[0].tobytes() + (9).to_bytes(4, "little"))
        frame = stream.recv()
        assert isinstance(frame, bytes)
        assert frame[20:24] == bytes((255, 2, 2, 0))
        at = 24 + 8 + 16 + 4  # offset, context and length of the row
        assert struct.unpack_from("<II2B", frame, at) == (LAYERS * HEADS, LAYERS * WIDTH, 4, 1)
        right = expected.ids[0].tobytes() + expected.rows[0].astype(np.float32).tobytes()
        assert frame[at + 10 :] == right


def test_stream_without_stored_form_is_refused(client: Client) -> None:
    refused = pytest.raises(errors.RequestError, match=r"dtype: got stored, .*, since embeddings has no stored")
    with refused, client.decode("m", output=ROWS, companions=["embeddings"], dtype="stored"):
        pass


def test_metrics_count_rows(rows_server: Server) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{rows_server.address}/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line[0] != "#")}

    before = read()
    assert ask(rows_server, BYTES, dtype="stored").status_code == 200
    after = read()
    rows = IDS.size * LAYERS * HEADS
    assert after["preblock_table_rows_total"] - before["preblock_table_rows_total"] == rows
    gathered = after["preblock_table_row_bytes_total"] - before["preblock_table_row_bytes_total"]
    assert gathered == rows * 2 * WIDTH // HEADS
    assert 0 < after["preblock_table_resident_bytes"] < 2**27
    assert after["process_major_page_faults_total"] >= 0
