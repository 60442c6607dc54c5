"""The protocol of the OpenAI API, through OpenAI's own client. Oracles: transformers, and the native API."""

import base64
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, BertModel

from preblock.service.codecs.openai import MAX_FLOATS
from tests.support.artifacts import copy_artifact
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server, serve

TEXTS = ["Hello, world!", "Ünïcödé 😀 naïve café", "the quick brown fox " * 30]
IDS = [[101, 7592, 102], [101, 2088, 999, 2003, 102]]


def connected(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with connected(server) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny_client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with connected(tiny_server) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


def vectors_of(response: openai.types.CreateEmbeddingResponse) -> NDArray[np.float32]:
    assert [item.index for item in response.data] == list(range(len(response.data)))
    return np.array([item.embedding for item in response.data], np.float32)


def means(clients: Clients, model: str, rows: list[list[int]]) -> NDArray[np.float32]:
    """Return the mean of the native API's vectors, row by row."""
    found = [native_bytes(clients, model, {"input_ids": [row]}) for row in rows]
    return np.stack([vectors.astype(np.float64).sum(0) / len(vectors) for vectors in found]).astype(np.float32)


def test_text_embeddings_are_means_of_token_vectors(client: openai.OpenAI, clients: Clients, tokenizer: Any) -> None:
    response = client.embeddings.create(model="minilm", input=TEXTS)
    rows = tokenizer(TEXTS, truncation=False)["input_ids"]
    assert vectors_of(response).tobytes() == means(clients, "minilm", rows).tobytes()
    assert (response.object, response.model) == ("list", "minilm")
    assert response.usage.prompt_tokens == response.usage.total_tokens == sum(map(len, rows))


def test_text_embedding_matches_mean_of_transformers(client: openai.OpenAI, tokenizer: Any, checkpoint: Path) -> None:
    bert: Any = BertModel.from_pretrained(checkpoint, add_pooling_layer=False)
    with torch.inference_mode():
        oracle = bert.eval().embeddings(tokenizer(TEXTS[0], return_tensors="pt")["input_ids"])[0].mean(0).numpy()
    assert np.abs(vectors_of(client.embeddings.create(model="minilm", input=TEXTS[0]))[0] - oracle).max() <= 2e-6


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_encoding_formats_match_default_bit_for_bit(client: openai.OpenAI, encoding: Any) -> None:
    default = vectors_of(client.embeddings.create(model="minilm", input=TEXTS))
    asked = client.embeddings.create(model="minilm", input=TEXTS, encoding_format=encoding)
    if encoding == "base64":  # the client decodes it only where nobody asked for it
        for item in asked.data:
            item.embedding = np.frombuffer(base64.b64decode(str(item.embedding)), "<f4").tolist()
    assert vectors_of(asked).tobytes() == default.tobytes()


def test_response_without_encoding_format_holds_floats(tiny: httpx.Client) -> None:
    answer = tiny.post("/v1/embeddings", json={"model": "gpt", "input": [1, 2]}).json()
    assert [type(value) for value in answer["data"][0]["embedding"]] == [float] * 4
    assert answer["version"] == 1


def test_embeddings_accept_ids_and_lists_of_ids(client: openai.OpenAI, clients: Clients) -> None:
    for model in ("minilm", "gpt2-small"):
        rows = vectors_of(client.embeddings.create(model=model, input=IDS))
        assert rows.tobytes() == means(clients, model, IDS).tobytes()
        one = client.embeddings.create(model=model, input=IDS[1])
        assert vectors_of(one).tobytes() == rows[1].tobytes()
        assert one.usage.prompt_tokens == 5


def test_vector_is_independent_of_batch(client: openai.OpenAI) -> None:
    together = vectors_of(client.embeddings.create(model="minilm", input=TEXTS * 20))
    alone = [vectors_of(client.embeddings.create(model="minilm", input=text))[0] for text in TEXTS]
    assert together.tobytes() == np.stack(alone * 20).tobytes()


def test_unneeded_openai_parameters_are_accepted(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="minilm", input=IDS)
    assert client.embeddings.create(model="minilm", input=IDS, dimensions=384, user="me").data == plain.data


@pytest.mark.parametrize(("pooling", "index"), [("first", 0), ("last", -1)])
def test_pooling_first_or_last_returns_vector_of_one_token(
    client: openai.OpenAI, clients: Clients, pooling: str, index: int
) -> None:
    response = client.embeddings.create(model="minilm", input=IDS, extra_body={"pooling": pooling})
    expected = [native_bytes(clients, "minilm", {"input_ids": [row]})[index] for row in IDS]
    assert vectors_of(response).tobytes() == np.stack(expected).tobytes()


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_large_float_response_is_chunked_and_matches_base64(http: httpx.Client, pooling: str) -> None:
    rows = [row for number in range(1, 360) for row in ([number], [number, 2, 3], [7] * 4)]
    rows += [[*range(400)]]
    fields = {"model": "minilm", "input": rows, "pooling": pooling}
    texts = http.post("/v1/embeddings", json=fields | {"encoding_format": "float"})
    codes = http.post("/v1/embeddings", json=fields | {"encoding_format": "base64"}).json()["data"]
    assert texts.headers["Transfer-Encoding"] == "chunked"
    assert len(rows) * 384 > MAX_FLOATS
    for text, code in zip(texts.json()["data"], codes, strict=True):
        assert np.array(text["embedding"], "<f4").tobytes() == base64.b64decode(code.pop("embedding"))
        assert text == code | {"embedding": text["embedding"]}


@pytest.mark.parametrize("rows", [IDS, [IDS[0]] * 2])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_pooling_none_returns_vector_per_token(
    http: httpx.Client, clients: Clients, rows: list[list[int]], encoding: str
) -> None:
    fields = {"model": "minilm", "input": rows, "pooling": "none", "encoding_format": encoding}
    answer = http.post("/v1/embeddings", json=fields).json()
    for row, item in zip(rows, answer["data"], strict=True):
        assert item["shape"] == [len(row), 384]
        data = item["embedding"]
        found = np.array(data, "<f4") if encoding == "float" else np.frombuffer(base64.b64decode(data), "<f4")
        assert found.tobytes() == native_bytes(clients, "minilm", {"input_ids": [row]}).tobytes()
        assert encoding == "base64" or found.shape == (len(row), 384)


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_is_reported(client: openai.OpenAI, tokenizer: Any, side: str) -> None:
    texts = ["one two three " * 200, "short"]
    response = client.embeddings.create(model="minilm", input=texts, extra_body={"truncate": side})
    tokenizer.truncation_side = side
    rows = tokenizer(texts, truncation=True, max_length=512)["input_ids"]
    assert response.model_extra == {"version": 1, "truncated": [602 - 512, 0]}
    assert vectors_of(response).tobytes() == vectors_of(client.embeddings.create(model="minilm", input=rows)).tobytes()
    assert response.usage.prompt_tokens == sum(map(len, rows))


@pytest.mark.parametrize(("side", "most"), [("right", 5), ("left", 5), (None, 5), (None, -1), ("left", -1)])
def test_truncate_prompt_tokens_matches_vllm(
    client: openai.OpenAI, tokenizer: Any, side: str | None, most: int
) -> None:
    """vLLM passes the field to the tokenizer of transformers as `max_length`; embeddings are cut on the right."""
    texts = ["one two three " * 200, "short"]
    extra = {"truncate_prompt_tokens": most} | ({"truncate": side} if side else {})
    response = client.embeddings.create(model="minilm", input=texts, extra_body=extra)
    tokenizer.truncation_side = side or "right"
    rows = tokenizer(texts, truncation=True, max_length=512 if most == -1 else most)["input_ids"]
    assert vectors_of(response).tobytes() == vectors_of(client.embeddings.create(model="minilm", input=rows)).tobytes()
    assert response.usage.prompt_tokens == sum(map(len, rows))


def test_truncate_prompt_tokens_truncates_ids(client: openai.OpenAI) -> None:
    found = {
        side: client.embeddings.create(
            model="minilm", input=IDS, extra_body={"truncate_prompt_tokens": 2, "truncate": side}
        )
        for side in ("left", "right", None)
    }
    for side, rows in (("left", [row[-2:] for row in IDS]), ("right", [row[:2] for row in IDS])):
        assert found[side].data == client.embeddings.create(model="minilm", input=rows).data
    assert found[None].data == found["right"].data


def test_add_special_tokens_false_matches_transformers(client: openai.OpenAI, tokenizer: Any) -> None:
    response = client.embeddings.create(model="minilm", input=TEXTS, extra_body={"add_special_tokens": False})
    rows = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    assert vectors_of(response).tobytes() == vectors_of(client.embeddings.create(model="minilm", input=rows)).tobytes()
    ids = client.embeddings.create(model="minilm", input=IDS, extra_body={"add_special_tokens": False})
    assert ids.data == client.embeddings.create(model="minilm", input=IDS).data


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embed_dtype_applies_to_base64_only(client: openai.OpenAI, dtype: str) -> None:
    whole = vectors_of(client.embeddings.create(model="minilm", input=TEXTS))
    narrow = client.embeddings.create(
        model="minilm", input=TEXTS, encoding_format="base64", extra_body={"embed_dtype": dtype}
    )
    for item, vector in zip(narrow.data, whole, strict=True):
        expected = torch.from_numpy(vector).to(getattr(torch, dtype)).view(torch.uint8).numpy()
        assert base64.b64decode(str(item.embedding)) == expected.tobytes()
    numbers = client.embeddings.create(
        model="minilm", input=TEXTS, encoding_format="float", extra_body={"embed_dtype": dtype}
    )
    assert vectors_of(numbers).tobytes() == whole.tobytes()


def test_model_list_and_retrieve_describe_models(tiny_client: openai.OpenAI, tiny_repository: Path) -> None:
    models = list(tiny_client.models.list())
    assert [model.id for model in models] == ["bert", "gpt"]
    assert models[0] == tiny_client.models.retrieve("bert")
    written = (tiny_repository / "bert" / "2" / "manifest.json").stat().st_mtime
    assert (models[0].object, models[0].owned_by, models[0].created) == ("model", "preblock", int(written))


def test_model_name_selects_version(tiny_client: openai.OpenAI) -> None:
    found = {name: tiny_client.embeddings.create(model=name, input="a") for name in ("bert", "bert:1", "bert:2")}
    assert [(response.model_extra or {})["version"] for response in found.values()] == [2, 1, 2]
    assert found["bert"].data == found["bert:2"].data != found["bert:1"].data
    assert tiny_client.models.retrieve("bert:1").id == "bert:1"


FORMS = "a string, a list of strings, a list of token ids, or a list of such lists"
UNKNOWN = (
    "unknown field input_ids; expected model, input, encoding_format, dimensions, user, "
    "pooling, truncate, truncate_prompt_tokens, add_special_tokens, embed_dtype"
)
TOO_LONG = (
    "This model's maximum context length is 8 tokens, but input[0] has 9 tokens. "
    "Shorten the input, or set truncate_prompt_tokens to -1."
)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"model": 3}, "model", "model: got 3, expected the name of a model"),
        ({"model": None}, "model", "model is required: the name of a model"),
        ({"input": None}, "input", f"input is required: {FORMS}"),
        ({"input": ""}, "input", "input: got '', expected a text of at least one character"),
        ({"input": ["a", ""]}, "input[1]", "input[1]: got '', expected a text of at least one character"),
        ({"input": []}, "input", "input: got [], expected at least one row of at least one integer"),
        ({"input": 3}, "input", f"input: got 3, expected {FORMS}"),
        ({"input": ["a", 3]}, "input[1]", "input[1]: got 3, expected a text of at least one character"),
        ({"input": [3, "a"]}, "input[1]", "input[1]: got 'a', expected a 64-bit integer"),
        ({"input": [[3], "a"]}, "input[1]", "input[1]: got 'a', expected a row of at least one integer"),
        ({"input": [[3], []]}, "input[1]", "input[1]: got [], expected a row of at least one integer"),
        ({"input": [1.5]}, "input[0]", "input[0]: got 1.5, expected a 64-bit integer"),
        ({"input": [[1, 11]]}, "input[0][1]", "input[0][1]: got 11, expected 0 to 10"),
        (
            {"model": "gpt", "input": "a"},
            "input",
            "input: got 'a', expected token ids, since this model has no tokenizer",
        ),
        ({"dimensions": 3}, "dimensions", "dimensions: got 3, expected 4, the width of this model, or nothing"),
        ({"dimensions": 4.0}, "dimensions", "dimensions: got 4.0, expected 4, the width of this model, or nothing"),
        ({"dimensions": True}, "dimensions", "dimensions: got True, expected 4, the width of this model, or nothing"),
        ({"encoding_format": "hex"}, "encoding_format", "encoding_format: got hex, expected float, base64"),
        ({"encoding_format": [1]}, "encoding_format", "encoding_format: got [1], expected float, base64"),
        ({"user": 3}, "user", "user: got 3, expected a string"),
        ({"pooling": "max"}, "pooling", "pooling: got max, expected none, mean, first, last"),
        ({"pooling": 1}, "pooling", "pooling: got 1, expected none, mean, first, last"),
        ({"truncate": "end"}, "truncate", "truncate: got end, expected left, right"),
        *(
            (
                {"truncate_prompt_tokens": value},
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens: got {value!r}, expected 1 to 8, or -1 for the maximum context length of this "
                "model",
            )
            for value in (0, -2, 9, True, 1.0, "3")
        ),
        (
            {"truncate_prompt_tokens": 2},
            "truncate_prompt_tokens",
            "truncate_prompt_tokens: got 2, expected 3 or more, to keep the special tokens and one other",
        ),
        ({"add_special_tokens": 1}, "add_special_tokens", "add_special_tokens: got 1, expected true or false"),
        *(
            ({"embed_dtype": value}, "embed_dtype", f"embed_dtype: got {value}, expected float32, float16, bfloat16")
            for value in ("fp8_e4m3", 16)
        ),
    ],
)
def test_invalid_request_reports_field_and_value(
    tiny_client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        tiny_client.embeddings.create(model="bert", input="a", extra_body=fields)
    error = raised.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", param, None)
    assert error.body == {"message": message, "type": "invalid_request_error", "param": param, "code": None}


@pytest.mark.parametrize(
    ("kind", "fields", "param", "code", "message"),
    [
        (
            openai.NotFoundError,
            {"model": "nope"},
            "model",
            "model_not_found",
            "The model nope does not exist. Available models: bert, gpt.",
        ),
        *(
            (
                openai.NotFoundError,
                {"model": f"bert:{version}"},
                "model",
                "model_not_found",
                f"The model has no version {version or 'bert:'}. Its versions: 1, 2.",
            )
            for version in ("3", "", "01")
        ),
        (openai.BadRequestError, {"input": [1] * 9}, "input[0]", "context_length_exceeded", TOO_LONG),
        (openai.BadRequestError, {"input": "a b c d e f g"}, "input[0]", "context_length_exceeded", TOO_LONG),
        (openai.BadRequestError, {"input_ids": [1]}, "input_ids", "unknown_parameter", UNKNOWN),
        (
            openai.BadRequestError,
            {"input": [[1]] * 65537},
            "input",
            "max_tokens_per_request",
            "input: got 65537 tokens, expected at most 65536 tokens in a request",
        ),
    ],
)
def test_known_errors_have_openai_codes(
    tiny_client: openai.OpenAI,
    kind: type[openai.APIStatusError],
    fields: dict[str, Any],
    param: str,
    code: str,
    message: str,
) -> None:
    with pytest.raises(kind) as raised:
        tiny_client.embeddings.create(model="bert", input="a", extra_body=fields)
    error = raised.value
    assert isinstance(error.body, dict)
    assert (error.param, error.code, error.body["message"]) == (param, code, message)
    assert error.type == ("max_tokens_per_request" if code == "max_tokens_per_request" else "invalid_request_error")


def test_wrong_key_returns_openai_error(tiny_repository: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "bert"\nsha256 = "{sha256(b"known").hexdigest()}"\nmodels = ["bert"]\n')
    with serve(tiny_repository, "--api-keys-file", str(keys)) as running:
        with (
            openai.OpenAI(base_url=f"{running.address}/v1", api_key="unknown", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError) as unknown,
        ):
            stranger.embeddings.create(model="bert", input="a")
        with openai.OpenAI(base_url=f"{running.address}/v1", api_key="known", max_retries=0) as client:
            assert len(client.embeddings.create(model="bert", input="a").data) == 1
            with pytest.raises(openai.PermissionDeniedError) as forbidden:
                client.embeddings.create(model="gpt", input=[1])
    error = unknown.value
    assert (error.status_code, error.type, error.param, error.code) == (
        401,
        "invalid_request_error",
        None,
        "invalid_api_key",
    )
    assert error.response.headers["WWW-Authenticate"] == "Bearer"
    assert (forbidden.value.code, forbidden.value.param) == ("model_not_found", "model")


def test_request_over_rate_limit_raises_rate_limit_error(tiny_repository: Path) -> None:
    with serve(tiny_repository, PREBLOCK_RATE_LIMIT_PER_SECOND="0.01") as running, connected(running) as client:
        client.embeddings.create(model="gpt", input=[1])
        with pytest.raises(openai.RateLimitError) as raised:
            client.embeddings.create(model="gpt", input=[1])
    assert (raised.value.type, raised.value.code) == ("requests", "rate_limit_exceeded")


def test_malformed_json_returns_400(tiny: httpx.Client) -> None:
    response = tiny.post("/v1/embeddings", content=b"{", headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, None)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-npy"])
def test_unsupported_content_type_returns_415(tiny: httpx.Client, kind: str) -> None:
    response = tiny.post("/v1/embeddings", content=b"{}", headers={"Content-Type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (415, None)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nope", 404), ("GET", "/v1/embeddings", 405)])
def test_unknown_route_returns_openai_error(tiny: httpx.Client, method: str, path: str, status: int) -> None:
    response = tiny.request(method, path)
    assert response.status_code == status
    error = {"type": "invalid_request_error", "param": None, "code": None}
    assert response.json()["error"].items() >= error.items()
    assert response.json()["error"]["message"].startswith(f"{method} {path}: ")


def test_retrieve_of_unknown_model_raises_not_found(tiny_client: openai.OpenAI) -> None:
    for name in ("nope", "bert:3", "bert:x"):
        with pytest.raises(openai.NotFoundError) as raised:
            tiny_client.models.retrieve(name)
        assert raised.value.code == "model_not_found"


def test_broken_tokenizer_raises_internal_server_error(tmp_path: Path) -> None:
    copy_artifact("bert-broken-tokenizer", tmp_path / "repository", "broken")
    with serve(tmp_path / "repository") as running, connected(running) as client:
        with pytest.raises(openai.InternalServerError) as raised:
            client.embeddings.create(model="broken", input="a")
        assert (raised.value.type, raised.value.code, raised.value.param) == (
            "server_error",
            None,
            None,
        )
        assert len(client.embeddings.create(model="broken", input=[1]).data) == 1
