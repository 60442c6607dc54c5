"""Embeddings of the OpenAI API, through OpenAI's own client. Oracles: transformers, wordllama, and the native API."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import BertModel

from preblock.service.codecs.chunks import CHUNK_BYTES
from tests.clients.openai_api.responses import IDS, MEAN, TEXTS, vectors_of
from tests.support.protocols import Clients, native_bytes
from tests.support.static_models import load_wordllama


def means(clients: Clients, model: str, rows: list[list[int]]) -> NDArray[np.float32]:
    """Return the mean of the native API's vectors, row by row."""
    found = [native_bytes(clients, model, {"input_ids": [row]}) for row in rows]
    return np.stack([vectors.astype(np.float64).sum(0) / len(vectors) for vectors in found]).astype(np.float32)


def test_text_embeddings_are_means_of_token_vectors(
    openai_client: openai.OpenAI, model_clients: Clients, minilm_tokenizer: Any
) -> None:
    response = openai_client.embeddings.create(model="minilm", input=TEXTS, extra_body=MEAN)
    rows = minilm_tokenizer(TEXTS, truncation=False)["input_ids"]
    assert vectors_of(response).tobytes() == means(model_clients, "minilm", rows).tobytes()
    assert (response.object, response.model) == ("list", "minilm")
    assert response.usage.prompt_tokens == response.usage.total_tokens == sum(map(len, rows))


def test_text_embedding_matches_mean_of_transformers(
    openai_client: openai.OpenAI, minilm_tokenizer: Any, minilm_checkpoint: Path
) -> None:
    bert: Any = BertModel.from_pretrained(minilm_checkpoint, add_pooling_layer=False)
    with torch.inference_mode():
        oracle = bert.eval().embeddings(minilm_tokenizer(TEXTS[0], return_tensors="pt")["input_ids"])[0].mean(0).numpy()
    assert (
        np.abs(
            vectors_of(openai_client.embeddings.create(model="minilm", input=TEXTS[0], extra_body=MEAN))[0] - oracle
        ).max()
        <= 2e-6
    )


SENTENCES = [*TEXTS, "A <s> marker </s> inside", "  two  spaces\n", "x", "naïve 東京 🙂", "word " * 3000]
"""Also with special tokens in the text, bytes without a token, and more tokens than most models take."""


def test_sentence_embeddings_match_wordllama(openai_client: openai.OpenAI) -> None:
    library = load_wordllama()
    response = openai_client.embeddings.create(model="wordllama", input=SENTENCES)
    np.testing.assert_allclose(vectors_of(response), library.embed(SENTENCES, norm=True), rtol=1e-4, atol=2e-6)
    counted = sum(sum(encoding.attention_mask) for encoding in library.tokenize(SENTENCES))
    assert response.usage.prompt_tokens == counted
    short = vectors_of(openai_client.embeddings.create(model="wordllama", input=SENTENCES, dimensions=64))
    cut = library.embed(SENTENCES)[:, :64]
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-4, atol=2e-6)


def test_sentence_embeddings_rank_texts_by_meaning(openai_client: openai.OpenAI) -> None:
    texts = ["the cat sat on the mat", "a kitten rests on a rug", "interest rates rose again"]
    query, near, far = vectors_of(openai_client.embeddings.create(model="wordllama", input=texts))
    assert query @ near > query @ far + 0.2


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_encoding_formats_match_default_bit_for_bit(openai_client: openai.OpenAI, encoding: Any) -> None:
    default = vectors_of(openai_client.embeddings.create(model="minilm", input=TEXTS, extra_body=MEAN))
    asked = openai_client.embeddings.create(model="minilm", input=TEXTS, encoding_format=encoding, extra_body=MEAN)
    if encoding == "base64":  # the client decodes it only where nobody asked for it
        for item in asked.data:
            item.embedding = np.frombuffer(base64.b64decode(str(item.embedding)), "<f4").tolist()
    assert vectors_of(asked).tobytes() == default.tobytes()


def test_response_without_encoding_format_holds_floats(tiny_http: httpx.Client) -> None:
    answer = tiny_http.post("/v1/embeddings", json={"model": "gpt", "input": [1, 2], **MEAN}).json()
    assert [type(value) for value in answer["data"][0]["embedding"]] == [float] * 4
    assert answer["version"] == 1


