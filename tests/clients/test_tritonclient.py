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
from tests.support.protocols import Clients, connect, native_bytes
from tests.support.servers import LOADING_HINT, Server, serve


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
        options: dict[str, Any] = {"request_compression_algorithm": compression} if client.http else {}
        if client.http:
            options["response_compression_algorithm"] = compression
        else:
            options["compression_algorithm"] = compression
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
        json={"input_ids": IDS, "dtype": "float16" if datatype == "FP16" else "bfloat16"},
        headers={"Accept": "application/octet-stream"},
    )
    output = result.get_output("embeddings")
    assert (output["datatype"] if client.http else output.datatype) == datatype
    assert result.as_numpy("embeddings").dtype == dtype
    assert result.as_numpy("embeddings").tobytes() == answer.content


def test_infer_accepts_offset_as_parameter(client: TritonClient, tiny_clients: Clients) -> None:
    result = client.infer("gpt", client.inputs(input_ids=IDS), parameters={"offset": 2})
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS, "offset": 2})
    assert result.as_numpy("embeddings").tobytes() == expected.tobytes()


def test_invalid_ids_raise_exception_with_message_and_status(client: TritonClient) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.infer("gpt", client.inputs(input_ids=[[7]]))
    assert raised.value.message() == "input_ids[0][0]: got 7, expected 0 to 6"
    assert raised.value.status() == ("400" if client.http else "StatusCode.INVALID_ARGUMENT")


def test_unknown_parameters_are_ignored_and_reported(client: TritonClient, tiny_clients: Clients) -> None:
    given = {"max_tokens": 5, "top_p": 0.5, "stream": False}
    result = client.infer("gpt", client.inputs(input_ids=IDS), parameters=given, priority=1)
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS})
    assert result.as_numpy("embeddings").tobytes() == expected.tobytes()
    answer = result.get_response()
    told = answer["parameters"] if client.http else answer.parameters
    named = told["ignored_parameters"] if client.http else told["ignored_parameters"].string_param
    assert sorted(named.split(", ")) == ["max_tokens", "priority", "stream", "top_p"]


def test_reserved_parameter_is_rejected(client: TritonClient) -> None:
    with pytest.raises(InferenceServerException, match="parameters: got the reserved name classification, expected "):
        client.infer("gpt", client.inputs(input_ids=IDS), parameters={"classification": 5})


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


def test_model_config_marks_optional_inputs(client: TritonClient) -> None:
    config = client.document("get_model_config", "gpt", "1")
    config = config if client.http else config["config"]
    assert (config["name"], config["backend"], config.get("max_batch_size", 0)) == ("gpt", "onnxruntime", 0)
    described = {tensor["name"]: tensor for tensor in config["input"]}
    assert described["input_ids"] | {"optional": False} == {
        "name": "input_ids",
        "data_type": "TYPE_INT64",
        "dims": [-1, -1],
        "optional": False,
    }
    assert [name for name, tensor in described.items() if not tensor.get("optional")] == ["input_ids"]
    assert config["output"][0] == {"name": "embeddings", "data_type": "TYPE_FP32", "dims": [-1, -1, 4]}
    assert config["instance_group"][0]["kind"] == "KIND_CPU"


def test_repository_index_lists_every_version(client: TritonClient) -> None:
    index = client.document("get_model_repository_index")
    index = index if client.http else index["models"]
    found = [(model["name"], model["version"], model["state"]) for model in index]
    assert found == [("bert", "1", "READY"), ("bert", "2", "READY"), ("gpt", "1", "READY")]


