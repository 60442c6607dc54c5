"""The Open Inference Protocol over HTTP, with the same documents over gRPC. Oracles: tritonclient, the native API."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http

from preblock.service.app import VERSION
from tests.service.api.http.routes.v2_calls import IDS, MIXED, error_of, infer, outputs, tensor, vectors_of
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server

EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "parameters"]
EXTENSIONS += ["sequence", "sequence(string_id)", "statistics"]


@pytest.fixture(scope="module")
def triton(tiny_server: Server) -> Iterator[Any]:
    """tritonclient over HTTP."""
    with tritonclient.http.InferenceServerClient(tiny_server.address.removeprefix("http://")) as client:
        yield client


def test_server_and_model_are_ready_only_if_served(triton: Any, tiny_clients: Clients) -> None:
    expected = {"name": "preblock", "version": VERSION, "extensions": EXTENSIONS}
    assert triton.get_server_metadata() == tiny_clients.grpc.get_server_metadata(as_json=True) == expected
    for client in (triton, tiny_clients.grpc):
        assert client.is_server_live()
        assert client.is_server_ready()
        for model, version in (("bert", ""), ("bert", "1"), ("bert", "2"), ("gpt", "1")):
            assert client.is_model_ready(model, version), (client, model, version)
        for model, version in (("nope", ""), ("bert", "3"), ("bert", "0")):
            assert not client.is_model_ready(model, version), (client, model, version)
    assert tiny_clients.http.get("/v2/health/live").json() == {"live": True}
    assert tiny_clients.http.get("/v2/health/ready").json() == {"ready": True}
    assert tiny_clients.http.get("/v2/models").json() == {"models": ["bert", "gpt"]}


def test_model_metadata_describes_every_tensor(triton: Any, tiny_clients: Clients) -> None:
    ids = ("input_ids", "token_type_ids", "attention_mask")
    whole = triton.get_model_metadata("bert")
    assert whole == {
        "name": "bert",
        "versions": ["1", "2"],
        "platform": "onnx_onnxv1",
        "inputs": [
            *({"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in ids),
            {"name": "offset", "datatype": "INT64", "shape": [-1]},
            {"name": "text", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [
            {"name": name, "datatype": "FP32", "shape": [-1, -1, 4]} for name in ("embeddings", "token_embeddings")
        ],
    }
    assert triton.get_model_metadata("bert", "1") == whole | {"versions": ["1"]}
    for model, version in (("bert", ""), ("bert", "1"), ("gpt", "")):
        told, http = tiny_clients.grpc.get_model_metadata(model, version), triton.get_model_metadata(model, version)
        described = [
            [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors]
            for tensors in (told.inputs, told.outputs)
        ]
        assert described == [http["inputs"], http["outputs"]]
        assert (told.name, list(told.versions), told.platform) == (model, http["versions"], http["platform"])


def test_model_config_names_optional_inputs(tiny_clients: Clients) -> None:
    for path in ("bert", "bert/versions/2"):
        http = tiny_clients.http.get(f"/v2/models/{path}/config").json()
        config = tiny_clients.grpc.get_model_config("bert", "2").config
        assert [(t.name, list(t.dims), t.optional) for t in config.input] == [
            (t["name"], t["dims"], t["optional"]) for t in http["input"]
        ]
        assert [(t.name, list(t.dims)) for t in config.output] == [(t["name"], t["dims"]) for t in http["output"]]
        assert config.version_policy.WhichOneof("policy_choice") == next(iter(http["version_policy"])) == "all"
        assert (config.max_batch_size, config.platform) == (http["max_batch_size"], http["platform"])
        assert all(described["optional"] for described in http["input"])  # ids or text
    gpt = tiny_clients.http.get("/v2/models/gpt/config").json()["input"]
    assert [described["name"] for described in gpt if described["optional"]] == ["attention_mask", "offset"]


def test_index_with_ready_filter_lists_ready_models(tiny_http: httpx.Client) -> None:
    whole = tiny_http.post("/v2/repository/index").json()
    assert whole[0] == {"name": "bert", "version": "1", "state": "READY", "reason": ""}
    for body in ({"ready": True}, {"ready": None}, {"ready": False}, {}):
        assert tiny_http.post("/v2/repository/index", json=body).json() == whole, body


def test_statistics_list_batches_up_to_64_rows(tiny_http: httpx.Client) -> None:
    for rows in (64, 65, 70):
        tiny_http.post("/models/gpt/embed", json={"input_ids": [[1]] * rows})
    (stats,) = tiny_http.get("/v2/models/gpt/stats").json()["model_stats"]
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]}
    assert max(sizes) == 64
    assert stats["execution_count"] >= sum(sizes.values()) + 2


def test_unknown_v2_path_has_an_error_of_the_protocol(tiny_http: httpx.Client) -> None:
    for path in ("models/nope/ready", "models/bert/versions/3", "nope"):
        response = tiny_http.get(f"/v2/{path}")
        assert (response.status_code, bool(error_of(response))) == (404, True), path
    response = tiny_http.get("/v2/models/bert/infer")
    assert (response.status_code, response.headers["Allow"]) == (405, "POST, OPTIONS")
    assert error_of(response) == "GET /v2/models/bert/infer: Method Not Allowed, expected POST"


def test_json_data_may_be_nested_or_flat(tiny_clients: Clients) -> None:
    for data in (IDS, [1, 2, 3, 4, 5, 6]):
        response = infer(tiny_clients.http, tensor(data=data, shape=[2, 3]))
        assert vectors_of(response).tobytes() == native_bytes(tiny_clients, "gpt", {"input_ids": IDS}).tobytes()
        assert response.json()["outputs"][0]["shape"] == [2, 3, 4]


def test_response_names_request_and_version(tiny_http: httpx.Client) -> None:
    for id_ in ("7", "", "é\u0000\U0001f600", None):
        document = infer(tiny_http, tensor(), id=id_).json()
        assert (document.get("id"), "id" in document) == (id_, id_ is not None)
    newest = infer(tiny_http, tensor(), model="bert").json()
    for version in (1, 2):
        document = infer(tiny_http, tensor(), model=f"bert/versions/{version}").json()
        assert (document["model_name"], document["model_version"]) == ("bert", str(version))
        assert (document["outputs"] == newest["outputs"]) == (version == 2)


def test_omitted_outputs_default_to_all_declared(tiny_http: httpx.Client) -> None:
    for model in ("bert", "gpt"):
        declared = [output["name"] for output in tiny_http.get(f"/v2/models/{model}").json()["outputs"]]
        named = infer(tiny_http, tensor(), model=model, outputs=outputs(*declared)).json()
        assert [output["name"] for output in named["outputs"]] == declared == ["embeddings", "token_embeddings"]
        for omitted in ([], None):
            assert infer(tiny_http, tensor(), model=model, outputs=omitted).json() == named


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_tritonclient_response_equals_native_api(
    triton: Any, tiny_clients: Clients, binary_in: bool, binary_out: bool
) -> None:
    inputs = []
    for name, data in MIXED.items():
        array = np.array(data)
        inputs.append(tritonclient.http.InferInput(name, array.shape, "INT64"))
        inputs[-1].set_data_from_numpy(array, binary_data=binary_in)
    output = tritonclient.http.InferRequestedOutput("embeddings", binary_data=binary_out)
    result = triton.infer("bert", inputs, outputs=[output], request_id="42", model_version="2")
    assert result.as_numpy("embeddings").tobytes() == native_bytes(tiny_clients, "bert", MIXED).tobytes()
    assert result.as_numpy("embeddings").shape == (2, 3, 4)
    assert (result.get_response()["id"], result.get_response()["model_version"]) == ("42", "2")
