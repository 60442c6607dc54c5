"""Row ids and stored rows of n-gram tables over every protocol. Oracle: transformers and its tables in bfloat16."""

import base64
from collections.abc import Iterator
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

import preblock
from preblock.client.sync_client import Client
from preblock.export.exporter import export
from tests.clients.test_tritonclient import client_of
from tests.export.qwen4 import (
    LAYERS,
    SHARDS,
    WIDTH,
    quantize_tables,
    random_ids,
    run_transformers,
    save_qwen4,
)
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
    with serve(root, "--table-memory-budget-bytes", str(2**27)) as server:
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
    rows = expected.of(expected.row_ids(ids))
    url = f"{rows_server.address}/models/m/embed?shape=1200,50&output={ROWS}"
    for options, accept in (("&dtype=stored", BYTES), ("&encoding=float", JSON)):
        headers = {"Content-Type": BYTES, "Accept": accept}
        answer = httpx.post(url + options, content=ids.tobytes(), headers=headers, timeout=60).raise_for_status()
        if accept == JSON:
            assert np.array_equal(np.array(answer.json()[ROWS], np.float32), rows.astype(np.float32))
        else:
            assert (answer.headers["Content-Length"], answer.content) == (str(rows.nbytes), rows.tobytes())


def test_binary_formats(rows_server: Server, expected: Expected) -> None:
    answer = ask(rows_server, BYTES, dtype="stored")
    assert answer.headers["Preblock-Dtype"] == "bfloat16"
    assert answer.headers["Preblock-Shape"] == f"2,9,{LAYERS},{WIDTH}"
    assert answer.content == expected.rows.tobytes()
    for dtype in ("stored", "float32", "float16"):
        assert ask(rows_server, BYTES, output=ROW_IDS, dtype=dtype).content == expected.ids.tobytes()
    assert ask(rows_server, NPY, output=ROW_IDS).content.endswith(expected.ids.tobytes())
    refused = ask(rows_server, NPY, dtype="stored")
    assert refused.status_code == 406
    assert refused.json()["detail"].endswith("application/x-safetensors for bfloat16")
    tensors = load(ask(rows_server, "application/x-safetensors", output=[ROWS, ROW_IDS], dtype="stored").content)
    assert np.array_equal(tensors[ROW_IDS].numpy(), expected.ids)
    assert tensors[ROWS].view(torch.int16).numpy().tobytes() == expected.rows.tobytes()


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_open_inference_protocol(module: Any, rows_server: Server, expected: Expected) -> None:
    client = client_of(module, rows_server)
    ids, plain = client.inputs(input_ids=IDS), [module.InferRequestedOutput(name) for name in (ROWS, ROW_IDS)]
    answer = client.infer("m", ids, outputs=plain, parameters={"dtype": "stored"})
    assert np.array_equal(answer.as_numpy(ROW_IDS), expected.ids)
    assert np.array_equal(answer.as_numpy(ROWS), expected.rows.astype(np.float32))  # the client widens BF16
    document = answer.get_response(**({} if client.http else {"as_json": True}))
    assert [output["datatype"] for output in document["outputs"]] == ["BF16", "INT64"]
    assert np.array_equal(client.infer("m", ids).as_numpy(ROW_IDS), expected.ids)  # all outputs
    outputs = client.document("get_model_metadata", "m")["outputs"]
    (described,) = (output for output in outputs if output["name"] == ROW_IDS)
    assert (described["datatype"], described["shape"]) == ("INT64", [-1, -1, LAYERS, HEADS])


def test_json_of_the_open_inference_protocol(rows_server: Server, expected: Expected) -> None:
    tensor = {"name": "input_ids", "shape": IDS.shape, "datatype": "INT64", "data": IDS.tolist()}

    def infer(*outputs: dict[str, Any], **parameters: str) -> Any:
        body = {"inputs": [tensor], "outputs": outputs, "parameters": parameters}
        return httpx.post(f"{rows_server.address}/v2/models/m/infer", json=body).json()

    (output,) = infer({"name": ROW_IDS})["outputs"]
    assert (output["datatype"], output["shape"]) == ("INT64", list(expected.ids.shape))
    assert output["data"] == expected.ids.ravel().tolist()
    half = {"name": ROWS, "parameters": {"dtype": "FP16"}}
    for outputs, message in (
        ([{"name": ROWS}], "BF16 has no form in JSON"),
        ([{"name": "embeddings"}], "embeddings has no stored"),
        ([half, {"name": "embeddings"}], "got stored, expected FP16, because all outputs have one type"),
    ):
        assert message in infer(*outputs, dtype="stored")["error"]


def test_stream_token_by_token(client: Client, expected: Expected) -> None:
    with client.decode("m", output=ROWS, companions=[ROW_IDS], rows=2, dtype="stored") as stream:
        for step in range(9):
            rows = stream.step(IDS[:, step : step + 1].tolist())
            ids = stream.companions[ROW_IDS]
            assert (rows.dtype, ids.dtype) == (BFLOAT16, np.dtype(np.int64))
            assert rows.tobytes() == expected.rows[:, step].tobytes()
            assert ids.tobytes() == expected.ids[:, step].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "stored"])
def test_stream_of_parts_returns_each_output_in_its_dtype(client: Client, expected: Expected, dtype: Any) -> None:
    with client.decode("m", output=ROWS, companions=[ROW_IDS], dtype=dtype) as stream:
        rows = stream.step(parts=[{"input_ids": IDS[0].tolist()}])
        assert rows.tobytes() == expected.rows[0].astype(rows.dtype).tobytes()
        assert rows.dtype == (BFLOAT16 if dtype == "stored" else np.float32)
        assert stream.companions[ROW_IDS].tobytes() == expected.ids[0].tobytes()


@pytest.mark.parametrize("unit", ["tensor", "row", "block"])
def test_referenced_float8_tables_are_scaled(unit: str, tmp_path: Path) -> None:
    """Oracle: torch, for float8 with scales."""
    folder = save_qwen4(tmp_path / "model", ple_embed_dim=1040, ngram_vocab_size_base=150)
    values = quantize_tables(folder, unit)
    export(str(folder), "m", tmp_path / "repository", reference=True)
    with (
        serve(tmp_path / "repository", "--reference-roots", str(folder)) as server,
        preblock.connect(server.address) as client,
    ):
        outputs = client.model("m").outputs
        assert outputs["ngram_scales"] == outputs[ROW_IDS] * (3 if unit == "block" else 1)
        ids, rows = (client.embed(IDS, model="m", output=output).vectors for output in (ROW_IDS, ROWS))
        stored = client.embed(IDS, model="m", output=ROWS, dtype="stored")
    assert stored.to_torch().dtype == torch.float8_e4m3fn
    assert np.array_equal(ids, run_transformers(folder, [IDS])[0])
    expected, parts = [], load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        names = [f"model.layers.{layer}.{SHARDS}{shard}.weight" for shard in range(4)]
        places = torch.from_numpy(ids[:, :, layer])
        expected.append(torch.cat([values[name] for name in names])[places].flatten(2))
        table = torch.cat([parts[name].view(torch.uint8) for name in names])
        assert stored.vectors[:, :, layer].tobytes() == table[places].numpy().tobytes()
    assert rows.tobytes() == torch.stack(expected, 2).numpy().tobytes()
