"""Special tokens inside of texts, in every protocol. Oracles: transformers with `split_special_tokens`, tokenizers."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from websockets.sync.client import connect

from preblock.client import Client
from preblock.client.errors import ServiceError
from tests.support.late import transformers
from tests.support.open_inference import open_stub
from tests.support.servers import Server
from tests.support.shared import Shared
from tests.support.static_models import load_wordllama

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


@pytest.mark.parametrize("special", [True, False])
def test_plain_text_equals_transformers(model_server: Server, ids: list[list[int]], special: bool) -> None:
    with Client(model_server.address) as client:
        options: dict[str, Any] = {"special_tokens_in_text": "plain", "special_tokens": special, "return_tokens": True}
        found = client.text(TEXTS, model="minilm", **options).input_ids
        allowed = client.text(TEXTS, model="minilm", return_tokens=True).input_ids
        with pytest.raises(ServiceError, match=r"got the token \[SEP\]") as refused:
            client.text(TEXTS, model="minilm", special_tokens_in_text="refuse", special_tokens=special)
        with pytest.raises(ServiceError, match="special_tokens_in_text: got all, expected allow, refuse, plain"):
            client.text(TEXTS, model="minilm", special_tokens_in_text="all")  # type: ignore[arg-type]
        assert client.text(TEXTS[:1], model="minilm", special_tokens_in_text="refuse").lengths.tolist() == [4]
    assert found is not None
    assert allowed is not None
    assert [row.tolist() for row in found] == (ids if special else [row[1:-1] for row in ids])
    assert allowed[1].tolist() == [101, 2203, 102, 2085, 102]
    error = refused.value
    assert (error.field, error.bad_indices, error.status) == ("text[1]", BAD, 422)


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[1]])
def test_openai_texts_may_be_plain(model_http: httpx.Client, ids: list[list[int]], texts: Any) -> None:
    request = {"model": "minilm", "pooling": "mean", "encoding_format": "base64"}
    rows = ids if texts is TEXTS else ids[1]
    expected = model_http.post("/v1/embeddings", json=request | {"input": rows}).json()["data"]
    for _ in range(3):  # later ones take the path of prepared requests
        found = model_http.post("/v1/embeddings", json=request | PLAIN | {"input": texts}).json()["data"]
        assert found == expected
        refused = model_http.post("/v1/embeddings", json=request | REFUSE | {"input": texts})
        assert "got the token [SEP]" in refused.json()["error"]["message"]
        assert model_http.post("/v1/embeddings", json=request | REFUSE | {"input": "words"}).status_code == 200


def test_open_inference_texts_may_be_plain(model_server: Server, model_http: httpx.Client, ids: Any) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [4], "data": TEXTS}
    body = {"inputs": [tensor], "outputs": [{"name": "input_ids"}, {"name": "embeddings"}]}
    path = "/v2/models/minilm/infer"
    answer = model_http.post(path, json=body | {"parameters": PLAIN}).json()
    assert answer["outputs"][0]["data"] == [*chain(*ids)]
    refused = model_http.post(path, json=body | {"parameters": REFUSE})
    assert (refused.status_code, refused.json()["error"].startswith(REFUSED)) == (400, True)
    message = service_pb2.ModelInferRequest(model_name="minilm")
    message.inputs.add(name="text", datatype="BYTES", shape=[4]).contents.bytes_contents.extend(
        text.encode() for text in TEXTS
    )
    message.parameters["special_tokens_in_text"].string_param = "refuse"
    with open_stub(model_server.grpc) as stub:
        with pytest.raises(grpc.RpcError) as failed:
            stub.ModelInfer(message)
        assert str(failed.value.details()).startswith(REFUSED)
        message.parameters["special_tokens_in_text"].string_param = "plain"
        message.outputs.add(name="input_ids")
        message.outputs.add(name="embeddings")
        found = stub.ModelInfer(message).raw_output_contents[0]
    assert np.frombuffer(found, np.int64).tolist() == [*chain(*ids)]


def test_parts_and_streams_may_have_plain_texts(model_server: Server, model_http: httpx.Client, ids: Any) -> None:
    parts = [[{"text": text}] for text in TEXTS]
    rows = [row[1:-1] for row in ids]
    expected = model_http.post("/models/minilm/embed", json={"input_ids": rows}).json()["embeddings"]
    found = model_http.post("/models/minilm/embed", json={"parts": parts} | PLAIN).json()
    assert found["embeddings"] == expected
    refused = model_http.post("/models/minilm/embed", json={"parts": parts} | REFUSE).json()
    assert (refused["field"], refused["bad_indices"]) == ("parts[1][0].text", BAD)
    address = model_server.address.replace("http", "ws", 1)
    for option, message in (("plain", None), ("refuse", "parts[1][0].text: got the token [SEP]")):
        with connect(f"{address}/models/minilm/decode?rows=4&special_tokens_in_text={option}") as stream:
            stream.send(json.dumps({"parts": parts}))
            answer = json.loads(stream.recv())
        assert (answer["embeddings"] == expected) if message is None else message in answer["error"]["detail"]


def test_tei_texts_may_be_plain(static_repository: Path, shared: Shared) -> None:
    server = shared.server("static", static_repository, "--tei", "plain")
    texts = ["a b", "end </s> of <s>"]

    def ask(option: str) -> httpx.Response:
        body = {"inputs": texts, "special_tokens_in_text": option}
        return httpx.post(f"{server.address}/tei/wordllama/embed", json=body)

    refused = ask("refuse").json()
    assert refused["error"].startswith("inputs[1]: got the token </s> (id 2), expected text without special tokens")
    assert refused["bad_indices"] == [1]
    library = load_wordllama()
    library.tokenizer.encode_special_tokens = True
    rows = [library.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    library.tokenizer.encode_special_tokens = False
    expected = httpx.post(f"{server.address}/tei/wordllama/embed", json={"inputs": rows}).json()
    assert ask("plain").json() == expected
    assert ask("allow").json() != expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/models/minilm/embed", {"input_ids": [1]}),
        ("/models/minilm/embed", {"text": "a", "special_tokens_in_text": 5}),
        ("/v1/embeddings", {"model": "minilm", "pooling": "mean", "input": [1]}),
        ("/tei/minilm/embed_all", {"inputs": [[1]]}),
        (
            "/v2/models/minilm/infer",
            {
                "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}],
                "parameters": {"special_tokens_in_text": "plain"},
            },
        ),
    ],
)
def test_choice_without_text_is_refused(model_http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = model_http.post(path, json=body if "parameters" in body else PLAIN | body)
    assert answer.status_code in (400, 422)
    assert "special_tokens_in_text: got " in answer.text
