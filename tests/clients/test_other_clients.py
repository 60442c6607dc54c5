"""Clients whose requirements collide with ours, each in an environment of its own: `make clients` makes them."""

from pathlib import Path

import numpy as np
import pytest

from tests.clients.client_environments import ask
from tests.support.paths import ROOT
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server
from tests.support.static_models import load_wordllama

FIELDS = {"input_ids": [[1, 2, 3], [4, 5, 6]]}


def test_kserve_client_receives_native_vectors(tiny_server: Server, tiny_clients: Clients) -> None:
    found = ask("kserve", "kserve_client.py", tiny_server.address, tiny_server.grpc, "gpt")
    expected = native_bytes(tiny_clients, "gpt", FIELDS)
    assert found["http"] == [True, True, True, False]
    assert found["grpc"] == [True, True, True, False]
    assert found["answers"] == [["7", "embeddings", "FP32", expected.tobytes().hex()]] * 6
    assert found["refused"].startswith("model: got nope, expected bert, gpt")


def test_kserve_accepts_deployed_manifests(tmp_path: Path) -> None:
    files = [ROOT / "deploy/kserve" / name for name in ("inference-service.yaml", "runtime.yaml")]
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(files[0].read_text().replace("query", "queries"))
    *found, wrong = ask("kserve", "kserve_objects.py", *map(str, [*files, misspelt]))
    kinds = "V1beta1InferenceService", "V1alpha1ClusterServingRuntime"
    assert found == [{"group": "serving.kserve.io", "kind": kind, "unknown": []} for kind in kinds]
    assert wrong["unknown"] == [".spec.predictor.autoScaling.metrics[].external.metric.queries"]


def test_langchain_embeddings_match_wordllama(model_server: Server) -> None:
    """The documented argument keeps LangChain from sending the ids of another tokenizer, which give other vectors."""
    found = ask("langchain-openai", "langchain_client.py", model_server.address)
    expected = load_wordllama().embed(found["texts"], norm=True)
    np.testing.assert_allclose(np.array(found["documented"], np.float32), expected, rtol=1e-4, atol=1e-6)
    assert np.abs(np.array(found["default"], np.float32) - expected).max() > 0.1


@pytest.mark.parametrize(
    ("environment", "judge"),
    [
        ("langchain-huggingface", "langchain_tei.py"),
        ("llama-index-embeddings-text-embeddings-inference", "llama_index_tei.py"),
    ],
)
def test_tei_clients_receive_vectors_of_wordllama(model_server: Server, environment: str, judge: str) -> None:
    found = ask(environment, judge, model_server.address)
    expected = load_wordllama().embed(found["texts"], norm=True)
    for vectors in found["batches"]:
        np.testing.assert_allclose(np.array(vectors, np.float32), expected, rtol=1e-4, atol=1e-6)
    assert "valid list" in found.get("refused", "a valid list")


def test_mlserver_types_receive_native_vectors(tiny_server: Server, tiny_clients: Clients) -> None:
    found = ask("mlserver", "mlserver_types.py", tiny_server.address, tiny_server.grpc)
    assert found["inputs"] == ["input_ids", "attention_mask", "offset"]
    assert found["index"] == [["bert", "1", "READY"], ["bert", "2", "READY"], ["gpt", "1", "READY"]]
    assert found["vectors"] == [native_bytes(tiny_clients, "gpt", FIELDS).tobytes().hex()] * 3
