"""Special tokens inside of texts, in every protocol. Oracles: transformers with `split_special_tokens`, tokenizers."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.service.api.http.native_requests import post_json, told
from tests.service.api.http.routes.v2_calls import arrays_of, error_of, infer, outputs, tensor, texts
from tests.support.decode_protocols import open_stream
from tests.support.late import transformers
from tests.support.protocols import Clients
from tests.support.shared import Shared

TEXTS = ["plain words", "end [SEP] now", "[CLS] and [MASK]", "naïve [UNK] 東京"]
BAD = [1, 2, 3]
PLAIN, REFUSE = {"special_tokens_in_text": "plain"}, {"special_tokens_in_text": "refuse"}
REFUSED = "text[1]: got the token [SEP] (id 102), expected text without special tokens"


@pytest.fixture(scope="module")
def ids(minilm_checkpoint: Path) -> list[list[int]]:
    oracle: Any = transformers.AutoTokenizer.from_pretrained(minilm_checkpoint, split_special_tokens=True)
    rows: list[list[int]] = oracle(TEXTS)["input_ids"]
    assert rows != transformers.AutoTokenizer.from_pretrained(minilm_checkpoint)(TEXTS)["input_ids"]
    return rows


def test_plain_text_equals_transformers(model_http: httpx.Client, ids: list[list[int]]) -> None:
    for special in (True, False):
        options: dict[str, Any] = {"text": TEXTS, "special_tokens": special, "return_tokens": True}
        found = told(model_http, "minilm", **options, **PLAIN)["input_ids"]
        assert found == (ids if special else [row[1:-1] for row in ids])
        refused = post_json(model_http, "minilm", **options, **REFUSE).json()
        assert (refused["status"], refused["field"], refused["bad_indices"]) == (422, "text[1]", BAD)
    allowed = told(model_http, "minilm", text=TEXTS[1], return_tokens=True)["input_ids"]
    assert allowed == [[101, 2203, 102, 2085, 102]]
    assert told(model_http, "minilm", text=TEXTS[0], **REFUSE)["shape"][1] == 4


def test_openai_texts_may_be_plain(model_http: httpx.Client, ids: list[list[int]]) -> None:
    request = {"model": "minilm", "pooling": "mean", "encoding_format": "base64"}

    def ask(value: Any, **options: str) -> Any:
        return model_http.post("/v1/embeddings", json=request | options | {"input": value}).json()

    expected = ask(ids)["data"]
    for _ in range(3):  # later ones take the path of prepared requests
        assert ask(TEXTS, **PLAIN)["data"] == expected
        assert "got the token [SEP]" in ask(TEXTS, **REFUSE)["error"]["message"]
        assert len(ask("words", **REFUSE)["data"]) == 1


def test_open_inference_texts_may_be_plain(model_http: httpx.Client, ids: list[list[int]]) -> None:
    wanted = outputs("input_ids", "embeddings")
    answer = infer(model_http, texts(TEXTS), model="minilm", outputs=wanted, parameters=PLAIN)
    assert arrays_of(answer)["input_ids"].tolist() == [id_ for row in ids for id_ in row]
    refused = infer(model_http, texts(TEXTS), model="minilm", parameters=REFUSE)
    assert (refused.status_code, error_of(refused).startswith(REFUSED)) == (400, True)


def test_parts_and_streams_may_have_plain_texts(model_clients: Clients, ids: list[list[int]]) -> None:
    http, parts = model_clients.http, [[{"text": text}] for text in TEXTS]
    expected = told(http, "minilm", input_ids=[row[1:-1] for row in ids])["embeddings"]
    assert told(http, "minilm", parts=parts, **PLAIN)["embeddings"] == expected
    refused = post_json(http, "minilm", parts=parts, **REFUSE).json()
    assert (refused["field"], refused["bad_indices"]) == ("parts[1][0].text", BAD)
    with open_stream(model_clients, "minilm", {"offset": "[0,0,0,0]&special_tokens_in_text=plain"}) as stream:
        stream.send(json.dumps({"parts": parts}))
        assert json.loads(stream.recv())["embeddings"] == expected


def test_tei_texts_may_be_plain(static_repository: Path, shared: Shared) -> None:
    server = shared.server("static", static_repository, "--tei", "plain")
    given = ["a b", "end </s> of <s>"]

    def ask(inputs: Any, **options: str) -> Any:
        return httpx.post(f"{server.address}/tei/wordllama/embed", json={"inputs": inputs} | options).json()

    refused = ask(given, **REFUSE)
    assert refused["error"].startswith("inputs[1]: got the token </s> (id 2), expected text without special tokens")
    assert refused["bad_indices"] == [1]
    tokenizer = Tokenizer.from_file(str(static_repository / "wordllama/1/tokenizer.json"))
    tokenizer.encode_special_tokens = True
    rows = [tokenizer.encode(text, add_special_tokens=False).ids for text in given]
    assert ask(given, **PLAIN) == ask(rows) != ask(given, special_tokens_in_text="allow")


def test_choice_without_text_or_unknown_is_refused(model_http: httpx.Client) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/models/minilm/embed", {"input_ids": [1]}),
        ("/models/minilm/embed", {"text": "a", "special_tokens_in_text": "all"}),
        ("/v1/embeddings", {"model": "minilm", "pooling": "mean", "input": [1]}),
        ("/tei/minilm/embed_all", {"inputs": [[1]]}),
    ]
    for path, body in requests:
        answer = model_http.post(path, json=PLAIN | body)
        assert (answer.status_code in (400, 422), "special_tokens_in_text: got " in answer.text) == (True, True), body
    answer = infer(model_http, tensor(), model="minilm", parameters=PLAIN)
    assert error_of(answer).startswith("parameters.special_tokens_in_text: got ")
