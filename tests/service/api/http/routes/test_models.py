"""`GET /models` on a real server. Oracle: the files of the artifacts."""

import hashlib
import json
from pathlib import Path

import httpx

from preblock.service.artifacts.names import MANIFEST, PARITY
from tests.support.servers import Server


def test_models_lists_the_highest_version_of_each(tiny_http: httpx.Client) -> None:
    limits = {"max_tokens": 65536, "ready": True, "random_weights": False}
    assert tiny_http.get("/models").json() == [
        {"name": "bert", "version": 2, "family": "bert", "max_len": 8, "vocab_size": 11} | limits,
        {"name": "gpt", "version": 1, "family": "gpt2", "max_len": 6, "vocab_size": 7} | limits,
    ]


def test_unloaded_model_is_listed_as_not_ready(example_server: Server) -> None:
    with httpx.Client(base_url=example_server.address) as client:
        assert client.post("/v2/repository/models/t5-small/unload").status_code == 200
        gpt, *_, t5 = client.get("/models").json()
        assert client.post("/v2/repository/models/t5-small/load").status_code == 200
    nothing = dict.fromkeys(("family", "random_weights", "max_len", "vocab_size", "max_tokens"))
    assert t5 == {"name": "t5-small", "version": 1, "ready": False} | nothing
    assert (gpt["name"], gpt["ready"]) == ("gpt2-small", True)


def test_model_shows_its_stored_manifest_and_parity(tiny_http: httpx.Client, tiny_repository: Path) -> None:
    for path, folder in (("bert", "bert/2"), ("bert/versions/1", "bert/1"), ("gpt", "gpt/1")):
        model = tiny_http.get(f"/models/{path}").json()
        assert model["manifest"] == json.loads((tiny_repository / folder / MANIFEST).read_text())
        assert model["parity"] == json.loads((tiny_repository / folder / PARITY).read_text())
        assert f"{model['name']}/{model['version']}" == folder
        canonical = json.dumps(model["manifest"], sort_keys=True, separators=(",", ":"))
        assert model["identity"] == hashlib.sha256(canonical.encode()).hexdigest()


def test_every_output_has_a_description(catalogue_http: httpx.Client) -> None:
    stored = [model["name"] for model in catalogue_http.get("/models").json() if model["name"] != "ngrams"]
    shown = {name: catalogue_http.get(f"/models/{name}").json() for name in stored}
    metadata = {name: catalogue_http.get(f"/v2/models/{name}").json() for name in stored}
    for name in stored:
        outputs = {tensor["name"]: tensor["shape"][-1] for tensor in metadata[name]["outputs"]}
        assert shown[name]["outputs"].keys() == outputs.keys(), name
        for output, told in shown[name]["outputs"].items():
            assert told["description"].endswith(".")
            assert told["width"] in (None, outputs[output])
    assert "They equal token_embeddings" in shown["llama"]["outputs"]["embeddings"]["description"]