@pytest.mark.parametrize("method", ["load_model", "unload_model"])
def test_model_control_is_forbidden_by_default(client: TritonClient, method: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        getattr(client, method)("bert")
    message = "models are not loaded or unloaded by request: model_control is none, not explicit"
    assert raised.value.message() == message
    assert raised.value.status() == ("403" if client.http else "StatusCode.PERMISSION_DENIED")


def test_models_are_unloaded_and_loaded_with_explicit_control(tiny_repository: Path) -> None:
    with serve(tiny_repository, "--model-control", "explicit", "--load-model", "*") as server, connect(server):
        for module, address in (
            (tritonclient.http, server.address.removeprefix("http://")),
            (tritonclient.grpc, server.grpc),
        ):
            client = TritonClient(module, address)
            client.unload_model("gpt")
            assert not client.is_model_ready("gpt")
            with pytest.raises(InferenceServerException, match="model: got gpt, expected bert"):
                client.infer("gpt", client.inputs(input_ids=IDS))
            index = client.document("get_model_repository_index")
            states = [(model["name"], model["state"]) for model in (index if client.http else index["models"])]
            assert states == [("bert", "READY"), ("bert", "READY"), ("gpt", "UNAVAILABLE")]
            client.load_model("gpt")
            assert client.is_model_ready("gpt")
            assert client.infer("gpt", client.inputs(input_ids=IDS)).as_numpy("embeddings").shape == (2, 3, 4)
            with pytest.raises(InferenceServerException, match="parameters: got config, expected none"):
                client.load_model("gpt", config="{}")
        ready = httpx.post(f"{server.address}/v2/repository/index", json={"ready": True}, timeout=60).json()
        assert len(ready) == 3
        httpx.post(f"{server.address}/v2/repository/models/gpt/unload", timeout=60).raise_for_status()
        ready = httpx.post(f"{server.address}/v2/repository/index", json={"ready": True}, timeout=60).json()
        assert [model["name"] for model in ready] == ["bert", "bert"]


def test_statistics_count_requests_batches_and_failures(module: ModuleType, counted_server: Server) -> None:
    client = client_of(module, counted_server)

    def read() -> dict[str, Any]:
        (model,) = client.document("get_inference_statistics", "gpt", "1")["model_stats"]
        assert (model["name"], model["version"]) == ("gpt", "1")
        return model  # type: ignore[no-any-return]

    def batch_of_3(model: dict[str, Any]) -> int:
        counts = {b["batch_size"]: b["compute_infer"]["count"] for b in model.get("batch_stats", ())}
        return int(counts.get(3, 0))

    client.infer("gpt", client.inputs(input_ids=IDS))
    with pytest.raises(InferenceServerException):
        client.infer("gpt", client.inputs(input_ids=[[7]]))
    before = read()
    for _ in range(3):
        client.infer("gpt", client.inputs(input_ids=[[1], [2], [3]]))
    with pytest.raises(InferenceServerException):
        client.infer("gpt", client.inputs(input_ids=[[7]]))
    after = read()

    def grew(*path: str) -> int:
        old, new = before, after
        for key in path:
            old, new = old[key], new[key]
        return int(new) - int(old)  # type: ignore[call-overload, no-any-return]

    assert (grew("inference_count"), grew("execution_count")) == (9, 3)
    assert (grew("inference_stats", "success", "count"), grew("inference_stats", "fail", "count")) == (3, 1)
    assert batch_of_3(after) - batch_of_3(before) == 3
    phases = ("queue", "compute_input", "compute_infer", "compute_output")
    assert all(grew("inference_stats", phase, "count") == 3 for phase in phases)
    assert all(grew("inference_stats", phase, "ns") > 0 for phase in phases)
    assert sum(grew("inference_stats", phase, "ns") for phase in phases) <= grew("inference_stats", "success", "ns")
    assert after["last_inference"] > before["last_inference"] > 1.7e12


def test_statistics_without_name_cover_every_model(client: TritonClient) -> None:
    models = client.document("get_inference_statistics")["model_stats"]
    assert [(m["name"], m["version"]) for m in models] == [("bert", "1"), ("bert", "2"), ("gpt", "1")]


def test_async_infer_over_http_matches_native_api(tiny_server: Server, tiny_clients: Clients) -> None:
    client = TritonClient(tritonclient.http, "")
    with tritonclient.http.InferenceServerClient(tiny_server.address.removeprefix("http://"), concurrency=4) as http:
        asked = [http.async_infer("bert", client.inputs(**FIELDS)) for _ in range(8)]
        answers = {request.get_result().as_numpy("embeddings").tobytes() for request in asked}
    assert answers == {native_bytes(tiny_clients, "bert", FIELDS).tobytes()}


def test_async_infer_over_grpc_matches_native_api(tiny_clients: Clients) -> None:
    found: queue.Queue[Any] = queue.Queue()
    client = TritonClient(tritonclient.grpc, "")
    for _ in range(8):
        tiny_clients.grpc.async_infer("bert", client.inputs(**FIELDS), lambda result, error: found.put((result, error)))
    answers = [found.get(timeout=30) for _ in range(8)]
    assert [error for _, error in answers] == [None] * 8
    expected = native_bytes(tiny_clients, "bert", FIELDS).tobytes()
    assert {result.as_numpy("embeddings").tobytes() for result, _ in answers} == {expected}


STEPS: list[tuple[list[list[int]], int, str | None]] = [
    ([[1, 2]], 0, None),
    ([[7]], 2, "input_ids[0][0]: got 7, expected 0 to 6"),
    ([[3]], 2, None),
    ([[4]], 6, "offset[0] + tokens: got 6 + 1 = 7, expected at most 6, the max_len of this model"),
    ([[4], [5]], 3, None),
]


def test_grpc_stream_responds_in_order_and_survives_errors(tiny_server: Server, tiny_clients: Clients) -> None:
    found: queue.Queue[Any] = queue.Queue()
    client = TritonClient(tritonclient.grpc, "")
    with tritonclient.grpc.InferenceServerClient(tiny_server.grpc) as streaming:
        streaming.start_stream(lambda result, error: found.put((result, error)), compression_algorithm="gzip")
        for number, (ids, offset, _) in enumerate(STEPS):
            inputs = client.inputs(input_ids=ids, offset=[offset])
            streaming.async_stream_infer("gpt", inputs, request_id=str(number), enable_empty_final_response=True)
        streaming.async_stream_infer("nope", inputs)
        answers = [found.get(timeout=30) for _ in range(len(STEPS) + 1)]
        streaming.stop_stream()
    check_steps(answers[:-1], tiny_clients)
    assert answers[-1][1].message() == f"model: got nope, expected bert, gpt; {LOADING_HINT}"
    final = [result.get_response().parameters["triton_final_response"].bool_param for result, _ in answers if result]
    assert final == [True] * 3


def test_aio_client_stream_matches_native_api(tiny_server: Server, tiny_clients: Clients) -> None:
    client = TritonClient(tritonclient.grpc.aio, "")

    async def requests() -> Any:
        for number, (ids, offset, _) in enumerate(STEPS):
            inputs = client.inputs(input_ids=ids, offset=[offset])
            yield {"model_name": "gpt", "inputs": inputs, "request_id": str(number)}

    async def run() -> list[Any]:
        async with tritonclient.grpc.aio.InferenceServerClient(tiny_server.grpc) as streaming:
            return [answer async for answer in streaming.stream_infer(requests())]

    check_steps(asyncio.run(run()), tiny_clients)


def check_steps(answers: list[Any], tiny_clients: Clients) -> None:
    for number, ((ids, offset, refusal), (result, error)) in enumerate(zip(STEPS, answers, strict=True)):
        if refusal is not None:
            assert (result, error.message()) == (None, refusal)
            continue
        assert error is None
        assert result.get_response().id == str(number)
        expected = native_bytes(tiny_clients, "gpt", {"input_ids": ids, "offset": offset})
        assert result.as_numpy("embeddings").tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def large(model_server: Server, model_clients: Clients) -> tuple[Server, Any, bytes]:
    """Return a server, ids, and their answer of some megabytes."""
    ids = np.random.default_rng(1).integers(0, 30000, (8, 256))
    return model_server, ids, native_bytes(model_clients, "minilm", {"input_ids": ids.tolist()}).tobytes()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_large_compressed_infer_matches_native_bytes(large: tuple[Server, Any, bytes], coding: str) -> None:
    server, ids, expected = large
    with tritonclient.http.InferenceServerClient(server.address.removeprefix("http://")) as client:
        given = tritonclient.http.InferInput("input_ids", ids.shape, "INT64").set_data_from_numpy(ids)
        options = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
        result = client.infer("minilm", [given], **options)
    assert result.as_numpy("embeddings").tobytes() == expected
