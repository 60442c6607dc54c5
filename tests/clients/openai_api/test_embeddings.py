"""Embeddings of the OpenAI API, through OpenAI's own client. Oracles: transformers, wordllama, and the native API."""

import base64
from collections.abc import Callable
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

Create = Callable[..., openai.types.CreateEmbeddingResponse]


@pytest.fixture
def create(openai_client: openai.OpenAI) -> Create:
    """Ask `minilm`; keywords are further fields."""

    def ask(given: Any, encoding_format: Any = openai.NOT_GIVEN, **fields: Any) -> Any:
        return openai_client.embeddings.create(
            model="minilm", input=given, encoding_format=encoding_format, extra_body=MEAN | fields
        )

    return ask


def native(clients: Clients, model: str, row: list[int]) -> NDArray[np.float32]:
    return native_bytes(clients, model, {"input_ids": [row]})


def mean(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = (vectors.astype(np.float64).sum(0) / len(vectors)).astype(np.float32)
    return found


def test_text_embeddings_are_means_of_token_vectors(
    create: Create, model_clients: Clients, minilm_tokenizer: Any, minilm_checkpoint: Path
) -> None:
    """Oracles: the native API to the bit, and transformers nearly."""
    response = create(TEXTS)
    rows = minilm_tokenizer(TEXTS, truncation=False)["input_ids"]
    expected = np.stack([mean(native(model_clients, "minilm", row)) for row in rows])
    assert vectors_of(response).tobytes() == expected.tobytes()
    assert (response.object, response.model) == ("list", "minilm")
    assert response.usage.prompt_tokens == response.usage.total_tokens == sum(map(len, rows))
    bert: Any = BertModel.from_pretrained(minilm_checkpoint, add_pooling_layer=False)
    with torch.inference_mode():
        oracle = bert.eval().embeddings(minilm_tokenizer(TEXTS[0], return_tensors="pt")["input_ids"])[0].mean(0).numpy()
    assert np.abs(vectors_of(response)[0] - oracle).max() <= 2e-6


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_encoding_and_dtype_of_vectors(create: Create, dtype: str) -> None:
    """The type applies to base64 only."""
    whole = vectors_of(create(TEXTS))
    assert vectors_of(create(TEXTS, encoding_format="float", embed_dtype=dtype)).tobytes() == whole.tobytes()
    narrow = create(TEXTS, encoding_format="base64", embed_dtype=dtype)
    expected = torch.from_numpy(whole).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    for item, vector in zip(narrow.data, expected, strict=True):  # the client decodes what it asks for by itself
        assert base64.b64decode(str(item.embedding)) == vector.tobytes()


def test_embeddings_accept_ids_and_lists_of_ids(openai_client: openai.OpenAI, model_clients: Clients) -> None:
    for model in ("minilm", "gpt2-small"):
        expected = np.stack([mean(native(model_clients, model, row)) for row in IDS])
        rows = vectors_of(openai_client.embeddings.create(model=model, input=IDS, extra_body=MEAN))
        assert rows.tobytes() == expected.tobytes()
        one = openai_client.embeddings.create(model=model, input=IDS[1], extra_body=MEAN)
        assert vectors_of(one).tobytes() == rows[1].tobytes()
        assert one.usage.prompt_tokens == 5


def test_pooling_first_or_last_returns_vector_of_one_token(create: Create, model_clients: Clients) -> None:
    for pooling, index in (("first", 0), ("last", -1)):
        expected = [native(model_clients, "minilm", row)[index] for row in IDS]
        assert vectors_of(create(IDS, pooling=pooling)).tobytes() == np.stack(expected).tobytes()


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_default_response_is_chunked_and_matches_base64(model_http: httpx.Client, pooling: str) -> None:
    rows = [row for number in range(1, 360) for row in ([number], [number, 2, 3], [7] * 4)]
    rows += [[*range(400)]]
    fields = {"model": "minilm", "input": rows, "pooling": pooling}
    texts = model_http.post("/v1/embeddings", json=fields)
    codes = model_http.post("/v1/embeddings", json=fields | {"encoding_format": "base64"}).json()["data"]
    assert texts.headers["Transfer-Encoding"] == "chunked"
    assert len(rows) * 384 * 4 > CHUNK_BYTES
    for text, code in zip(texts.json()["data"], codes, strict=True):
        assert np.array(text["embedding"], "<f4").tobytes() == base64.b64decode(code.pop("embedding"))
        assert text == code | {"embedding": text["embedding"]}


@pytest.mark.parametrize(
    ("fields", "side", "length"),
    [
        ({"truncate": "left"}, "left", 512),
        ({"truncate_prompt_tokens": 5}, "right", 5),
        ({"truncate_prompt_tokens": -1}, "right", 512),
        ({"truncate_prompt_tokens": 5, "truncate": "left"}, "left", 5),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, "left", 512),
    ],
)
def test_truncation_matches_transformers_as_in_vllm(
    create: Create, minilm_tokenizer: Any, fields: dict[str, Any], side: str, length: int
) -> None:
    """vLLM passes `truncate_prompt_tokens` to the tokenizer of transformers as `max_length`."""
    texts = ["one two three " * 200, "short"]
    response = create(texts, **fields)
    minilm_tokenizer.truncation_side = side
    rows = minilm_tokenizer(texts, truncation=True, max_length=length)["input_ids"]
    assert response.model_extra == {"version": 1, "truncated": [602 - length, 0]}
    assert vectors_of(response).tobytes() == vectors_of(create(rows)).tobytes()
    assert response.usage.prompt_tokens == sum(map(len, rows))


