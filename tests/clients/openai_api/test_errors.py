"""Errors of the OpenAI API, through OpenAI's own client."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.clients.openai_api.responses import MEAN, connected
from tests.support.artifacts import copy_artifact
from tests.support.protocols import ITEM_FIELDS
from tests.support.servers import LOADING_HINT, serve

FORMS = "a string, a list of strings, a list of token ids, or a list of such lists"
UNKNOWN = (
    "unknown field {}; expected model, input, encoding_format, dimensions, pooling, truncate, truncate_prompt_tokens, "
    "truncation_side, add_special_tokens, special_tokens_in_text, use_activation, embed_dtype, endianness, "
    "user, input_type, metadata, priority, request_id, cache_salt, mm_processor_kwargs"
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
        ({"truncation_side": "end"}, "truncation_side", "truncation_side: got end, expected left, right"),
        (
            {"truncation_side": "left", "truncate": "left"},
            "truncation_side",
            "truncation_side: got truncate and truncation_side, expected one of them",
        ),
        ({"endianness": "big"}, "endianness", "endianness: got big, expected native, little"),
        ({"use_activation": 1}, "use_activation", "use_activation: got 1, expected true or false"),
        (
            {"use_activation": True, "pooling": "none"},
            "use_activation",
            "use_activation: got True, expected false, or another pooling, since only pooled vectors are normalized",
        ),
        ({"add_special_tokens": 1}, "add_special_tokens", "add_special_tokens: got 1, expected true or false"),
        *(
            ({"embed_dtype": value}, "embed_dtype", f"embed_dtype: got {value}, expected float32, float16, bfloat16")
            for value in ("fp8_e4m3", 16)
        ),
    ],
)
def test_invalid_request_reports_field_and_value(
    tiny_openai: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        tiny_openai.embeddings.create(model="bert", input="a", extra_body=MEAN | fields)
    error = raised.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", param, None)
    assert isinstance(error.body, dict)
    body = {name: value for name, value in error.body.items() if name not in ITEM_FIELDS}
    assert body == {"message": message, "type": "invalid_request_error", "param": param, "code": None}


@pytest.mark.parametrize(
    ("kind", "fields", "param", "code", "message"),
    [
        (
            openai.NotFoundError,
            {"model": "nope"},
            "model",
            "model_not_found",
            f"The model nope does not exist. Available models: bert, gpt. ({LOADING_HINT})",
        ),
        *(
            (
                openai.NotFoundError,
                {"model": f"bert:{version}"},
                "model",
                "model_not_found",
                f"The model has no version {version or 'bert:'}. Its versions: 1, 2. ({LOADING_HINT})",
            )
            for version in ("3", "", "01")
        ),
        (openai.BadRequestError, {"input": [1] * 9}, "input[0]", "context_length_exceeded", TOO_LONG),
        (openai.BadRequestError, {"input": "a b c d e f g"}, "input[0]", "context_length_exceeded", TOO_LONG),
        *(
            (openai.BadRequestError, {name: 1}, name, "unknown_parameter", UNKNOWN.format(name))
            for name in ("input_ids", "truncate_prompt_token", "output_dimension", "normalize")
        ),
        (
            openai.BadRequestError,
            {"input": [1] * 9, "truncation_side": "left"},
            "input[0]",
            "context_length_exceeded",
            TOO_LONG,
        ),
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
    tiny_openai: openai.OpenAI,
    kind: type[openai.APIStatusError],
    fields: dict[str, Any],
    param: str,
    code: str,
    message: str,
) -> None:
    with pytest.raises(kind) as raised:
        tiny_openai.embeddings.create(model="bert", input="a", extra_body=MEAN | fields)
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
            assert len(client.embeddings.create(model="bert", input="a", extra_body=MEAN).data) == 1
            with pytest.raises(openai.PermissionDeniedError) as forbidden:
                client.embeddings.create(model="gpt", input=[1], extra_body=MEAN)
    error = unknown.value
    assert (error.status_code, error.type, error.param, error.code) == (
        401,
        "invalid_request_error",
        None,
        "invalid_api_key",
    )
    assert error.response.headers["WWW-Authenticate"] == "Bearer"
    assert (forbidden.value.code, forbidden.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("fields", [{}, {"pooling": None}, {"input": [1]}])
def test_sentence_embedding_of_other_model_is_refused(tiny_openai: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        tiny_openai.embeddings.create(model="bert", input="a", extra_body=fields)
    assert raised.value.param == "pooling"
    for words in (
        "model bert has no sentence embeddings",
        "such as wordllama",
        'set pooling to "mean", "first", "last"',
    ):
        assert words in raised.value.message


def test_request_over_rate_limit_raises_rate_limit_error(tiny_repository: Path) -> None:
    with serve(tiny_repository, PREBLOCK_RATE_LIMIT_PER_SECOND="0.01") as running, connected(running) as client:
        client.embeddings.create(model="gpt", input=[1], extra_body=MEAN)
        with pytest.raises(openai.RateLimitError) as raised:
            client.embeddings.create(model="gpt", input=[1], extra_body=MEAN)
    assert (raised.value.type, raised.value.code) == ("requests", "rate_limit_exceeded")


def test_malformed_json_returns_400(tiny_http: httpx.Client) -> None:
    response = tiny_http.post("/v1/embeddings", content=b"{", headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, None)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-npy"])
def test_unsupported_content_type_returns_415(tiny_http: httpx.Client, kind: str) -> None:
    response = tiny_http.post("/v1/embeddings", content=b"{}", headers={"Content-Type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (415, None)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nope", 404), ("GET", "/v1/embeddings", 405)])
def test_unknown_route_returns_openai_error(tiny_http: httpx.Client, method: str, path: str, status: int) -> None:
    response = tiny_http.request(method, path)
    assert response.status_code == status
    error = {"type": "invalid_request_error", "param": None, "code": None}
    assert response.json()["error"].items() >= error.items()
    assert response.json()["error"]["message"].startswith(f"{method} {path}: ")


def test_changed_tokenizer_raises_internal_server_error(tmp_path: Path) -> None:
    folder = copy_artifact("bert", tmp_path / "repository", "changed")
    with serve(tmp_path / "repository") as running, connected(running) as client:
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(openai.InternalServerError) as raised:
            client.embeddings.create(model="changed", input="a", extra_body=MEAN)
        assert (raised.value.type, raised.value.code, raised.value.param) == (
            "server_error",
            None,
            None,
        )
        assert len(client.embeddings.create(model="changed", input=[1], extra_body=MEAN).data) == 1
