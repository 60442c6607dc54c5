"""`/embed` of text-embeddings-inference, with huggingface_hub as its client. Oracles: model2vec, wordllama, NumPy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from model2vec import StaticModel
from numpy.typing import NDArray

from preblock.service.core.auth import new_key
from tests.support.artifacts import copy_artifact
from tests.support.late import exporter
from tests.support.servers import Server, serve
from tests.support.static_models import WIDTH, load_wordllama, save_bag, save_mapped, save_plain

TEXTS = ["hello world", "abc jih", "a", "hello hello b", "cab fed"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("static")
    found = {"mapped": save_mapped(root / "mapped"), "plain": save_plain(root / "plain", normalize=False)}
    return found | {"bag": save_bag(root / "bag")}


@pytest.fixture(scope="module")
def static_server(
    sources: dict[str, Path], model_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("repository")
    for name, source in sources.items():
        exporter.export(str(source), name, root)
    copy_artifact("bert", root)
    (root / "wordllama").mkdir()
    (root / "wordllama/1").symlink_to(model_repository / "wordllama/1")
    with serve(root) as running:
        yield running


def client(server: Server, model: str, action: str = "") -> InferenceClient:
    return InferenceClient(f"{server.address}/tei/{model}{action}")


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    normalized: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalized


def close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    return found.dtype == np.float32 and found.shape == expected.shape and bool(np.abs(found - expected).max() < 1e-6)


@pytest.mark.parametrize("name", ["mapped", "plain"])
@pytest.mark.parametrize("action", ["", "/embed"])
def test_embeddings_equal_model2vec(static_server: Server, sources: dict[str, Path], name: str, action: str) -> None:
    model = StaticModel.from_pretrained(sources[name])
    model.normalize = True
    found = client(static_server, name, action).feature_extraction(TEXTS)
    assert close(found, model.encode(TEXTS))
    model.normalize = False
    assert close(client(static_server, name, action).feature_extraction(TEXTS, normalize=False), model.encode(TEXTS))


def test_embeddings_equal_wordllama(static_server: Server) -> None:
    texts, library = ["Hello, world!", "naïve 東京"], load_wordllama()
    assert close(client(static_server, "wordllama").feature_extraction(texts), library.embed(texts, norm=True))
    assert close(client(static_server, "wordllama").feature_extraction(texts, normalize=False), library.embed(texts))


def test_one_text_has_one_row(static_server: Server) -> None:
    one = client(static_server, "bag").feature_extraction("hello world")
    assert np.array_equal(one, client(static_server, "bag:1").feature_extraction(["hello world"]))
    assert one.shape == (1, WIDTH)


def test_dimensions_are_cut_before_normalization(static_server: Server) -> None:
    whole = client(static_server, "plain").feature_extraction(TEXTS, normalize=False)
    found = client(static_server, "plain").feature_extraction(TEXTS, dimensions=3)
    assert close(found, unit(whole[:, :3]))


def test_ids_stand_for_texts(static_server: Server) -> None:
    url = f"{static_server.address}/tei/bag/embed"
    rows = httpx.post(url, json={"inputs": [[24, 25], [4]]}).json()
    assert rows[0] == httpx.post(url, json={"inputs": [24, 25]}).json()[0]
    assert rows[0] == httpx.post(url, json={"inputs": "hello world"}).json()[0]


@pytest.mark.parametrize("direction", [None, "left", "right"])
def test_long_text_is_cut_only_on_request(static_server: Server, direction: Any) -> None:
    letters = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]  # two more than the limit of the model
    with pytest.raises(HfHubHTTPError, match="422"):
        client(static_server, "mapped").feature_extraction(" ".join(letters))
    refused = httpx.post(
        f"{static_server.address}/tei/mapped/embed", json={"inputs": [" ".join(letters)], "truncate": False}
    )
    assert refused.status_code == 422
    assert refused.json()["error_type"] == "Validation"
    assert refused.json()["error"].startswith("inputs[0]: got 0 + 10 = 10, expected at most 8")
    found = client(static_server, "mapped").feature_extraction(
        " ".join(letters), truncate=True, truncation_direction=direction
    )
    kept = letters[2:] if direction == "left" else letters[:8]
    assert np.array_equal(found, client(static_server, "mapped").feature_extraction(" ".join(kept)))


def test_large_batch_equals_single_requests(static_server: Server) -> None:
    texts = TEXTS * 3000
    found = client(static_server, "bag").feature_extraction(texts)
    assert found.shape == (len(texts), WIDTH)
    assert np.array_equal(found[: len(TEXTS)], client(static_server, "bag").feature_extraction(TEXTS))
    assert np.array_equal(found[-1:], client(static_server, "bag").feature_extraction(TEXTS[-1]))


BAD: list[tuple[str, Any, int, str, str]] = [
    ("bag", {"inputs": []}, 400, "Empty", "inputs: got [], expected at least one text of at least one character"),
    ("bag", {"inputs": ""}, 400, "Empty", "inputs: got '', expected at least one text"),
    ("bag", {"inputs": ["a", ""]}, 422, "Validation", "inputs[1]: got '', expected a text of at least one character"),
    ("bag", {}, 422, "Validation", "inputs is required: a string, a list of strings"),
    ("bag", {"inputs": 5}, 422, "Validation", "inputs: got 5, expected a string, a list of strings"),
    ("bag", {"inputs": [1.5]}, 422, "Validation", "inputs[0]: got 1.5, expected a 64-bit integer"),
    ("bag", {"inputs": [99]}, 422, "Validation", "inputs[0]: got 99, expected 0 to 25"),
    ("bag", {"inputs": "a", "truncate": "yes"}, 422, "Validation", "truncate: got yes, expected true or false"),
    ("bag", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation", "truncation_direction: got up, expected"),
    ("bag", {"inputs": "a", "normalize": 1}, 422, "Validation", "normalize: got 1, expected true or false"),
    ("bag", {"inputs": "a", "dimensions": 9}, 422, "Validation", "dimensions: got 9, expected 1 to 8, or nothing"),
    ("bag", {"inputs": "a", "prompt_name": "query"}, 422, "Validation", "unknown field prompt_name; expected inputs"),
    ("mapped", {"inputs": "!"}, 422, "Validation", "inputs[0]: got no known token, expected at least one"),
    ("bert", {"inputs": "a"}, 422, "Validation", "model bert has no sentence embeddings: its vectors enter block 0"),
    ("nope", {"inputs": "a"}, 404, "Validation", "model: got nope, expected bag, bert, mapped, plain"),
    ("bag:7", {"inputs": "a"}, 404, "Validation", "version: got 7, expected 1"),
]


@pytest.mark.parametrize(("model", "body", "status", "kind", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_request_is_rejected(
    static_server: Server, model: str, body: Any, status: int, kind: str, message: str
) -> None:
    answer = httpx.post(f"{static_server.address}/tei/{model}/embed", json=body)
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind), answer.text
    assert answer.json().keys() == {"error", "error_type"}
    assert answer.json()["error"].startswith(message), answer.text


def test_other_bodies_and_methods_are_rejected(static_server: Server) -> None:
    url = f"{static_server.address}/tei/bag/embed"
    for answer, status in (
        (httpx.post(url, content=b"{"), 400),
        (httpx.post(url, content=b"x", headers={"Content-Type": "text/plain"}), 415),
        (httpx.get(url), 405),
        (httpx.post(f"{url}/more"), 404),
    ):
        assert answer.status_code == status
        assert answer.json()["error_type"] == "Validation"


def test_key_opens_only_its_models(sources: dict[str, Path], tmp_path: Path) -> None:
    exporter.export(str(sources["bag"]), "bag", tmp_path / "repository")
    key, entry = new_key("own", ("other",), False)
    (tmp_path / "keys.toml").write_text(entry)
    with serve(tmp_path / "repository", "--api-keys-file", str(tmp_path / "keys.toml")) as locked:
        url = f"{locked.address}/tei/bag/embed"
        answer = httpx.post(url, json={"inputs": "a"})
        assert (answer.status_code, answer.json()["error_type"]) == (401, "Validation")
        answer = httpx.post(url, json={"inputs": "a"}, headers={"Authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.json()["error_type"]) == (403, "Validation")
