"""Rows made of parts. Oracles: NumPy, and requests of token ids."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.api.http.native_requests import BYTES, Vectors, ask, encode, post, told, vectors_of
from tests.support.artifacts import copy_artifact
from tests.support.servers import serve

NAN, THREE = "AADAfwAAwH8AAMB/AADAfw==", "AAAAAAAAAAAAAAAA"
"""Four vectors that are not a number, and three numbers, for a model of width 4."""


def given(count: int, width: int = 4) -> Vectors:
    return np.random.default_rng(0).standard_normal((count, width), np.float32)


def test_parts_of_ids_are_the_row_of_all_ids(catalogue_http: httpx.Client) -> None:
    for model in ("gpt", "bert", "projected", "counts-ids", "wide"):
        answer = told(catalogue_http, model, parts=[{"input_ids": [1, 2]}, {"input_ids": [3]}, {"input_ids": [4, 5]}])
        assert answer == told(catalogue_http, model, input_ids=[1, 2, 3, 4, 5])
    further = {"context": [[7, 8]], "offset": 5, "output": "ngram_embeddings"}
    found = told(catalogue_http, "ngrams", parts=[{"input_ids": [1]}, {"input_ids": [2]}], **further)
    assert found == told(catalogue_http, "ngrams", input_ids=[[1, 2]], **further)
    text = {"text": "hello world", "special_tokens": False, "return_tokens": True}
    (tokens,) = told(catalogue_http, "bert", **text)["input_ids"]
    answer = told(catalogue_http, "bert", parts=[{"input_ids": [1]}, {"text": "hello world"}, {"input_ids": [2]}])
    assert answer == told(catalogue_http, "bert", input_ids=[1, *tokens, 2])


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_vectors_enter_unchanged_without_positions(catalogue_http: httpx.Client, model: str) -> None:
    values = given(3)
    row = [{"input_ids": [1, 2]}, {"vectors": encode(values)}, {"input_ids": [5]}]
    ids = vectors_of(told(catalogue_http, model, input_ids=[1, 2, 5]))[0]
    expected = np.concatenate([ids[:2], values, ids[2:]])
    for output in ("embeddings", "token_embeddings"):
        answer = told(catalogue_http, model, parts=row, output=output)
        assert vectors_of(answer, output)[0].tobytes() == expected.tobytes()
        assert answer["next_offset"] == [6]


def test_rotary_outputs_count_vectors_as_tokens(catalogue_http: httpx.Client) -> None:
    row = [{"input_ids": [1]}, {"vectors": encode(given(2))}, {"input_ids": [2]}]
    found = told(catalogue_http, "llama", parts=row, output="rotary_cos", offset=3)
    assert found == told(catalogue_http, "llama", input_ids=[1, 0, 0, 2], output="rotary_cos", offset=3)


def test_positions_are_added_to_vectors(catalogue_http: httpx.Client) -> None:
    values = given(2)
    row = [{"vectors": encode(values[:1])}, {"input_ids": [1, 2]}, {"vectors": encode(values[1:])}]
    answer = told(catalogue_http, "gpt", parts=row, offset=1)
    positions = catalogue_http.get("/models/gpt/positions", params={"first": 1, "count": 4}).json()
    expected = vectors_of(told(catalogue_http, "gpt", input_ids=[0, 1, 2, 0], offset=1))[0].copy()
    expected[[0, 3]] = values + vectors_of(positions, "position_embeddings")[[0, 3]]
    assert vectors_of(answer)[0].tobytes() == expected.tobytes()
    assert answer["next_offset"] == [5]
    tokens = vectors_of(told(catalogue_http, "gpt", parts=row, output="token_embeddings"), "token_embeddings")[0]
    assert tokens[[0, 3]].tobytes() == values.tobytes()


def test_large_answer_has_the_bits_of_small_ones(catalogue_http: httpx.Client) -> None:
    values = given(500, 768)
    ids = np.random.default_rng(2).integers(0, 50, 100).tolist()
    row = [{"vectors": encode(values[:250])}, {"input_ids": ids}, {"vectors": encode(values[250:])}]

    def ask_bytes(**fields: Any) -> bytes:
        return ask(catalogue_http, "wide", BYTES, dtype="float16", **fields).content

    whole, one = ask_bytes(parts=[row] * 4), ask_bytes(parts=[row[0]])
    size = 600 * 768 * 2
    assert len(whole) == 4 * size
    assert {whole[number * size :][: len(one)] for number in range(4)} == {one}
    assert whole[len(one) :].startswith(ask_bytes(input_ids=ids, offset=250))


def test_limits_and_padding_count_vectors(tmp_path: Path) -> None:
    folder = copy_artifact("counts-ids", tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"padding_id": 0}))
    limits = ("--max-request-rows", "1", "--max-request-tokens", "4")
    with serve(tmp_path, *limits) as server, httpx.Client(base_url=server.address) as http:
        parts: list[Any] = [{"input_ids": [5]}, {"vectors": encode(given(2))}]  # real tokens, unlike the id 0
        assert told(http, "counts-ids", parts=parts, output="token_embeddings")["next_offset"] == [3]
        long = [{"vectors": encode(given(5))}]
        for parts, detail in (([[GOOD]] * 2, "parts: got 2 rows"), (long, "parts: got more than 4 token")):
            answer = http.post("/models/counts-ids/embed", json={"parts": parts})
            assert (answer.status_code, answer.json()["detail"][: len(detail)]) == (413, detail)


GOOD = {"input_ids": [1]}
ONE = encode(given(1))
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"parts": []}, "parts"),
    ("llama", {"parts": [[]]}, "parts[0]"),
    *(("llama", {"parts": [part]}, "parts[0]") for part in ({}, {**GOOD, "text": "a"}, {"ids": [1]})),
    ("llama", {"parts": [{"input_ids": [1.5]}]}, "parts[0].input_ids[0]"),
    ("llama", {"parts": [{"input_ids": [1, 99]}]}, "input_ids[0][1]"),
    *((model, {"parts": [{"text": text}]}, "parts[0].text") for model, text in (("llama", "a"), ("bert", ""))),
    *(("llama", {"parts": [{"vectors": vectors}]}, "parts[0].vectors") for vectors in ("!", [1.0], "AAA=", NAN, THREE)),
    ("llama", {"parts": [GOOD], "truncate": "left"}, "truncate"),
    ("llama", {"parts": [GOOD], "input_ids": [1]}, "input_ids"),
    ("llama", {"parts": [GOOD], "placeholder": {"token_id": 1, "vectors": ""}}, "placeholder.vectors"),
    ("llama", {"parts": [GOOD, GOOD], "placeholder": {"token_id": 1, "vectors": ONE}}, "placeholder.vectors"),
    ("llama", {"input_ids": [1], "placeholder": {"token_id": 1, "vectors": "AAAAAA=="}}, "placeholder"),
    ("llama", {"parts": [GOOD], "placeholder": 5}, "placeholder"),
    ("llama", {"parts": [GOOD], "placeholder": {"token_id": "a"}}, "placeholder.token_id"),
    ("ngrams", {"parts": [GOOD, {"vectors": ONE}], "context": [[1, 2]], "output": "token_embeddings"}, "context"),
    ("gpt", {"parts": [{"input_ids": [1] * 6}, {"vectors": ONE}]}, "offset[0] + tokens"),
    ("bert", {"parts": [{"vectors": ONE}]}, "output"),
    ("gemma", {"parts": [{"vectors": ONE}], "output": "unscaled_token_embeddings"}, "output"),
]


def test_bad_parts_are_rejected(catalogue_http: httpx.Client) -> None:
    for model, fields, field in BAD:
        answer = catalogue_http.post(f"/models/{model}/embed", json=fields)
        assert (answer.status_code, answer.json()["field"]) == (422, field), (fields, answer.text)
    placeholder = {"placeholder": json.dumps({"token_id": 1, "vectors": ONE})}
    answer = post(catalogue_http, "llama", BYTES, np.array([1, 2, 3]).tobytes(), **placeholder)
    assert (answer.status_code, answer.json()["field"]) == (422, "placeholder"), answer.text