def test_truncate_prompt_tokens_truncates_ids(create: Create) -> None:
    right, left = [row[:2] for row in IDS], [row[-2:] for row in IDS]
    for fields, rows in (({}, right), ({"truncate": "right"}, right), ({"truncate": "left"}, left)):
        assert create(IDS, truncate_prompt_tokens=2, **fields).data == create(rows).data


def test_fields_of_peers_are_ignored_and_listed(openai_client: openai.OpenAI, create: Create) -> None:
    raw = openai_client.embeddings.with_raw_response.create
    ignored: dict[str, Any] = {"input_type": "query", "metadata": {"input": "another text"}, "mm_processor_kwargs": {}}
    ignored |= {"priority": 1, "request_id": "mine", "cache_salt": "salt", "truncation_side": "left", "user": "me"}
    used = MEAN | {"endianness": "little", "dimensions": 384}
    for _ in range(2):  # the first request could prepare the second
        found = raw(model="minilm", input=TEXTS, extra_body=used | ignored)
        assert sorted(found.headers["preblock-ignored"].split(", ")) == sorted(ignored)
        assert found.parse().data == create(TEXTS).data
    assert "preblock-ignored" not in raw(model="minilm", input=TEXTS, extra_body=MEAN).headers


def test_use_activation_normalizes_as_in_vllm(create: Create) -> None:
    plain, off, on = (vectors_of(create(TEXTS, use_activation=value)) for value in (None, False, True))
    assert plain.tobytes() == off.tobytes()
    np.testing.assert_allclose(on, plain / np.linalg.norm(plain, axis=-1, keepdims=True), rtol=1e-6)


def test_add_special_tokens_false_matches_transformers(create: Create, minilm_tokenizer: Any) -> None:
    rows = minilm_tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    found = vectors_of(create(TEXTS, add_special_tokens=False))
    assert found.tobytes() == vectors_of(create(rows)).tobytes()
    assert create(IDS, add_special_tokens=False).data == create(IDS).data


def test_model_list_and_names_select_models_and_versions(tiny_openai: openai.OpenAI, tiny_repository: Path) -> None:
    models = list(tiny_openai.models.list())
    assert [model.id for model in models] == ["bert", "gpt"]
    assert models[0] == tiny_openai.models.retrieve("bert")
    written = (tiny_repository / "bert" / "2" / "manifest.json").stat().st_mtime
    assert (models[0].object, models[0].owned_by, models[0].created) == ("model", "preblock", int(written))
    assert tiny_openai.models.retrieve("bert:1").id == "bert:1"
    for name, version in (("bert", 2), ("bert:1", 1)):
        answer = tiny_openai.embeddings.create(model=name, input="a", extra_body=MEAN)
        assert answer.model_extra == {"version": version}
    for name in ("nope", "bert:3", "bert:x"):
        with pytest.raises(openai.NotFoundError) as raised:
            tiny_openai.models.retrieve(name)
        assert raised.value.code == "model_not_found"
