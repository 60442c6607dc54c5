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


class Triton:
    """A client of tritonclient over HTTP or gRPC, with documents as answers."""

    def __init__(self, module: Any, address: str) -> None:
        self.module, self.client = module, module.InferenceServerClient(address)

    def infer(self, model: str) -> bytes:
        tensor = self.module.InferInput("input_ids", [2, 3], "INT64")
        tensor.set_data_from_numpy(IDS)
        vectors: bytes = self.client.infer(model, [tensor]).as_numpy("embeddings").tobytes()
        return vectors

    def is_ready(self, model: str) -> bool:
        """Return whether a model is ready; the client of gRPC raises an error for an unknown one."""
        try:
            return bool(self.client.is_model_ready(model))
        except InferenceServerException as error:
            if error.status() != "StatusCode.NOT_FOUND":
                raise
            return False

    def ask(self, method: str, *arguments: str) -> Any:
        options = {} if self.module is tritonclient.http else {"as_json": True}
        return getattr(self.client, method)(*arguments, **options)


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc])
def triton(aliased: Server, request: pytest.FixtureRequest) -> Iterator[Triton]:
    address = aliased.grpc if request.param is tritonclient.grpc else aliased.address.removeprefix("http://")
    made = Triton(request.param, address)
    with closing(made.client):
        yield made


def test_triton_client_with_alias_receives_model_vectors(triton: Triton) -> None:
    expected = triton.infer("gpt")
    # The first request prepares the second one.
    assert [triton.infer("embeddings") for _ in range(2)] == [expected] * 2
    assert [triton.is_ready(name) for name in ("embeddings", "nope")] == [True, False]
    if triton.module is tritonclient.grpc:  # the path of an HTTP request has no room for the slash of a hub's name
        assert triton.infer(HUB_ID) == triton.infer("bert")
        assert triton.is_ready(HUB_ID)
    metadata = triton.ask("get_model_metadata", "embeddings")
    assert metadata == triton.ask("get_model_metadata", "gpt") | {"name": "embeddings"}
    config = triton.ask("get_model_config", "embeddings")
    assert config.get("config", config)["name"] == "embeddings"


def test_repository_index_and_statistics_accept_alias(triton: Triton) -> None:
    triton.infer("embeddings")
    index = triton.ask("get_model_repository_index")
    rows = index if isinstance(index, list) else index["models"]
    both = (HUB_ID, "bert", "sentences")
    expected = [*((name, version) for name in both for version in "12"), ("embeddings", "1"), ("gpt", "1")]
    assert sorted((row["name"], row["version"]) for row in rows) == sorted(expected)
    (by_alias,), (by_name,) = (
        triton.ask("get_inference_statistics", name)["model_stats"] for name in ("embeddings", "gpt")
    )
    assert by_alias == by_name | {"name": "embeddings"}
    assert int(by_alias["inference_count"]) >= 1
    of_all = triton.ask("get_inference_statistics")["model_stats"]
    assert [row["name"] for row in of_all] == ["bert", "bert", "gpt"]


def test_alias_loads_and_unloads_its_model(triton: Triton) -> None:
    triton.client.unload_model("sentences")
    try:
        assert not triton.is_ready("bert")
        assert not triton.is_ready("sentences")
    finally:
        triton.client.load_model("sentences")
    assert triton.is_ready("bert")


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
        assert client.models.retrieve(f"{HUB_ID}:1").id == f"{HUB_ID}:1"
        for alias, name in (("embeddings", "gpt"), (f"{HUB_ID}:1", "bert:1")):
            by_alias, by_name = (
                client.embeddings.create(model=model, input=[[1, 2]], extra_body={"pooling": "mean"})
                for model in (alias, name)
            )
            assert (by_alias.data, by_alias.model) == (by_name.data, name.partition(":")[0])


def test_decode_stream_of_alias_matches_model_bit_for_bit(aliased: Server) -> None:
    with preblock.connect(aliased.address) as client:
        steps = []
        for name in ("gpt", "embeddings"):
            with client.decode(name) as stream:
                steps.append(stream.step([[1, 2]]).tobytes())
    assert steps[0] == steps[1]


def test_banner_lists_aliases(aliased: Server) -> None:
    assert "\n  embeddings: gpt2, " in aliased.banner
    assert f"\n  {HUB_ID}: bert, " in aliased.banner
    assert f"/models/{HUB_ID}" not in aliased.banner


def test_serve_with_invalid_alias_fails(tiny_repository: Path) -> None:
    for alias, control, code, message in (
        ("bert=gpt", "none", 1, "the alias bert of gpt is the name of another model"),
        ("words=nope", "poll", 1, "has no model nope; it has bert, gpt"),
        ("words", "none", 2, "--alias: got words, expected NAME=MODEL"),
    ):
        options = "--port", "0", "--model-control", control, "--alias", alias
        done = commands.run(commands.preblock, "serve", "--repository", tiny_repository, *options)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
