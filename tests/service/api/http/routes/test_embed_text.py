"""Text at the native API, on a real server. Oracles: transformers' tokenizer, and the same protocol given ids."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.api.http.native_requests import ask, post_json, refusal
from tests.support.late import transformers

TEXTS = ["Hello, world!", "Ünïcödé 😀 naïve café", "the quick brown fox " * 60]


@pytest.fixture(scope="module")
def oracle(minilm_checkpoint: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(minilm_checkpoint)


def embed(client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = ask(client, model, **fields).json()
    return document


def refused(client: httpx.Client, model: str, accept: str = "*/*", **fields: Any) -> tuple[int, str]:
    return refusal(post_json(client, model, accept, **fields))


@pytest.mark.parametrize("text", [*TEXTS, TEXTS])
def test_text_tokens_equal_transformers_tokenizer(model_http: httpx.Client, oracle: Any, text: Any) -> None:
    ids = oracle(text, truncation=False)["input_ids"]
    assert embed(model_http, "minilm", text=text) == embed(model_http, "minilm", input_ids=ids)


def test_return_tokens_adds_ids_and_character_spans(model_http: httpx.Client, oracle: Any) -> None:
    answer = embed(model_http, "minilm", text=TEXTS, return_tokens=True)
    expected = oracle(TEXTS, truncation=False, return_offsets_mapping=True)
    assert answer["input_ids"] == expected["input_ids"]
    assert answer["spans"] == [[list(span) for span in row] for row in expected["offset_mapping"]]
    first, end = answer["spans"][1][3]
    assert TEXTS[1][first:end] == "naïve"
    assert "input_ids" not in embed(model_http, "minilm", text=TEXTS)


@pytest.mark.parametrize("special", [None, True, False])
def test_special_tokens_are_omitted_on_request(model_http: httpx.Client, oracle: Any, special: bool | None) -> None:
    expected = oracle(TEXTS, truncation=False, add_special_tokens=special is not False)["input_ids"]
    answer = embed(model_http, "minilm", text=TEXTS, return_tokens=True, special_tokens=special)
    assert answer["input_ids"] == expected
    assert answer["embeddings"] == embed(model_http, "minilm", input_ids=expected)["embeddings"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_text_equals_transformers(model_http: httpx.Client, oracle: Any, side: str) -> None:
    texts = [" ".join(str(number) for number in range(2000, 2800)), "short"]
    oracle.truncation_side = side
    expected = oracle(texts, truncation=True, max_length=512)["input_ids"]
    whole = oracle(texts, truncation=False)["input_ids"]
    assert len(whole[0]) > 600
    answer = embed(model_http, "minilm", text=texts, truncate=side, return_tokens=True)
    assert answer["input_ids"] == expected
    assert answer["truncated"] == [len(whole[0]) - 512, 0]
    assert answer["embeddings"] == embed(model_http, "minilm", input_ids=expected)["embeddings"]


def test_text_over_max_len_is_rejected_with_lengths(model_http: httpx.Client) -> None:
    status, detail = refused(model_http, "minilm", text="word " * 600)
    assert (status, detail[:40]) == (422, "offset[0] + tokens: got 0 + 602 = 602, e")


def test_text_with_offset_equals_ids_with_offset(tiny_http: httpx.Client) -> None:
    assert embed(tiny_http, "bert", text="a b", offset=3) == embed(
        tiny_http, "bert", input_ids=[[1, 4, 5, 2]], offset=3
    )


@pytest.mark.parametrize(
    ("fields", "kept", "truncated"),
    [
        ({"input_ids": [[0, 1, 2, 3, 4, 5, 6, 0], [1]], "truncate": "right"}, [[0, 1, 2, 3, 4, 5], [1]], [2, 0]),
        ({"input_ids": [[0, 1, 2, 3, 4, 5, 6, 0], [1]], "truncate": "left"}, [[2, 3, 4, 5, 6, 0], [1]], [2, 0]),
        ({"input_ids": [[1, 2, 3], [4, 5, 6]], "truncate": "left", "offset": [5, 3]}, [[3], [4, 5, 6]], [2, 0]),
        ({"input_ids": [1, 2], "truncate": "left"}, [[1, 2]], [0]),
    ],
)
def test_ids_are_truncated_on_requested_side(
    tiny_http: httpx.Client, fields: dict[str, Any], kept: list[list[int]], truncated: list[int]
) -> None:
    answer = embed(tiny_http, "gpt", **fields)
    assert answer.pop("truncated") == truncated
    assert answer == embed(tiny_http, "gpt", input_ids=kept, offset=fields.get("offset", 0))


def test_truncation_counts_only_real_tokens(tiny_http: httpx.Client) -> None:
    fields = {"input_ids": [[9, 1, 2, 3, 4]], "attention_mask": [[0, 1, 1, 0, 1]], "offset": 6}
    answer = embed(tiny_http, "bert", **fields, truncate="right")
    assert answer.pop("truncated") == [1]
    assert answer == embed(tiny_http, "bert", input_ids=[[9, 1, 2, 3]], attention_mask=[[0, 1, 1, 0]], offset=6)


@pytest.mark.parametrize(
    ("model", "fields", "detail"),
    [
        ("gpt", {"text": "a"}, "text: got 'a'"),
        ("bert", {"text": ""}, "text: got ''"),
        ("bert", {"text": ["a", ""]}, "text[1]: got ''"),
        ("bert", {"text": []}, "text: got []"),
        ("bert", {"text": 3}, "text: got 3"),
        ("bert", {"text": [["a"]]}, "text[0]: got ['a']"),
        ("bert", {"text": "a", "input_ids": [[1]]}, "input_ids cannot be used with text"),
        *(
            ("bert", {"text": "a", name: [[1]]}, f"{name} cannot be used with text")
            for name in ("attention_mask", "position_ids", "token_type_ids")
        ),
        ("bert", {"text": "a", "return_tokens": 1}, "return_tokens: got 1"),
        ("bert", {"input_ids": [1], "return_tokens": True}, "return_tokens: got True"),
        ("bert", {"text": "a", "special_tokens": 1}, "special_tokens: got 1"),
        ("bert", {"input_ids": [1], "special_tokens": False}, "special_tokens: got False"),
        ("bert", {"text": "a", "truncate": "middle"}, "truncate: got middle"),
        ("bert", {"text": "a", "truncate": ["left"]}, "truncate: got ['left']"),
        (
            "bert",
            {"input_ids": [1], "position_ids": [0], "truncate": "left"},
            "truncate and position_ids exclude each other",
        ),
        ("bert", {"input_ids": [1], "offset": 8, "truncate": "left"}, "offset[0] + tokens: got 8 + 1 = 9"),
        ("bert", {"text": "a", "offset": 6, "truncate": "left"}, "offset[0] + tokens: got 6 + 3 = 9"),
        ("bert", {"text": "a", "offset": [0, 0]}, "offset: got 2 values"),
        ("bert", {"text": "a b c d e f g"}, "offset[0] + tokens: got 0 + 9 = 9"),
    ],
)
def test_invalid_text_request_is_rejected(
    tiny_http: httpx.Client, model: str, fields: dict[str, Any], detail: str
) -> None:
    status, found = refused(tiny_http, model, **fields)
    assert status == 422
    assert found.startswith(detail)


@pytest.mark.parametrize("accept", ["application/octet-stream", "application/x-npy"])
def test_return_tokens_in_binary_format_is_406(tiny_http: httpx.Client, accept: str) -> None:
    status, detail = refused(tiny_http, "bert", accept, text="a", return_tokens=True)
    assert status == 406
    assert detail.startswith(f"Accept: got {accept}")


@pytest.mark.parametrize("fields", [{"text": ["a"] * 513}, {"input_ids": [[1]] * 513, "truncate": "left"}])
def test_lengths_of_many_rows_in_npy_are_406(tiny_http: httpx.Client, fields: dict[str, Any]) -> None:
    status, detail = refused(tiny_http, "bert", "application/x-npy", **fields)
    assert status == 406
    assert detail.endswith("for text or truncate with more than 512 rows, to state their lengths")


def test_lone_surrogate_in_text_is_rejected(tiny_http: httpx.Client) -> None:
    response = tiny_http.post("/models/bert/embed", content=b'{"text": "\\ud800"}')
    assert response.status_code == 400


def test_too_many_characters_are_rejected(tiny_http: httpx.Client) -> None:
    status, detail = refused(tiny_http, "bert", text="a" * (2**20 + 1))
    assert (status, detail[:29]) == (413, "text: got 1048577 characters,")