def test_embeddings_accept_ids_and_lists_of_ids(openai_client: openai.OpenAI, model_clients: Clients) -> None:
    for model in ("minilm", "gpt2-small"):
        rows = vectors_of(openai_client.embeddings.create(model=model, input=IDS, extra_body=MEAN))
        assert rows.tobytes() == means(model_clients, model, IDS).tobytes()
        one = openai_client.embeddings.create(model=model, input=IDS[1], extra_body=MEAN)
        assert vectors_of(one).tobytes() == rows[1].tobytes()
        assert one.usage.prompt_tokens == 5


def test_vector_is_independent_of_batch(openai_client: openai.OpenAI) -> None:
    together = vectors_of(openai_client.embeddings.create(model="minilm", input=TEXTS * 20, extra_body=MEAN))
    alone = [
        vectors_of(openai_client.embeddings.create(model="minilm", input=text, extra_body=MEAN))[0] for text in TEXTS
    ]
    assert together.tobytes() == np.stack(alone * 20).tobytes()


def test_unneeded_openai_parameters_are_accepted(openai_client: openai.OpenAI) -> None:
    plain = openai_client.embeddings.create(model="minilm", input=IDS, extra_body=MEAN)
    assert (
        openai_client.embeddings.create(model="minilm", input=IDS, dimensions=384, user="me", extra_body=MEAN).data
        == plain.data
    )


@pytest.mark.parametrize(("pooling", "index"), [("first", 0), ("last", -1)])
def test_pooling_first_or_last_returns_vector_of_one_token(
    openai_client: openai.OpenAI, model_clients: Clients, pooling: str, index: int
) -> None:
    response = openai_client.embeddings.create(model="minilm", input=IDS, extra_body={"pooling": pooling})
    expected = [native_bytes(model_clients, "minilm", {"input_ids": [row]})[index] for row in IDS]
    assert vectors_of(response).tobytes() == np.stack(expected).tobytes()


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_large_float_response_is_chunked_and_matches_base64(model_http: httpx.Client, pooling: str) -> None:
    rows = [row for number in range(1, 360) for row in ([number], [number, 2, 3], [7] * 4)]
    rows += [[*range(400)]]
    fields = {"model": "minilm", "input": rows, "pooling": pooling}
    texts = model_http.post("/v1/embeddings", json=fields | {"encoding_format": "float"})
    codes = model_http.post("/v1/embeddings", json=fields | {"encoding_format": "base64"}).json()["data"]
    assert texts.headers["Transfer-Encoding"] == "chunked"
    assert len(rows) * 384 * 4 > CHUNK_BYTES
    for text, code in zip(texts.json()["data"], codes, strict=True):
        assert np.array(text["embedding"], "<f4").tobytes() == base64.b64decode(code.pop("embedding"))
        assert text == code | {"embedding": text["embedding"]}


@pytest.mark.parametrize("rows", [IDS, [IDS[0]] * 2])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_pooling_none_returns_vector_per_token(
    model_http: httpx.Client, model_clients: Clients, rows: list[list[int]], encoding: str
) -> None:
    fields = {"model": "minilm", "input": rows, "pooling": "none", "encoding_format": encoding}
    answer = model_http.post("/v1/embeddings", json=fields).json()
    for row, item in zip(rows, answer["data"], strict=True):
        assert item["shape"] == [len(row), 384]
        data = item["embedding"]
        found = np.array(data, "<f4") if encoding == "float" else np.frombuffer(base64.b64decode(data), "<f4")
        assert found.tobytes() == native_bytes(model_clients, "minilm", {"input_ids": [row]}).tobytes()
        assert encoding == "base64" or found.shape == (len(row), 384)


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_is_reported(openai_client: openai.OpenAI, minilm_tokenizer: Any, side: str) -> None:
    texts = ["one two three " * 200, "short"]
    response = openai_client.embeddings.create(model="minilm", input=texts, extra_body=MEAN | {"truncate": side})
    minilm_tokenizer.truncation_side = side
    rows = minilm_tokenizer(texts, truncation=True, max_length=512)["input_ids"]
    assert response.model_extra == {"version": 1, "truncated": [602 - 512, 0]}
    assert (
        vectors_of(response).tobytes()
        == vectors_of(openai_client.embeddings.create(model="minilm", input=rows, extra_body=MEAN)).tobytes()
    )
    assert response.usage.prompt_tokens == sum(map(len, rows))


