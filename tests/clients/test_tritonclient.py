"""The four clients of tritonclient, unmodified, against one server. Oracles: the native API, and each other."""

import queue
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from tests.clients.triton_client import FIELDS, IDS, TritonClient
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server, serve


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


def test_parameters_are_read_or_ignored_and_reported(client: TritonClient, tiny_clients: Clients) -> None:
    given = {"offset": 2, "max_tokens": 5, "top_p": 0.5, "stream": False}
    result = client.infer("gpt", client.inputs(input_ids=IDS), parameters=given, priority=1)
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS, "offset": 2})
    assert result.as_numpy("embeddings").tobytes() == expected.tobytes()
    answer = result.get_response()
    told = answer["parameters"] if client.http else answer.parameters
    named = told["ignored_parameters"] if client.http else told["ignored_parameters"].string_param
    assert sorted(named.split(", ")) == ["max_tokens", "priority", "stream", "top_p"]


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
    assert "sequence_batching" not in config


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
            with pytest.raises(InferenceServerException, match="parameters: got config, expected none"):
                client.load_model("gpt", config="{}")


def test_statistics_count_requests_batches_and_failures(module: ModuleType, counted_server: Server) -> None:
    client = client_of(module, counted_server)

    def infer_and_fail(times: int) -> dict[str, Any]:
        """Return the statistics after so many requests of three rows, and a wrong one."""
        for _ in range(times):
            client.infer("gpt", client.inputs(input_ids=[[1], [2], [3]]))
        with pytest.raises(InferenceServerException):
            client.infer("gpt", client.inputs(input_ids=[[7]]))
        (model,) = client.document("get_inference_statistics", "gpt", "1")["model_stats"]
        batches = {batch["batch_size"]: batch["compute_infer"] for batch in model["batch_stats"]}
        totals = {name: {"count": model[name]} for name in ("inference_count", "execution_count")}
        return model["inference_stats"] | totals | {"batches of 3": batches[3], "last": model["last_inference"]}  # type: ignore[no-any-return]

    before, after = infer_and_fail(1), infer_and_fail(3)
    phases = ("queue", "compute_input", "compute_infer", "compute_output")
    counts = {"inference_count": 9, "execution_count": 3, "batches of 3": 3, "fail": 1} | dict.fromkeys(phases, 3)
    for name, grown in (counts | {"success": 3}).items():
        assert int(after[name]["count"]) - int(before[name]["count"]) == grown, name
    spent = {name: int(after[name]["ns"]) - int(before[name]["ns"]) for name in (*phases, "success")}
    assert all(spent.values())
    assert sum(spent[phase] for phase in phases) <= spent["success"]
    assert after["last"] > before["last"] > 1.7e12


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
    with tritonclient.grpc.InferenceServerClient(tiny_server.grpc) as streaming:
        streaming.start_stream(lambda result, error: found.put((result, error)), compression_algorithm="gzip")
        for number, (ids, offset, _) in enumerate(STEPS):
            inputs = client.inputs(input_ids=ids, offset=[offset])
            streaming.async_stream_infer("gpt", inputs, request_id=str(number), enable_empty_final_response=True)
        answers = [found.get(timeout=30) for _ in STEPS]
        streaming.stop_stream()
    for number, ((ids, offset, refusal), (result, error)) in enumerate(zip(STEPS, answers, strict=True)):
        if refusal is not None:
            assert (result, error.message()) == (None, refusal)
            continue
        response = result.get_response()
        assert (response.id, response.parameters["triton_final_response"].bool_param) == (str(number), True)
        expected = native_bytes(tiny_clients, "gpt", {"input_ids": ids, "offset": offset})
        assert result.as_numpy("embeddings").tobytes() == expected.tobytes()
