"""Which outputs are given: the model's own lookup beside, or in place of, what enters block 0."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

IDS = [[1, 2, 3], [4, 5, 6]]
BOTH = ["token_embeddings", "embeddings"]
Tables = dict[str, NDArray[np.float32]]


def expected(tables: Tables) -> dict[str, NDArray[np.float32]]:
    """Return both outputs for IDS, from the raw tables of `gpt`."""
    tokens = tables["tokens"][np.array(IDS)]
    return {"embeddings": tokens + tables["positions"][:3], "token_embeddings": tokens}


def decoded(text: str, shape: list[int]) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)


@pytest.mark.parametrize("output", BOTH)
def test_single_output_is_returned_under_its_name(tiny_http: httpx.Client, tiny_tables: Tables, output: str) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": output}).json()
    assert decoded(answer[output], answer["shape"]).tobytes() == expected(tiny_tables)[output].tobytes()
    assert "outputs" not in answer
    headers = {"Accept": "application/octet-stream"}
    use = answer["use_as"]
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": output}, headers=headers)
    assert (answer.headers["Preblock-Output"], answer.headers["Preblock-Use-As"]) == (output, use)
    assert answer.content == expected(tiny_tables)[output].tobytes()


def test_multiple_outputs_are_returned_together(tiny_http: httpx.Client, tiny_tables: Tables) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": BOTH}).json()
    assert list(answer["outputs"]) == BOTH
    for name, output in answer["outputs"].items():
        assert decoded(output["data"], output["shape"]).tobytes() == expected(tiny_tables)[name].tobytes()


def test_unequal_rows_have_every_output(tiny_http: httpx.Client, tiny_tables: Tables) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": [[1], [2, 3]], "output": BOTH}).json()
    assert answer["lengths"] == [1, 2]
    found = answer["outputs"]["token_embeddings"]
    assert decoded(found["data"], found["shape"]).tobytes() == tiny_tables["tokens"][[1, 2, 3]].tobytes()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("x", "output: got x"),
        (1, "output: got 1"),
        ([], "output: got []"),
        (["embeddings", "embeddings"], "output: got ['embeddings', 'embeddings']"),
        ("rotary_cos", "output: got rotary_cos"),
    ],
)
def test_invalid_output_is_rejected(tiny_http: httpx.Client, output: Any, message: str) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": output})
    assert (answer.status_code, answer.json()["detail"][: len(message)]) == (422, message)


@pytest.mark.parametrize("media", ["application/octet-stream", "application/x-npy"])
def test_multiple_outputs_in_single_tensor_format_are_406(tiny_http: httpx.Client, media: str) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": BOTH}, headers={"Accept": media})
    assert answer.status_code == 406
    allowed = "application/json or application/x-safetensors for several outputs"
    assert answer.json()["detail"] == f"Accept: got {media}, expected {allowed}"
