"""Text at the native API, on a real server. Oracles: transformers' tokenizer, and the same protocol given ids."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.api.http.native_requests import told as embed
from tests.support.late import transformers

TEXTS = ["Hello, world!", "Ünïcödé 😀 naïve café", "the quick brown fox " * 60]


@pytest.fixture(scope="module")
def oracle(minilm_checkpoint: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(minilm_checkpoint)


def test_text_tokens_equal_transformers_tokenizer(model_http: httpx.Client, oracle: Any) -> None:
    expected = oracle(TEXTS, truncation=False, return_offsets_mapping=True)
    for text, ids in zip([*TEXTS, TEXTS], [*expected["input_ids"], expected["input_ids"]], strict=True):
        assert embed(model_http, "minilm", text=text) == embed(model_http, "minilm", input_ids=ids)
    answer = embed(model_http, "minilm", text=TEXTS, return_tokens=True)
    assert answer["input_ids"] == expected["input_ids"]
    assert answer["spans"] == [[list(span) for span in row] for row in expected["offset_mapping"]]
    first, end = answer["spans"][1][3]
    assert TEXTS[1][first:end] == "naïve"


def test_special_tokens_are_omitted_on_request(model_http: httpx.Client, oracle: Any) -> None:
    for special in (None, True, False):
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
    answer = embed(model_http, "minilm", text=texts, truncate=side, return_tokens=True)
    assert answer["input_ids"] == expected
    assert answer["truncated"] == [len(whole[0]) - 512, 0]
    assert answer["embeddings"] == embed(model_http, "minilm", input_ids=expected)["embeddings"]


def test_text_with_offset_equals_ids_with_offset(tiny_http: httpx.Client) -> None:
    expected = embed(tiny_http, "bert", input_ids=[[1, 4, 5, 2]], offset=3)
    assert embed(tiny_http, "bert", text="a b", offset=3) == expected


def test_ids_are_truncated_on_requested_side(tiny_http: httpx.Client) -> None:
    long = [[0, 1, 2, 3, 4, 5, 6, 0], [1]]
    requests: list[tuple[dict[str, Any], list[list[int]], list[int]]] = [
        ({"input_ids": long, "truncate": "right"}, [[0, 1, 2, 3, 4, 5], [1]], [2, 0]),
        ({"input_ids": long, "truncate": "left"}, [[2, 3, 4, 5, 6, 0], [1]], [2, 0]),
        ({"input_ids": [[1, 2, 3], [4, 5, 6]], "truncate": "left", "offset": [5, 3]}, [[3], [4, 5, 6]], [2, 0]),
        ({"input_ids": [1, 2], "truncate": "left"}, [[1, 2]], [0]),
    ]
    for fields, kept, truncated in requests:
        answer = embed(tiny_http, "gpt", **fields)
        assert answer.pop("truncated") == truncated
        assert answer == embed(tiny_http, "gpt", input_ids=kept, offset=fields.get("offset", 0))
