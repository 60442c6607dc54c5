"""Further names of models on a real server, with the clients of each protocol."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

import preblock
from tests.support import commands
from tests.support.servers import Server, serve

IDS = np.array([[1, 2, 3], [4, 5, 6]])
HUB_ID = "a-team/BERT-base"
ALIASES = ("--alias", "embeddings=gpt", "--alias", "sentences=bert", "--served-model-name", f"{HUB_ID}=bert")


@pytest.fixture(scope="module")
def aliased(tiny_repository: Path) -> Iterator[Server]:
    with serve(tiny_repository, *ALIASES, "--model-control-mode", "explicit", "--load-model", "*") as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def triton(aliased: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "http":
        client = tritonclient.http.InferenceServerClient(aliased.address.removeprefix("http://"))
    else:
        client = tritonclient.grpc.InferenceServerClient(aliased.grpc)
    with closing(client):
        yield client


def infer(client: Any, model: str) -> Any:
    module = tritonclient.http if isinstance(client, tritonclient.http.InferenceServerClient) else tritonclient.grpc
    tensor = module.InferInput("input_ids", [2, 3], "INT64")
    tensor.set_data_from_numpy(IDS)
    return client.infer(model, [tensor]).as_numpy("embeddings")


def is_ready(client: Any, model: str) -> bool:
    """Return whether a model is ready; the client of gRPC raises an error for an unknown one."""
    try:
        return bool(client.is_model_ready(model))
    except InferenceServerException as error:
        if error.status() != "StatusCode.NOT_FOUND":
            raise
        return False


def as_json(client: Any, method: str, *arguments: str) -> Any:
    """Return the document of a method of either client."""
    options = {} if isinstance(client, tritonclient.http.InferenceServerClient) else {"as_json": True}
    return getattr(client, method)(*arguments, **options)


def test_triton_client_with_alias_receives_model_vectors(triton: Any) -> None:
    expected = infer(triton, "gpt").tobytes()
    # The first request prepares the second one.
    assert [infer(triton, "embeddings").tobytes() for _ in range(2)] == [expected] * 2
    assert is_ready(triton, "embeddings")
    assert not is_ready(triton, "nope")
    metadata = as_json(triton, "get_model_metadata", "embeddings")
    assert metadata == as_json(triton, "get_model_metadata", "gpt") | {"name": "embeddings"}
    config = as_json(triton, "get_model_config", "embeddings")
    assert config.get("config", config)["name"] == "embeddings"


def test_repository_index_and_statistics_accept_alias(triton: Any) -> None:
    infer(triton, "embeddings")
    index = as_json(triton, "get_model_repository_index")
    rows = index if isinstance(index, list) else index["models"]
    assert sorted((row["name"], row["version"]) for row in rows) == [
        *((HUB_ID, "1"), (HUB_ID, "2"), ("bert", "1"), ("bert", "2"), ("embeddings", "1")),
        *(("gpt", "1"), ("sentences", "1"), ("sentences", "2")),
    ]
    (by_alias,), (by_name,) = (
        as_json(triton, "get_inference_statistics", name)["model_stats"] for name in ("embeddings", "gpt")
    )
    assert by_alias == by_name | {"name": "embeddings"}
    assert int(by_alias["inference_count"]) >= 2
    of_all = as_json(triton, "get_inference_statistics")["model_stats"]
    assert [row["name"] for row in of_all] == ["bert", "bert", "gpt"]


def test_native_and_openai_apis_accept_alias(aliased: Server) -> None:
    with httpx.Client(base_url=aliased.address) as http:
        vectors = [
            http.post(f"/models/{name}/embed", json={"input_ids": IDS.tolist()}).json()
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
        mean = {"pooling": "mean"}
        answers = [
            client.embeddings.create(model=name, input=[[1, 2]], extra_body=mean) for name in ("gpt", "embeddings")
        ]
        assert answers[0].data == answers[1].data
        assert answers[1].model == "gpt"
        assert client.models.retrieve(f"{HUB_ID}:1").id == f"{HUB_ID}:1"
        by_id, by_name = (
            client.embeddings.create(model=f"{name}:1", input="a", extra_body=mean) for name in (HUB_ID, "bert")
        )
        assert by_id.data == by_name.data


def test_hub_id_names_model_in_grpc(aliased: Server) -> None:
    with closing(tritonclient.grpc.InferenceServerClient(aliased.grpc)) as client:
        assert infer(client, HUB_ID).tobytes() == infer(client, "bert").tobytes()
        assert is_ready(client, HUB_ID)


def test_decode_stream_of_alias_matches_model_bit_for_bit(aliased: Server) -> None:
    with preblock.connect(aliased.address) as client:
        steps = []
        for name in ("gpt", "embeddings"):
            with client.decode(name) as stream:
                steps.append(stream.step([[1, 2]]).tobytes())
    assert steps[0] == steps[1]


def test_alias_loads_and_unloads_its_model(triton: Any) -> None:
    triton.unload_model("sentences")
    try:
        assert not is_ready(triton, "bert")
        assert not is_ready(triton, "sentences")
    finally:
        triton.load_model("sentences")
    assert is_ready(triton, "bert")


def test_banner_lists_aliases(aliased: Server) -> None:
    assert "\n  embeddings: gpt2, " in aliased.banner
    assert f"\n  {HUB_ID}: bert, " in aliased.banner
    assert f"/models/{HUB_ID}" not in aliased.banner


@pytest.mark.parametrize(
    ("alias", "control", "code", "message"),
    [
        ("bert=gpt", "none", 1, "the alias bert of gpt is the name of another model"),
        ("words=nope", "poll", 1, "has no model nope; it has bert, gpt"),
        ("words", "none", 2, "--alias: got words, expected NAME=MODEL"),
    ],
)
def test_serve_with_invalid_alias_fails(
    tiny_repository: Path, alias: str, control: str, code: int, message: str
) -> None:
    arguments = ["serve", "--repository", tiny_repository, "--port", "0", "--model-control", control, "--alias", alias]
    done = commands.run(commands.preblock, *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
