"""The four clients of tritonclient, unmodified, against one server. Oracles: the native API, and each other."""

import asyncio
import queue
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from tests.clients.triton_client import FIELDS, IDS, TritonClient
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import LOADING_HINT, Server, serve

EVERY_VERSION = [("bert", "1"), ("bert", "2"), ("gpt", "1")]


@pytest.fixture(
    params=[tritonclient.http, tritonclient.http.aio, tritonclient.grpc, tritonclient.grpc.aio],
    ids=lambda module: module.__name__,
)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def client(module: ModuleType, tiny_server: Server, tiny_clients: Clients) -> TritonClient:  # noqa: ARG001 - ready
    return client_of(module, tiny_server)


def client_of(module: ModuleType, server: Server) -> TritonClient:
    """Return a client of the protocol that `module` speaks."""
    return TritonClient(module, server.address.removeprefix("http://") if "http" in module.__name__ else server.grpc)


def test_infer_matches_native_api_bit_for_bit(client: TritonClient, tiny_clients: Clients) -> None:
    expected = native_bytes(tiny_clients, "bert", FIELDS).tobytes()
    for compression in (None, "gzip", "deflate"):
        names = ("request_", "response_") if client.http else ("",)
        options: dict[str, Any] = {f"{name}compression_algorithm": compression for name in names}
        result = client.infer("bert", client.inputs(**FIELDS), request_id="7", priority=1, timeout=10**6, **options)
        assert result.as_numpy("embeddings").tobytes() == expected
        answer = result.get_response() if client.http else result.get_response(as_json=True)
        assert (answer["id"], answer["model_version"]) == ("7", "2")


@pytest.mark.parametrize(("datatype", "dtype"), [("FP16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_infer_in_16_bit_types_matches_native_api(
    client: TritonClient, tiny_clients: Clients, datatype: str, dtype: Any
) -> None:
    result = client.infer("gpt", client.inputs(input_ids=IDS), parameters={"dtype": datatype})
    answer = tiny_clients.http.post(
        "/models/gpt/embed",
        json={"input_ids": IDS, "dtype": np.dtype(dtype).name},
        headers={"Accept": "application/octet-stream"},
    )
    output = result.get_output("embeddings")
    assert (output["datatype"] if client.http else output.datatype) == datatype
    assert result.as_numpy("embeddings").dtype == dtype
    assert result.as_numpy("embeddings").tobytes() == answer.content


def test_parameters_are_read_or_ignored_and_reported(client: TritonClient, tiny_clients: Clients) -> None:
    given = {"offset": 2, "max_tokens": 5, "top_p": 0.5, "stream": False}
    result = client.infer("gpt", client.inputs(input_ids=IDS), parameters=given, priority=1)
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS, "offset": 2})
    assert result.as_numpy("embeddings").tobytes() == expected.tobytes()
    answer = result.get_response()
    told = answer["parameters"] if client.http else answer.parameters
    named = told["ignored_parameters"] if client.http else told["ignored_parameters"].string_param
    assert sorted(named.split(", ")) == ["max_tokens", "priority", "stream", "top_p"]


def test_refusals_raise_exceptions_with_message_and_status(client: TritonClient) -> None:
    off = "models are not loaded or unloaded by request: model_control is none, not explicit"
    for method, arguments, http, grpc, message in (
        ("infer", ("gpt", client.inputs(input_ids=[[7]])), 400, "INVALID_ARGUMENT", "input_ids[0][0]: got 7, expected"),
        ("load_model", ("bert",), 403, "PERMISSION_DENIED", off),
        ("unload_model", ("bert",), 403, "PERMISSION_DENIED", off),
    ):
        with pytest.raises(InferenceServerException) as raised:
            getattr(client, method)(*arguments)
        assert str(raised.value.message()).startswith(message)
        assert raised.value.status() == (str(http) if client.http else f"StatusCode.{grpc}")