@pytest.mark.parametrize("field", ["truncate", "truncation_side"])
@pytest.mark.parametrize(("side", "most"), [("right", 5), ("left", 5), (None, 5), (None, -1), ("left", -1)])
def test_truncate_prompt_tokens_matches_vllm(
    openai_client: openai.OpenAI, minilm_tokenizer: Any, side: str | None, most: int, field: str
) -> None:
    """vLLM passes the field to the tokenizer of transformers as `max_length`; embeddings are cut on the right."""
    texts = ["one two three " * 200, "short"]
    extra = MEAN | {"truncate_prompt_tokens": most} | ({field: side} if side else {})
    response = openai_client.embeddings.create(model="minilm", input=texts, extra_body=extra)
    minilm_tokenizer.truncation_side = side or "right"
    rows = minilm_tokenizer(texts, truncation=True, max_length=512 if most == -1 else most)["input_ids"]
    assert (
        vectors_of(response).tobytes()
        == vectors_of(openai_client.embeddings.create(model="minilm", input=rows, extra_body=MEAN)).tobytes()
    )
    assert response.usage.prompt_tokens == sum(map(len, rows))


def test_fields_of_peers_are_ignored_and_listed(openai_client: openai.OpenAI) -> None:
    create, raw = openai_client.embeddings.create, openai_client.embeddings.with_raw_response.create
    plain = create(model="minilm", input=TEXTS, extra_body=MEAN)
    ignored: dict[str, Any] = {
        "input_type": "query",
        "priority": 1,
        "metadata": {"input": "another text"},
        "request_id": "mine",
        "cache_salt": "salt",
        "mm_processor_kwargs": {},
        "truncation_side": "left",
    }
    for _ in range(2):  # the first request could prepare the second
        found = raw(model="minilm", input=TEXTS, user="me", extra_body=MEAN | ignored | {"endianness": "little"})
        assert sorted(found.headers["preblock-ignored"].split(", ")) == sorted([*ignored, "user"])
        assert found.parse().data == plain.data
    assert "preblock-ignored" not in raw(model="minilm", input=TEXTS, extra_body=MEAN).headers


def test_use_activation_normalizes_as_in_vllm(openai_client: openai.OpenAI) -> None:
    found = {
        value: vectors_of(
            openai_client.embeddings.create(model="minilm", input=TEXTS, extra_body=MEAN | {"use_activation": value})
        )
        for value in (None, False, True)
    }
    assert found[None].tobytes() == found[False].tobytes()
    expected = found[None] / np.linalg.norm(found[None], axis=-1, keepdims=True)
    np.testing.assert_allclose(found[True], expected, rtol=1e-6)


def test_truncate_prompt_tokens_truncates_ids(openai_client: openai.OpenAI) -> None:
    found = {
        side: openai_client.embeddings.create(
            model="minilm", input=IDS, extra_body=MEAN | {"truncate_prompt_tokens": 2, "truncate": side}
        )
        for side in ("left", "right", None)
    }
    for side, rows in (("left", [row[-2:] for row in IDS]), ("right", [row[:2] for row in IDS])):
        assert found[side].data == openai_client.embeddings.create(model="minilm", input=rows, extra_body=MEAN).data
    assert found[None].data == found["right"].data


def test_add_special_tokens_false_matches_transformers(openai_client: openai.OpenAI, minilm_tokenizer: Any) -> None:
    response = openai_client.embeddings.create(
        model="minilm", input=TEXTS, extra_body=MEAN | {"add_special_tokens": False}
    )
    rows = minilm_tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    assert (
        vectors_of(response).tobytes()
        == vectors_of(openai_client.embeddings.create(model="minilm", input=rows, extra_body=MEAN)).tobytes()
    )
    ids = openai_client.embeddings.create(model="minilm", input=IDS, extra_body=MEAN | {"add_special_tokens": False})
    assert ids.data == openai_client.embeddings.create(model="minilm", input=IDS, extra_body=MEAN).data


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embed_dtype_applies_to_base64_only(openai_client: openai.OpenAI, dtype: str) -> None:
    whole = vectors_of(openai_client.embeddings.create(model="minilm", input=TEXTS, extra_body=MEAN))
    narrow = openai_client.embeddings.create(
        model="minilm", input=TEXTS, encoding_format="base64", extra_body=MEAN | {"embed_dtype": dtype}
    )
    for item, vector in zip(narrow.data, whole, strict=True):
        expected = torch.from_numpy(vector).to(getattr(torch, dtype)).view(torch.uint8).numpy()
        assert base64.b64decode(str(item.embedding)) == expected.tobytes()
    numbers = openai_client.embeddings.create(
        model="minilm", input=TEXTS, encoding_format="float", extra_body=MEAN | {"embed_dtype": dtype}
    )
    assert vectors_of(numbers).tobytes() == whole.tobytes()
