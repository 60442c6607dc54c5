"""Vectors with and without the embedding scale, over every protocol of the service. Oracle: the stored table."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

import preblock
from preblock.client.errors import RequestError
from tests.support.artifacts import copy_artifact, read_tables
from tests.support.late import torch
from tests.support.servers import Server, serve

IDS = [[3, 0, 10]]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, np.ndarray]]:
    repository: Path = tmp_path_factory.mktemp("scale")
    table = read_tables(copy_artifact("gemma", repository))["tokens"]
    with serve(repository) as server:
        yield server, table[IDS]


def test_client_returns_scaled_and_unscaled_vectors(gemma: tuple[Server, np.ndarray]) -> None:
    server, rows = gemma
    with preblock.connect(server.address) as client:
        model = client.model("gemma")
        assert model.outputs["unscaled_token_embeddings"] == 4
        assert {(row["engine"], row["versions"], row["scale"], row["output"]) for row in model.consumers} >= {
            ("vllm", ">=0.18", "applied", "token_embeddings"),
            ("vllm", "<0.18", "none", "unscaled_token_embeddings"),
        }
        for output, expected in (("token_embeddings", rows * np.float32(2.5)), ("unscaled_token_embeddings", rows)):
            assert client.embed(IDS, model="gemma", output=output).vectors.tobytes() == expected.tobytes()
            (prompt,) = client.prompt_embeds(IDS, model="gemma", output=output)
            loaded = torch.load(io.BytesIO(base64.b64decode(prompt)), weights_only=True)
            assert torch.equal(loaded, torch.from_numpy(expected[0]))
            with client.decode("gemma", output=output) as stream:
                assert stream.step(IDS).tobytes() == expected.tobytes()
        with pytest.raises(RequestError, match="expected token_embeddings or unscaled_token_embeddings with the enc"):
            client.prompt_embeds(IDS, model="gemma", output="embeddings")


def test_open_inference_returns_scaled_and_unscaled_vectors(gemma: tuple[Server, np.ndarray]) -> None:
    server, rows = gemma
    metadata = httpx.get(f"{server.address}/v2/models/gemma").json()
    assert "unscaled_token_embeddings" in {output["name"] for output in metadata["outputs"]}
    body = {
        "inputs": [{"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": IDS[0]}],
        "outputs": [{"name": "unscaled_token_embeddings"}, {"name": "token_embeddings"}],
    }
    answer = httpx.post(f"{server.address}/v2/models/gemma/infer", json=body).json()
    unscaled, scaled = (np.array(output["data"], np.float32) for output in answer["outputs"])
    assert unscaled.tobytes() == rows.tobytes()
    assert scaled.tobytes() == (rows * np.float32(2.5)).tobytes()


def test_model_description_explains_scaled_and_unscaled_output(gemma: tuple[Server, np.ndarray]) -> None:
    outputs = httpx.get(f"{gemma[0].address}/models/gemma").json()["outputs"]
    assert outputs["unscaled_token_embeddings"]["use_as"] == outputs["token_embeddings"]["use_as"]
    assert "They include the embedding scale, 2.5." in outputs["token_embeddings"]["description"]
    assert "without the embedding scale" in outputs["unscaled_token_embeddings"]["description"]
