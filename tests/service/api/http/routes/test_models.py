"""`GET /models` on a real server. Oracle: the files of the artifacts."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from preblock.service.artifacts.names import MANIFEST, PARITY
from tests.support.artifacts import make_repository
from tests.support.servers import LOADING_HINT, serve


def test_models_lists_the_highest_version_of_each(tiny_http: httpx.Client) -> None:
    limits = {"max_tokens": 65536, "ready": True, "random_weights": False}
    assert tiny_http.get("/models").json() == [
        {"name": "bert", "version": 2, "family": "bert", "max_len": 8, "vocab_size": 11} | limits,
        {"name": "gpt", "version": 1, "family": "gpt2", "max_len": 6, "vocab_size": 7} | limits,
    ]


def test_unloaded_model_is_listed_as_not_ready(tiny_repository: Path) -> None:
    with serve(tiny_repository, "--model-control", "explicit") as server:
        assert httpx.post(f"{server.address}/v2/repository/models/bert/unload").status_code == 200
        bert, gpt = httpx.get(f"{server.address}/models").json()
    nothing = dict.fromkeys(("family", "random_weights", "max_len", "vocab_size", "max_tokens"))
    assert bert == {"name": "bert", "version": 2, "ready": False} | nothing
    assert (gpt["name"], gpt["ready"]) == ("gpt", True)


@pytest.mark.parametrize(("path", "folder"), [("bert", "bert/2"), ("bert/versions/1", "bert/1"), ("gpt", "gpt/1")])
def test_model_shows_its_stored_manifest_and_parity(
    tiny_http: httpx.Client, tiny_repository: Path, path: str, folder: str
) -> None:
    model = tiny_http.get(f"/models/{path}").json()
    assert model["manifest"] == json.loads((tiny_repository / folder / MANIFEST).read_text())
    assert model["parity"] == json.loads((tiny_repository / folder / PARITY).read_text())
    assert f"{model['name']}/{model['version']}" == folder
    canonical = json.dumps(model["manifest"], sort_keys=True, separators=(",", ":"))
    assert model["identity"] == hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize(
    ("name", "max_len", "indices", "vocab_size", "width"),
    [
        ("minilm", 512, {"token_type_ids": 2}, 30522, 384),
        ("gpt2-small", 1024, {}, 50257, 768),
        ("transformer-base", 4096, {}, 32000, 512),
    ],
)
def test_model_shows_its_limits_and_provider(
    model_http: httpx.Client, name: str, max_len: int, indices: dict[str, int], vocab_size: int, width: int
) -> None:
    model = model_http.get(f"/models/{name}").json()
    assert (model["max_len"], model["max_tokens"]) == (max_len, 65536)
    on_gpu = os.environ.get("PREBLOCK_PROVIDER") == "cuda"
    assert model["provider"] == ("CUDAExecutionProvider" if on_gpu else "CPUExecutionProvider")
    manifest = model["manifest"]
    assert (manifest["indices"], manifest["vocab_size"], manifest["width"]) == (indices, vocab_size, width)
    assert model["parity"]["providers"]["CPUExecutionProvider"]["outputs"]["embeddings"]["cases"]


def test_every_output_has_a_description(tmp_path: Path) -> None:
    stored = ("gpt", "bert", "llama", "rotary", "t5", "alibi", "sinusoid", "vit", "levels", "projected")
    with serve(make_repository(tmp_path, **{name: name for name in stored})) as server:
        shown = {name: httpx.get(f"{server.address}/models/{name}").json() for name in stored}
        metadata = {name: httpx.get(f"{server.address}/v2/models/{name}").json() for name in stored}
    for name in stored:
        outputs = {tensor["name"]: tensor["shape"][-1] for tensor in metadata[name]["outputs"]}
        assert shown[name]["outputs"].keys() == outputs.keys(), name
        for output, told in shown[name]["outputs"].items():
            assert told["description"].endswith(".")
            assert told["width"] in (None, outputs[output])
    assert "Do not pass them as inputs_embeds" in shown["gpt"]["outputs"]["embeddings"]["description"]
    assert "Pass them as inputs_embeds" in shown["gpt"]["outputs"]["token_embeddings"]["description"]
    assert "They equal token_embeddings" in shown["llama"]["outputs"]["embeddings"]["description"]


def test_response_names_the_use_of_its_outputs(tiny_http: httpx.Client) -> None:
    uses = {"embeddings": "input of block 0", "token_embeddings": "inputs_embeds or prompt_embeds of a model"}
    fields: dict[str, Any] = {"input_ids": [1]}
    for output, use in uses.items():
        assert tiny_http.post("/models/gpt/embed", json=fields | {"output": output}).json()["use_as"] == use
    both = fields | {"output": [*uses]}
    outputs = tiny_http.post("/models/gpt/embed", json=both).json()["outputs"]
    assert {name: told["use_as"] for name, told in outputs.items()} == uses
    answer = tiny_http.post("/models/gpt/embed", json=both, headers={"Accept": "application/x-safetensors"}).content
    header = json.loads(answer[8 : 8 + int.from_bytes(answer[:8], "little")])["__metadata__"]
    assert {name: header[f"use_as.{name}"] for name in uses} == uses


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("nope", "model: got nope, expected bert, gpt"),
        ("bert/versions/3", "version: got 3, expected 1, 2"),
        ("bert/versions/0", "version: got 0, expected 1, 2"),
        ("bert/versions/x", "version: got x, expected 1, 2"),
    ],
)
def test_unknown_model_or_version_is_404_problem(tiny_http: httpx.Client, path: str, detail: str) -> None:
    response = tiny_http.get(f"/models/{path}")
    assert response.status_code == 404
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.json()["detail"] == f"{detail}; {LOADING_HINT}"