def test_metadata_and_health_report_models(client: TritonClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("bert", "1")
    assert not client.is_model_ready("nope")
    assert not client.is_model_ready("bert", "3")
    assert client.document("get_server_metadata")["extensions"][0] == "binary_tensor_data"
    metadata = client.document("get_model_metadata", "bert")
    assert metadata["versions"] == ["1", "2"]
    assert metadata["inputs"][0] == {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}
    index = client.document("get_model_repository_index")
    found = [(model["name"], model["version"], model["state"]) for model in (index if client.http else index["models"])]
    assert found == [(*version, "READY") for version in EVERY_VERSION]
    models = client.document("get_inference_statistics")["model_stats"]
    assert [(model["name"], model["version"]) for model in models] == EVERY_VERSION


def test_model_config_marks_optional_inputs(client: TritonClient) -> None:
    config = client.document("get_model_config", "gpt", "1")
    config = config if client.http else config["config"]
    assert (config["name"], config["backend"], config.get("max_batch_size", 0)) == ("gpt", "onnxruntime", 0)
    first, *others = config["input"]
    assert (first["name"], first["data_type"], first["dims"]) == ("input_ids", "TYPE_INT64", [-1, -1])
    assert not first.get("optional")
    assert all(tensor["optional"] for tensor in others)
    assert config["output"][0] == {"name": "embeddings", "data_type": "TYPE_FP32", "dims": [-1, -1, 4]}
    assert config["instance_group"][0]["kind"] == "KIND_CPU"


def test_models_are_unloaded_and_loaded_with_explicit_control(tiny_repository: Path) -> None:
    with serve(tiny_repository, "--model-control", "explicit", "--load-model", "*") as server:
        for module in (tritonclient.http, tritonclient.grpc):
            client = client_of(module, server)
            client.unload_model("gpt")
            assert not client.is_model_ready("gpt")
            with pytest.raises(InferenceServerException, match="model: got gpt, expected bert"):
                client.infer("gpt", client.inputs(input_ids=IDS))
            index = client.document("get_model_repository_index")
            states = [(model["name"], model["state"]) for model in (index if client.http else index["models"])]
            assert states == [("bert", "READY"), ("bert", "READY"), ("gpt", "UNAVAILABLE")]
            ready = httpx.post(f"{server.address}/v2/repository/index", json={"ready": True}, timeout=60).json()
            assert [model["name"] for model in ready] == ["bert", "bert"]
            client.load_model("gpt")
            assert client.is_model_ready("gpt")
            assert client.infer("gpt", client.inputs(input_ids=IDS)).as_numpy("embeddings").shape == (2, 3, 4)
            with pytest.raises(InferenceServerException, match="parameters: got config, expected none"):
                client.load_model("gpt", config="{}")


def test_statistics_count_requests_batches_and_failures(module: ModuleType, counted_server: Server) -> None:
    client = client_of(module, counted_server)

    def read() -> dict[str, Any]:
        (model,) = client.document("get_inference_statistics", "gpt", "1")["model_stats"]
        batches = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in model.get("batch_stats", ())}
        return model | {"batches of 3": batches.get(3, 0)}  # type: ignore[no-any-return]

    def infer_and_fail(times: int) -> dict[str, Any]:
        for _ in range(times):
            client.infer("gpt", client.inputs(input_ids=[[1], [2], [3]]))
        with pytest.raises(InferenceServerException):
            client.infer("gpt", client.inputs(input_ids=[[7]]))
        return read()

    before, after = infer_and_fail(1), infer_and_fail(3)

    def grew(*path: str) -> int:
        old: Any = before
        new: Any = after
        for key in path:
            old, new = old[key], new[key]
        return int(new) - int(old)

    assert (grew("inference_count"), grew("execution_count"), grew("batches of 3")) == (9, 3, 3)
    assert (grew("inference_stats", "success", "count"), grew("inference_stats", "fail", "count")) == (3, 1)
    phases = ("queue", "compute_input", "compute_infer", "compute_output")
    assert all(grew("inference_stats", phase, "count") == 3 for phase in phases)
    assert all(grew("inference_stats", phase, "ns") > 0 for phase in phases)
    assert sum(grew("inference_stats", phase, "ns") for phase in phases) <= grew("inference_stats", "success", "ns")
    assert after["last_inference"] > before["last_inference"] > 1.7e12


