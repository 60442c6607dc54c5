"""text-embeddings-inference, with huggingface_hub as its client. Oracles: model2vec, tokenizers, NumPy."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from model2vec import StaticModel
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.service.api.conftest import Keyed
from tests.support.protocols import ITEM_FIELDS
from tests.support.servers import Server
from tests.support.shared import Shared
from tests.support.static_models import WIDTH, make_table, make_tokenizer

TEXTS = ["hello world", "abc jih", "a", "hello hello b", "cab fed"]


@pytest.fixture(scope="module")
def static_server(static_repository: Path, shared: Shared) -> Server:
    return shared.server("static", static_repository, "--tei", "plain")


def client(server: Server, model: str, action: str = "") -> InferenceClient:
    return InferenceClient(f"{server.address}/tei/{model}{action}")


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    normalized: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalized


def close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    return found.dtype == np.float32 and found.shape == expected.shape and bool(np.abs(found - expected).max() < 1e-6)


def test_embeddings_equal_model2vec(static_server: Server, static_sources: Path) -> None:
    for name, action in (("mapped", ""), ("mapped", "/embed"), ("plain", "")):
        library, remote = StaticModel.from_pretrained(static_sources / name), client(static_server, name, action)
        for normalize in (True, False):
            library.normalize = normalize
            found = remote.feature_extraction(TEXTS, normalize=None if normalize else False)
            assert close(found, library.encode(TEXTS)), (name, action)
    whole = client(static_server, "plain").feature_extraction(TEXTS, normalize=False)
    cut = client(static_server, "plain").feature_extraction(TEXTS, dimensions=3)  # before the normalization
    assert close(cut, unit(whole[:, :3]))


def test_texts_and_ids_have_a_row_each(static_server: Server) -> None:
    one = client(static_server, "bag").feature_extraction("hello world")
    assert np.array_equal(one, client(static_server, "bag:1").feature_extraction(["hello world"]))
    assert one.shape == (1, WIDTH)
    url = f"{static_server.address}/tei/bag/embed"
    rows = httpx.post(url, json={"inputs": [[24, 25], [4]]}).json()
    for inputs in ([24, 25], "hello world"):
        assert httpx.post(url, json={"inputs": inputs}).json()[0] == rows[0]


def test_long_text_is_cut_only_on_request(static_server: Server) -> None:
    letters, remote = [*"abcdefghij"], client(static_server, "mapped")  # two more than the limit of the model
    with pytest.raises(HfHubHTTPError, match="422"):
        remote.feature_extraction(" ".join(letters))
    for direction in (None, "left", "right", "Left", "Right"):
        options: dict[str, Any] = {"truncate": True, "truncation_direction": direction}
        kept = letters[2:] if direction in ("left", "Left") else letters[:8]
        found = remote.feature_extraction(" ".join(letters), **options)
        assert np.array_equal(found, remote.feature_extraction(" ".join(kept))), direction


BAD: list[tuple[str, Any, int, str]] = [
    ("bag", {"inputs": []}, 400, "inputs: "),
    ("bag", {"inputs": ""}, 400, "inputs: "),
    ("bag", {"inputs": ["a", ""]}, 422, "inputs[1]: "),
    ("bag", {}, 422, "inputs is required"),
    *(("bag", {"inputs": [number]}, 422, "inputs[0]: ") for number in (1.5, 99)),
    ("mapped", {"inputs": ["a " * 10], "truncate": False}, 422, "inputs[0]: got 0 + 10 = 10, expected at most 8"),
    ("bag", {"inputs": "a", "truncation_direction": "up"}, 422, "truncation_direction: got up, expected Left, Right"),
    ("bag", {"inputs": "a", "dimensions": 9}, 422, "dimensions: got 9, expected 1 to 8"),
    ("bag", {"inputs": "a", "prompt_name": "query"}, 422, "prompt_name: got query, expected nothing"),
    ("bag", {"inputs": "a", "truncation": True}, 422, "unknown field truncation; did you mean truncate?"),
    ("mapped", {"inputs": "!"}, 422, "inputs[0]: "),
    ("bert", {"inputs": "a"}, 422, "model bert has no sentence embeddings"),
    ("nope", {"inputs": "a"}, 404, "model: got nope, expected bag, bert, mapped, plain"),
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


def test_unknown_fields_are_ignored_and_listed(static_server: Server) -> None:
    """Clients of other servers send `options`; a name from a client cannot add a header."""
    url, body = f"{static_server.address}/tei/bag/embed", {"inputs": "hello"}
    ignored = {"options": {"wait_for_model": True}, "encoding_format": "base64", "a\r\nX-B: é": 1}
    answer = httpx.post(url, json=body | ignored)
    assert answer.json() == httpx.post(url, json=body).json()
    assert answer.headers["Preblock-Ignored"] == "options, encoding_format, a%0D%0AX-B%3A%20%C3%A9"
    many = {f"{number}".rjust(70, "é"): number for number in range(33)}
    refused = httpx.post(url, json=body | many)
    assert (refused.status_code, refused.json()["error"]) == (422, "field: got 33 unknown fields, expected at most 32")
    del many[next(iter(many))]
    assert len(httpx.post(url, json=body | many).headers["Preblock-Ignored"]) == 1024
    assert "Preblock-Ignored" not in httpx.post(url, json=body).headers


def test_root_answers_for_the_named_model(static_server: Server) -> None:
    with httpx.Client(base_url=static_server.address) as http:
        for path in ("/embed", "/", "/embed_all", "/tokenize"):
            found = http.post(path, json={"inputs": TEXTS})
            assert found.status_code == 200
            assert found.json() == http.post(f"/tei/plain{path}".rstrip("/"), json={"inputs": TEXTS}).json()
        assert http.get("/info").json()["model_id"] == "plain"
        assert http.post("/", content=b"{").json()["error_type"] == "Validation"
    assert InferenceClient(base_url=static_server.address).feature_extraction("a").shape == (1, WIDTH)


def test_root_without_a_name_needs_one_candidate(model_server: Server) -> None:
    with httpx.Client(base_url=model_server.address) as http:
        assert http.post("/", json={"inputs": "a"}).json() == http.post("/tei/wordllama", json={"inputs": "a"}).json()
        info = http.get("/info").json()
        assert (info["model_id"], info["model_type"]) == ("wordllama", {"embedding": {"pooling": "mean"}})
        refused = http.post("/embed_all", json={"inputs": "a"})
        message = "/embed_all: minilm, wordllama can answer; start the server with --tei MODEL"
        message += ", or send to /tei/MODEL/embed_all"
        assert (refused.status_code, refused.json()) == (422, {"error": message, "error_type": "Validation"})
        assert http.get("/").json()["name"] == "preblock"
        assert http.get("/", headers={"Accept": "text/html"}).headers["Location"] == "/inspect"


def test_embed_all_returns_each_token_of_each_text(static_server: Server, model_server: Server) -> None:
    rows = httpx.post(f"{static_server.address}/tei/plain/embed_all", json={"inputs": TEXTS}).json()
    ids = [encoding.ids for encoding in make_tokenizer().encode_batch(TEXTS, add_special_tokens=False)]
    for row, expected in zip(rows, ids, strict=True):
        assert np.array_equal(np.array(row, np.float32), make_table()[expected])
    texts = ["Hello, naïve 東京", "a"] * 100  # with numbers as text while they are sent
    many = httpx.post(f"{model_server.address}/tei/minilm/embed_all", json={"inputs": texts}).json()
    native = {"text": texts[0], "encoding": "float"}
    (one,) = httpx.post(f"{model_server.address}/models/minilm/embed", json=native).json()["embeddings"]
    assert (len(many), many[198]) == (200, one)
    assert len(many[199]) == 3
    cut = {"inputs": "a " * 600, "truncate": True, "truncation_direction": "Left"}
    (cut_row,) = httpx.post(f"{model_server.address}/tei/minilm/embed_all", json=cut).json()
    assert len(cut_row) == 512


def test_tokenize_returns_the_tokens_of_the_tokenizer(model_server: Server, model_repository: Path) -> None:
    text = "Hello, naïve 東京! 👩\u200d👧"
    library = Tokenizer.from_file(str(model_repository / "minilm/1/tokenizer.json"))
    library.no_padding()  # the file has both, and the service cuts and pads nothing
    library.no_truncation()
    url = f"{model_server.address}/tei/minilm/tokenize"
    for special in (True, False):
        expected = library.encode(text, add_special_tokens=special)
        (found,) = httpx.post(url, json={"inputs": text, "add_special_tokens": special}).json()
        assert [token["id"] for token in found] == expected.ids
        assert [token["special"] for token in found] == [mark == 1 for mark in expected.special_tokens_mask]
        inner = slice(1, -1) if special else slice(None)
        assert [(token["start"], token["stop"]) for token in found[inner]] == expected.offsets[inner]
        assert all(token["text"] == text[token["start"] : token["stop"]] for token in found[inner])
    two = httpx.post(url, json={"inputs": ["a", "b c"]}).json()
    assert [[token["text"] for token in row] for row in two] == [["[CLS]", "a", "[SEP]"], ["[CLS]", "b", "c", "[SEP]"]]
    for model, inputs in (("minilm", [1, 2]), ("gpt2-small", "a")):
        refused = httpx.post(f"{model_server.address}/tei/{model}/tokenize", json={"inputs": inputs})
        assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")


def test_root_knows_only_the_models_of_a_key(keyed: Keyed) -> None:
    body = {"inputs": "a"}
    for path in ("/", "/embed", "/tokenize"):
        assert httpx.post(f"{keyed.address}{path}", json=body).json().keys() == {"error", "error_type"}
        assert httpx.post(f"{keyed.address}{path}", json=body).status_code == 401
    answer = httpx.post(f"{keyed.address}/tokenize", json=body, headers=keyed.headers)  # `bert` has a tokenizer
    assert (answer.status_code, "no served model" in answer.json()["error"]) == (404, True)
    for headers, status in (({}, 401), (keyed.headers, 403)):
        answer = httpx.post(f"{keyed.address}/tei/bert/embed", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error_type"]) == (status, "Validation")
    assert httpx.get(keyed.address).headers["Content-Type"] == "application/problem+json"
