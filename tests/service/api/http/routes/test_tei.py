"""`/embed` of text-embeddings-inference, with huggingface_hub as its client. Oracles: model2vec, wordllama, NumPy."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from model2vec import StaticModel
from numpy.typing import NDArray

from tests.service.api.conftest import Keyed
from tests.support.protocols import ITEM_FIELDS
from tests.support.servers import Server
from tests.support.shared import Shared
from tests.support.static_models import WIDTH, load_wordllama

TEXTS = ["hello world", "abc jih", "a", "hello hello b", "cab fed"]


@pytest.fixture(scope="module")
def static_server(static_repository: Path, shared: Shared) -> Server:
    return shared.server("static", static_repository)


def client(server: Server, model: str, action: str = "") -> InferenceClient:
    return InferenceClient(f"{server.address}/tei/{model}{action}")


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    normalized: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalized


def close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    return found.dtype == np.float32 and found.shape == expected.shape and bool(np.abs(found - expected).max() < 1e-6)


@pytest.mark.parametrize("name", ["mapped", "plain"])
@pytest.mark.parametrize("action", ["", "/embed"])
def test_embeddings_equal_model2vec(static_server: Server, static_sources: Path, name: str, action: str) -> None:
    model = StaticModel.from_pretrained(static_sources / name)
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


BAD: list[tuple[str, Any, int, str]] = [
    ("bag", {"inputs": []}, 400, "inputs: "),
    ("bag", {"inputs": ""}, 400, "inputs: "),
    ("bag", {"inputs": ["a", ""]}, 422, "inputs[1]: "),
    ("bag", {}, 422, "inputs is required"),
    ("bag", {"inputs": 5}, 422, "inputs: "),
    *(("bag", {"inputs": [number]}, 422, "inputs[0]: ") for number in (1.5, 99)),
    ("bag", {"inputs": "a", "truncate": "yes"}, 422, "truncate: "),
    ("bag", {"inputs": "a", "truncation_direction": "up"}, 422, "truncation_direction: "),
    ("bag", {"inputs": "a", "normalize": 1}, 422, "normalize: "),
    ("bag", {"inputs": "a", "dimensions": 9}, 422, "dimensions: got 9, expected 1 to 8"),
    ("bag", {"inputs": "a", "prompt_name": "query"}, 422, "unknown field prompt_name"),
    ("mapped", {"inputs": "!"}, 422, "inputs[0]: "),
    ("bert", {"inputs": "a"}, 422, "model bert has no sentence embeddings"),
    ("nope", {"inputs": "a"}, 404, "model: got nope, expected bag, bert, mapped, plain"),
    ("bag:7", {"inputs": "a"}, 404, "version: "),
]


def test_bad_request_is_rejected(static_server: Server) -> None:
    for model, body, status, message in BAD:
        answer = httpx.post(f"{static_server.address}/tei/{model}/embed", json=body)
        kind = "Empty" if status == 400 else "Validation"
        assert (answer.status_code, answer.json()["error_type"]) == (status, kind), answer.text
        assert answer.json().keys() - ITEM_FIELDS == {"error", "error_type"}
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


def test_key_opens_only_its_models(keyed: Keyed) -> None:
    for headers, status in (({}, 401), (keyed.headers, 403)):
        answer = httpx.post(f"{keyed.address}/tei/bert/embed", json={"inputs": "a"}, headers=headers)
        assert (answer.status_code, answer.json()["error_type"]) == (status, "Validation")
