"""Further names of models on a real server, with the clients of each protocol."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.cli.command_line import failing
from tests.clients.test_tritonclient import client_of
from tests.clients.triton_client import TritonClient
from tests.support.servers import Server, serve

IDS = [[1, 2, 3], [4, 5, 6]]
HUB_ID = "a-team/BERT-base"
ALIASES = ("--alias", "embeddings=gpt", "--alias", "sentences=bert", "--served-model-name", f"{HUB_ID}=bert")


@pytest.fixture(scope="module")
def aliased(tiny_repository: Path) -> Iterator[Server]:
    with serve(tiny_repository, *ALIASES, "--model-control-mode", "explicit", "--load-model", "*") as server:
        yield server


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc])
def triton(aliased: Server, request: pytest.FixtureRequest) -> TritonClient:
    return client_of(request.param, aliased)


def infer(client: TritonClient, model: str) -> bytes:
    vectors: bytes = client.infer(model, client.inputs(input_ids=IDS)).as_numpy("embeddings").tobytes()
    return vectors


def is_ready(client: TritonClient, model: str) -> bool:
    """Return whether a model is ready; the client of gRPC raises an error for an unknown one."""
    try:
        return bool(client.is_model_ready(model))
    except InferenceServerException as error:
        if error.status() != "StatusCode.NOT_FOUND":
            raise
        return False


def test_triton_client_with_alias_receives_model_vectors(triton: TritonClient) -> None:
    expected = infer(triton, "gpt")
    # The first request prepares the second one.
    assert [infer(triton, "embeddings") for _ in range(2)] == [expected] * 2
    assert [is_ready(triton, name) for name in ("embeddings", "nope")] == [True, False]
    if not triton.http:  # the path of an HTTP request has no room for the slash of a hub's name
        assert infer(triton, HUB_ID) == infer(triton, "bert")
        assert is_ready(triton, HUB_ID)
    metadata = triton.document("get_model_metadata", "embeddings")
    assert metadata == triton.document("get_model_metadata", "gpt") | {"name": "embeddings"}
    config = triton.document("get_model_config", "embeddings")
    assert config.get("config", config)["name"] == "embeddings"


def test_repository_index_and_statistics_accept_alias(triton: TritonClient) -> None:
    infer(triton, "embeddings")
    index = triton.document("get_model_repository_index")
    rows = index if isinstance(index, list) else index["models"]
    both = (HUB_ID, "bert", "sentences")
    expected = [*((name, version) for name in both for version in "12"), ("embeddings", "1"), ("gpt", "1")]
    assert sorted((row["name"], row["version"]) for row in rows) == sorted(expected)
    (by_alias,), (by_name,) = (
        triton.document("get_inference_statistics", name)["model_stats"] for name in ("embeddings", "gpt")
    )
    assert by_alias == by_name | {"name": "embeddings"}
    assert by_alias["inference_count"] >= 1
    of_all = triton.document("get_inference_statistics")["model_stats"]
    assert [row["name"] for row in of_all] == ["bert", "bert", "gpt"]


def test_alias_loads_and_unloads_its_model(triton: TritonClient) -> None:
    for method, ready in (("unload_model", False), ("load_model", True)):
        getattr(triton, method)("sentences")
        assert [is_ready(triton, name) for name in ("bert", "sentences")] == [ready] * 2


def test_native_and_openai_apis_accept_alias(aliased: Server) -> None:
    with httpx.Client(base_url=aliased.address) as http:
        vectors = [
            http.post(f"/models/{name}/embed", json={"input_ids": IDS}).json()
            for name in ("gpt", "embeddings", "embeddings")
        ]
        assert vectors[0] == vectors[1] == vectors[2]
        assert vectors[0]["model"] == "gpt"
        assert http.get("/models/sentences/versions/1").json()["name"] == "sentences"
        names = [model["name"] for model in http.get("/models").json()]
        assert names == [HUB_ID, "bert", "embeddings", "gpt", "sentences"]
        metrics = http.get("/metrics").text
    assert 'preblock_models{state="ready"} 3.0' in metrics
    assert 'model="embeddings"' not in metrics
    with openai.OpenAI(base_url=f"{aliased.address}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == names
        assert client.models.retrieve(f"{HUB_ID}:1").id == f"{HUB_ID}:1"
        for alias, name in (("embeddings", "gpt"), (f"{HUB_ID}:1", "bert:1")):
            by_alias, by_name = (
                client.embeddings.create(model=model, input=[[1, 2]], extra_body={"pooling": "mean"})
                for model in (alias, name)
            )
            assert (by_alias.data, by_alias.model) == (by_name.data, name.partition(":")[0])


def test_banner_lists_aliases(aliased: Server) -> None:
    assert "\n  embeddings: gpt2, " in aliased.banner
    assert f"\n  {HUB_ID}: bert, " in aliased.banner
    assert f"/models/{HUB_ID}" not in aliased.banner


def test_serve_with_invalid_alias_fails(tiny_repository: Path) -> None:
    for alias, code, message in (
        ("bert=gpt", 1, "the alias bert of gpt is the name of another model"),
        ("words=nope", 1, "has no model nope; it has bert, gpt"),
        ("words", 2, "--alias: got words, expected NAME=MODEL"),
    ):
        options = "--port", "0", "--alias", alias
        assert message in failing("serve", "--repository", tiny_repository, *options, code=code)
