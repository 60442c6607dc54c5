"""`GET /models` on a real server. Oracle: the files of the artifacts."""

import hashlib
import json
from pathlib import Path

import httpx
import pytest

from preblock.service.artifacts.manifest import MANIFEST, PARITY


def test_models_lists_the_highest_version_of_each(tiny: httpx.Client) -> None:
    listed = tiny.get("/models").json()
    assert [(model["name"], model["version"], model["versions"]) for model in listed] == [
        ("bert", 2, [1, 2]),
        ("gpt", 1, [1]),
    ]


@pytest.mark.parametrize(("path", "folder"), [("bert", "bert/2"), ("bert/versions/1", "bert/1"), ("gpt", "gpt/1")])
def test_a_model_shows_its_manifest_and_parity_as_stored(
    tiny: httpx.Client, tiny_repository: Path, path: str, folder: str
) -> None:
    model = tiny.get(f"/models/{path}").json()
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
def test_a_model_shows_its_limits_and_where_it_runs(
    http: httpx.Client, name: str, max_len: int, indices: dict[str, int], vocab_size: int, width: int
) -> None:
    model = http.get(f"/models/{name}").json()
    assert (model["max_len"], model["max_tokens"]) == (max_len, 65536)
    assert model["provider"] == "CPUExecutionProvider"
    manifest = model["manifest"]
    assert (manifest["indices"], manifest["vocab_size"], manifest["width"]) == (indices, vocab_size, width)
    assert model["parity"]["providers"]["CPUExecutionProvider"]["outputs"]["embeddings"]["cases"]


def test_a_model_is_listed_as_it_is_shown(tiny: httpx.Client) -> None:
    assert tiny.get("/models").json() == [tiny.get("/models/bert").json(), tiny.get("/models/gpt").json()]


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("nope", "model: got nope, expected bert, gpt"),
        ("bert/versions/3", "version: got 3, expected 1, 2"),
        ("bert/versions/0", "version: got 0, expected 1, 2"),
        ("bert/versions/x", "version: got x, expected 1, 2"),
    ],
)
def test_an_unknown_model_or_version_is_a_problem(tiny: httpx.Client, path: str, detail: str) -> None:
    response = tiny.get(f"/models/{path}")
    assert response.status_code == 404
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.json()["detail"] == detail