def test_async_infer_matches_native_api(tiny_server: Server, tiny_clients: Clients) -> None:
    expected = native_bytes(tiny_clients, "bert", FIELDS).tobytes()
    client = TritonClient(tritonclient.http, "")
    with tritonclient.http.InferenceServerClient(tiny_server.address.removeprefix("http://"), concurrency=4) as http:
        asked = [http.async_infer("bert", client.inputs(**FIELDS)) for _ in range(8)]
        assert {request.get_result().as_numpy("embeddings").tobytes() for request in asked} == {expected}
    found: queue.Queue[Any] = queue.Queue()
    client = TritonClient(tritonclient.grpc, "")
    for _ in range(8):
        tiny_clients.grpc.async_infer("bert", client.inputs(**FIELDS), lambda result, error: found.put((result, error)))
    answers = [found.get(timeout=30) for _ in range(8)]
    assert [error for _, error in answers] == [None] * 8
    assert {result.as_numpy("embeddings").tobytes() for result, _ in answers} == {expected}


STEPS: list[tuple[list[list[int]], int, str | None]] = [
    ([[1, 2]], 0, None),
    ([[7]], 2, "input_ids[0][0]: got 7, expected 0 to 6"),
    ([[3]], 2, None),
    ([[4]], 6, "offset[0] + tokens: got 6 + 1 = 7, expected at most 6, the max_len of this model"),
    ([[4], [5]], 3, None),
]


def test_grpc_streams_respond_in_order_and_survive_errors(tiny_server: Server, tiny_clients: Clients) -> None:
    found: queue.Queue[Any] = queue.Queue()
    client = TritonClient(tritonclient.grpc, "")
    asked = [
        {"model_name": "gpt", "inputs": client.inputs(input_ids=ids, offset=[offset]), "request_id": str(number)}
        for number, (ids, offset, _) in enumerate(STEPS)
    ]
    with tritonclient.grpc.InferenceServerClient(tiny_server.grpc) as streaming:
        streaming.start_stream(lambda result, error: found.put((result, error)), compression_algorithm="gzip")
        for request in asked:
            streaming.async_stream_infer(**request, enable_empty_final_response=True)
        streaming.async_stream_infer("nope", client.inputs(input_ids=IDS))
        answers = [found.get(timeout=30) for _ in range(len(STEPS) + 1)]
        streaming.stop_stream()
    assert answers[-1][1].message() == f"model: got nope, expected bert, gpt; {LOADING_HINT}"
    final = [result.get_response().parameters["triton_final_response"].bool_param for result, _ in answers if result]
    assert final == [True] * 3

    async def requests() -> Any:
        for request in asked:
            yield request

    async def run() -> list[Any]:
        async with tritonclient.grpc.aio.InferenceServerClient(tiny_server.grpc) as streaming:
            return [answer async for answer in streaming.stream_infer(requests())]

    for told in (answers[:-1], asyncio.run(run())):
        for number, ((ids, offset, refusal), (result, error)) in enumerate(zip(STEPS, told, strict=True)):
            if refusal is not None:
                assert (result, error.message()) == (None, refusal)
                continue
            assert error is None
            assert result.get_response().id == str(number)
            expected = native_bytes(tiny_clients, "gpt", {"input_ids": ids, "offset": offset})
            assert result.as_numpy("embeddings").tobytes() == expected.tobytes()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_large_compressed_infer_matches_native_bytes(model_server: Server, model_clients: Clients, coding: str) -> None:
    ids = np.random.default_rng(1).integers(0, 30000, (8, 256))  # with vectors of some megabytes
    client = client_of(tritonclient.http, model_server)
    options = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    result = client.infer("minilm", client.inputs(input_ids=ids), **options)
    expected = native_bytes(model_clients, "minilm", {"input_ids": ids.tolist()})
    assert result.as_numpy("embeddings").tobytes() == expected.tobytes()
