"""The native API on a real server. Oracles: transformers and its tokenizer, the raw tables, the API given ids."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.api.http.native_requests import (
    BYTES,
    IDS,
    JSON,
    RAGGED,
    ask,
    post_json,
    told,
    vectors_of,
)
from tests.support.late import torch, transformers
from tests.support.protocols import Clients, native_bytes

BOTH = ["token_embeddings", "embeddings"]
Tables = dict[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def gpt2(tiny_tables: Tables) -> Any:
    """transformers' GPT-2 with the tables of the tiny `gpt`."""
    config = transformers.GPT2Config(
        vocab_size=7, n_embd=4, n_positions=6, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    model: Any = transformers.GPT2Model(config).eval()
    model.wte.weight.data.copy_(torch.from_numpy(tiny_tables["tokens"]))
    model.wpe.weight.data.copy_(torch.from_numpy(tiny_tables["positions"]))
    return model


def positions_of_generate(mask: Any, offset: int) -> Any:
    """Return positions as transformers' `generate()` counts them."""
    real = torch.tensor(mask)
    return (real.cumsum(-1) - 1 + offset).masked_fill(real == 0, 0)


def test_positions_equal_transformers(tiny_clients: Clients, gpt2: Any) -> None:
    ids = [[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]]
    masks = [
        [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
        [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]],
        [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]],
        [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]],
    ]
    placed: list[tuple[dict[str, Any], Any]] = [
        *(({"attention_mask": mask, "offset": 1}, positions_of_generate(mask, 1)) for mask in masks),
        *(({"position_ids": rows}, torch.tensor(rows)) for rows in ([[5, 0, 5, 1, 1]] * 2, [[2, 1, 0, 3, 4]] * 2)),
        ({"offset": 1}, torch.arange(1, 6).repeat(2, 1)),
        ({"offset": [0, 1]}, torch.stack([torch.arange(5), torch.arange(1, 6)])),
    ]
    for fields, positions in placed:
        with torch.inference_mode():
            states = gpt2(torch.tensor(ids), position_ids=positions, output_hidden_states=True).hidden_states
        found = native_bytes(tiny_clients, "gpt", {"input_ids": ids} | fields)
        assert found.tobytes() == states[0].numpy().tobytes(), fields


def test_answer_has_shape_lengths_and_names(tiny_http: httpx.Client) -> None:
    assert told(tiny_http, "gpt", input_ids=[1, 2, 3]) == told(tiny_http, "gpt", input_ids=[[1, 2, 3]])
    ragged = told(tiny_http, "gpt", input_ids=RAGGED, encoding="float")
    assert (ragged["shape"], ragged["lengths"], ragged["next_offset"]) == ([6, 4], [3, 1, 2], [3, 1, 2])
    assert np.array(ragged["embeddings"]).shape == (6, 4)
    answer = told(tiny_http, "bert", input_ids=[1, 2], dtype="float16", encoding="float")
    assert list(answer) == ["model", "version", "dtype", "encoding", "use_as", "shape", "embeddings", "next_offset"]
    assert (answer["model"], answer["version"], answer["dtype"], answer["encoding"]) == ("bert", 2, "float16", "float")
    assert answer["shape"] == [1, 2, 4]


def test_embed_uses_requested_version(tiny_http: httpx.Client) -> None:
    newest = told(tiny_http, "bert", input_ids=[1, 2])
    for version in (1, 2):
        named = told(tiny_http, f"bert/versions/{version}", input_ids=[1, 2])
        assert named["version"] == version
        assert (named["embeddings"] == newest["embeddings"]) == (version == 2)


def test_outputs_are_returned_under_their_names(tiny_http: httpx.Client, tiny_tables: Tables) -> None:
    for rows, positions in ((IDS, [0, 1, 2, 0, 1, 2]), ([[1], [2, 3]], [0, 0, 1])):
        tokens = tiny_tables["tokens"][np.concatenate(rows)]
        expected = {"embeddings": tokens + tiny_tables["positions"][positions], "token_embeddings": tokens}
        several = told(tiny_http, "gpt", input_ids=rows, output=BOTH)
        assert list(several["outputs"]) == BOTH
        for output in BOTH:
            assert vectors_of(several, output).tobytes() == expected[output].tobytes()
            one = told(tiny_http, "gpt", input_ids=rows, output=output)
            assert vectors_of(one, output).tobytes() == expected[output].tobytes()
            assert "outputs" not in one
            binary = ask(tiny_http, "gpt", BYTES, input_ids=rows, output=output)
            assert binary.content == expected[output].tobytes()
            told_by_headers = [binary.headers[f"Preblock-{name}"] for name in ("Output", "Use-As", "Model", "Version")]
            assert told_by_headers == [output, one["use_as"], "gpt", "1"]
            assert binary.headers["Preblock-Dtype"] == "float32"


