"""Errors of the OpenAI API, through OpenAI's own client."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from preblock.service.core.auth import new_key
from tests.clients.openai_api.responses import MEAN, connected
from tests.support.protocols import ITEM_FIELDS
from tests.support.servers import LOADING_HINT, serve

TOO_LONG = "This model's maximum context length is 8 tokens, but input[0] has 9 tokens. Shorten the input, or set "


def refusal(client: openai.OpenAI, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as raised:
        client.embeddings.create(model="bert", input="a", extra_body=MEAN | fields)
    return raised.value


@pytest.mark.parametrize(
    ("fields", "param", "got"),
    [
        ({"model": 3}, "model", "3, expected the name of a model"),
        ({"input": ""}, "input", "'', expected a text of at least one character"),
        ({"input": []}, "input", "[], expected at least one row of at least one integer"),
        ({"input": 3}, "input", "3, expected a string, a list of strings, a list of token ids, or a list of "),
        ({"input": ["a", 3]}, "input[1]", "3, expected a text of at least one character"),
        ({"input": [[3], "a"]}, "input[1]", "'a', expected a row of at least one integer"),
        ({"input": [1.5]}, "input[0]", "1.5, expected a 64-bit integer"),
        ({"input": [[1, 11]]}, "input[0][1]", "11, expected 0 to 10"),
        ({"model": "gpt"}, "input", "'a', expected token ids, since this model has no tokenizer"),
        *(({"dimensions": value}, "dimensions", f"{value}, expected 4, the width") for value in (3, 4.0, True)),
        ({"encoding_format": "hex"}, "encoding_format", "hex, expected float, base64"),
        ({"encoding_format": [1]}, "encoding_format", "[1], expected float, base64"),
        *(({"pooling": value}, "pooling", f"{value}, expected none, mean, first, last") for value in ("max", 1)),
        ({"truncate": "end"}, "truncate", "end, expected left, right"),
        *(
            ({"truncate_prompt_tokens": value}, "truncate_prompt_tokens", f"{value!r}, expected 1 to 8, or -1 for the ")
            for value in (0, -2, 9, True, 1.0, "3")
        ),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "2, expected 3 or more"),  # the special tokens alone
        ({"truncation_side": "end"}, "truncation_side", "end, expected left, right"),
        (
            {"truncation_side": "left", "truncate": "left"},
            "truncation_side",
            "truncate and truncation_side, expected one of them",
        ),
        ({"endianness": "big"}, "endianness", "big, expected native, little"),
        ({"use_activation": 1}, "use_activation", "1, expected true or false"),
        ({"use_activation": True, "pooling": "none"}, "use_activation", "True, expected false, or another pooling"),
        ({"add_special_tokens": 1}, "add_special_tokens", "1, expected true or false"),
        *(
            ({"embed_dtype": value}, "embed_dtype", f"{value}, expected float32, float16, bfloat16")
            for value in ("fp8_e4m3", 16)
        ),
        ({"input": [[1]] * 65537}, "input", "65537 tokens, expected "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_request_reports_field_and_value(
    tiny_openai: openai.OpenAI, fields: dict[str, Any], param: str, got: str
) -> None:
    error = refusal(tiny_openai, **fields)
    assert isinstance(error, openai.BadRequestError)
    assert isinstance(error.body, dict)
    kind, code = ("max_tokens_per_request",) * 2 if got.startswith("65537 tokens") else ("invalid_request_error", None)
    assert (error.type, error.param, error.code) == (kind, param, code)
    assert error.body["message"].startswith(f"{param}: got {got}")
    assert error.body.keys() - ITEM_FIELDS == {"message", "type", "param", "code"}


NO_MODEL, LONG = "model_not_found", "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"model": None}, "model", None, "model is required: the name of a model"),
        ({"input": None}, "input", None, "input is required: a string, a list of strings, "),
        ({"model": "nope"}, "model", NO_MODEL, "The model nope does not exist. Available models: bert, gpt."),
        ({"model": "bert:3"}, "model", NO_MODEL, f"The model has no version 3. Its versions: 1, 2. ({LOADING_HINT})"),
        ({"model": "bert:"}, "model", NO_MODEL, "The model has no version bert:. Its versions: 1, 2. "),
        ({"model": "bert:01"}, "model", NO_MODEL, "The model has no version 01. Its versions: 1, 2. "),
        ({"input": [1] * 9}, "input[0]", LONG, TOO_LONG),
        ({"input": "a b c d e f g", "truncation_side": "left"}, "input[0]", LONG, TOO_LONG),
        ({"normalize": 1}, "normalize", "unknown_parameter", "unknown field normalize; expected model, input, "),
    ],
)
def test_known_errors_have_openai_codes(
    tiny_openai: openai.OpenAI, fields: dict[str, Any], param: str, code: str | None, message: str
) -> None:
    error = refusal(tiny_openai, **fields)
    assert isinstance(error, openai.NotFoundError if code == NO_MODEL else openai.BadRequestError)
    assert (error.type, error.param, error.code) == ("invalid_request_error", param, code)
    assert isinstance(error.body, dict)
    assert error.body["message"].startswith(message)


def test_refused_access_has_openai_codes(tiny_repository: Path, tmp_path: Path) -> None:
    known, other = (new_key(name, ("bert",), admin=False) for name in ("known", "other"))
    (tmp_path / "keys.toml").write_text(known[1] + other[1])
    limits = {"PREBLOCK_API_KEYS_FILE": str(tmp_path / "keys.toml"), "PREBLOCK_RATE_LIMIT_PER_SECOND": "0.01"}
    with (
        serve(tiny_repository, **limits) as running,
        connected(running, "unknown") as stranger,
        connected(running, known[0]) as client,
        connected(running, other[0]) as narrow,
    ):
        assert len(client.embeddings.create(model="bert", input="a", extra_body=MEAN).data) == 1
        errors = [refusal(stranger), refusal(narrow, model="gpt", input=[1]), refusal(client)]
    expected = [openai.AuthenticationError, openai.PermissionDeniedError, openai.RateLimitError]
    assert [type(error) for error in errors] == expected
    assert [(error.type, error.param, error.code) for error in errors] == [
        ("invalid_request_error", None, "invalid_api_key"),
        ("invalid_request_error", "model", "model_not_found"),
        ("requests", None, "rate_limit_exceeded"),
    ]


def test_sentence_embedding_of_other_model_is_refused(tiny_openai: openai.OpenAI) -> None:
    for fields in ({}, {"input": [1]}):
        error = refusal(tiny_openai, pooling=None, **fields)
        assert (error.status_code, error.param) == (400, "pooling")
        assert "model bert has no sentence embeddings" in error.message
        assert 'set pooling to "mean", "first", "last"' in error.message


def test_unknown_route_returns_openai_error(tiny_http: httpx.Client) -> None:
    for path, status in (("/v1/nope", 404), ("/v1/embeddings", 405)):
        response = tiny_http.get(path)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (status, "invalid_request_error", None)
        assert error["message"].startswith(f"GET {path}: ")