def test_fields_may_stand_in_the_query(tiny_http: httpx.Client) -> None:
    both = told(tiny_http, "gpt", input_ids=[1], output=["embeddings", "token_embeddings"])
    assert told(tiny_http, "gpt", input_ids=[1], output="embeddings,token_embeddings") == both
    path = "/models/gpt/embed?output=embeddings,token_embeddings"
    assert tiny_http.post(path, json={"input_ids": [1]}).json() == both
    answer = tiny_http.post("/models/gpt/embed?offset=3&encoding=float", json={"input_ids": [1]})
    assert answer.json() == told(tiny_http, "gpt", input_ids=[1], offset=3, encoding="float")


def test_json_with_parameters_or_no_content_type_is_read(tiny_http: httpx.Client) -> None:
    form = "application/x-www-form-urlencoded"  # the default of `curl --data`
    for kind in (JSON, "application/json; charset=utf-8", "Application/JSON", form, None):
        headers = {} if kind is None else {"Content-Type": kind}
        assert tiny_http.post("/models/gpt/embed", content=b'{"input_ids": [1]}', headers=headers).status_code == 200


def test_problem_names_field_value_and_expected(tiny_http: httpx.Client) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": [[0], [1, 7]]}, headers={"X-Request-Id": "mine"})
    assert answer.json() == {
        "type": "urn:preblock:error:Invalid",
        "title": "Invalid",
        "status": 422,
        "detail": "input_ids[1][1]: got 7, expected 0 to 6",
        "field": "input_ids[1][1]",
        "got": "7",
        "expected": "0 to 6",
        "bad_indices": [1],
        "bad_count": 1,
        "request_id": "mine",
    }


def test_headers_of_rows_are_short(tiny_http: httpx.Client) -> None:
    """600 numbers for each row could be more than a client accepts; its own rows tell them."""
    for ids in ([[1, 2], [3, 4]], [[5, 6], [0, 1]], [[2, 2], [3, 3]]):  # the later ones are prepared
        response = tiny_http.post(
            "/models/gpt/embed?offset=[1,3]&shape=2,2",
            content=np.array(ids, "<i8").tobytes(),
            headers={"Content-Type": BYTES, "Accept": BYTES},
        )
        assert response.headers["Preblock-Next-Offset"] == "3,5"
    equal = post_json(tiny_http, "gpt", BYTES, input_ids=[[1]] * 600).headers
    assert equal["Preblock-Next-Offset"] == "1"  # one number stands for all rows
    ragged = post_json(tiny_http, "gpt", BYTES, input_ids=[[1] * (1 + row % 2) for row in range(600)]).headers
    assert ragged["Preblock-Shape"] == "900,4"
    assert not {"Preblock-Next-Offset", "Preblock-Lengths"} & set(ragged)


TEXTS = ["Hello, world!", "Ünïcödé 😀 naïve café", "the quick brown fox " * 60]


@pytest.fixture(scope="module")
def oracle(minilm_checkpoint: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(minilm_checkpoint)


def test_text_tokens_equal_transformers_tokenizer(model_http: httpx.Client, oracle: Any) -> None:
    expected = oracle(TEXTS, truncation=False, return_offsets_mapping=True)
    for text, ids in zip([*TEXTS, TEXTS], [*expected["input_ids"], expected["input_ids"]], strict=True):
        assert told(model_http, "minilm", text=text) == told(model_http, "minilm", input_ids=ids)
    answer = told(model_http, "minilm", text=TEXTS, return_tokens=True)
    assert answer["input_ids"] == expected["input_ids"]
    assert answer["spans"] == [[list(span) for span in row] for row in expected["offset_mapping"]]
    first, end = answer["spans"][1][3]
    assert TEXTS[1][first:end] == "naïve"


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_text_equals_transformers(model_http: httpx.Client, oracle: Any, side: str) -> None:
    texts = [" ".join(str(number) for number in range(2000, 2800)), "short"]
    oracle.truncation_side = side
    expected = oracle(texts, truncation=True, max_length=512)["input_ids"]
    whole = oracle(texts, truncation=False)["input_ids"]
    answer = told(model_http, "minilm", text=texts, truncate=side, return_tokens=True)
    assert answer["input_ids"] == expected
    assert answer["truncated"] == [len(whole[0]) - 512, 0]
    assert answer["embeddings"] == told(model_http, "minilm", input_ids=expected)["embeddings"]


def test_text_with_offset_equals_ids_with_offset(tiny_http: httpx.Client) -> None:
    expected = told(tiny_http, "bert", input_ids=[[1, 4, 5, 2]], offset=3)
    assert told(tiny_http, "bert", text="a b", offset=3) == expected
