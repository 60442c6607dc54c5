"""Text, truncation, pooling and next offsets in every native format. Oracles: numpy, safetensors, the JSON answer."""

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from tests.service.api.http.native_requests import BYTES, JSON, NPY, SAFETENSORS, post, post_json, refusal

ROWS, EQUAL = [[1, 2, 3], [4]], [[1, 2, 3], [4, 5, 6]]
Vectors = NDArray[np.float32]


def ask(tiny: httpx.Client, accept: str, kind: str, fields: dict[str, Any], model: str = "bert") -> httpx.Response:
    """Send rows of ids as the content type `kind` with all other fields in the query, or everything as JSON."""
    rows = fields.get("input_ids")
    query = {
        name: value if name in ("pooling", "truncate", "output") else json.dumps(value)
        for name, value in fields.items()
        if name != "input_ids"
    }
    content = b""
    if kind == JSON:
        content, query = json.dumps(fields).encode(), {}
    elif rows is not None:
        ids = np.concatenate(rows).astype("<i8")
        query["lengths"] = json.dumps(list(map(len, rows)))
        content = {BYTES: ids.tobytes(), NPY: npy(ids), SAFETENSORS: safetensors.numpy.save({"input_ids": ids})}[kind]
    response = tiny.post(
        f"/models/{model}/embed", params=query, content=content, headers={"Accept": accept, "Content-Type": kind}
    )
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"] == accept
    return response


def npy(array: NDArray[Any], version: tuple[int, int] = (1, 0)) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version)
    return stream.getvalue()


def numbers(response: httpx.Response, name: str, rows: int) -> list[int] | None:
    """Return the numbers of a header for each row; one number stands for all rows."""
    text = response.headers.get(f"Preblock-{name}")
    if text is None:
        return None
    found = list(map(int, text.split(",")))
    return found * rows if len(found) == 1 else found


def read(response: httpx.Response, rows: int) -> tuple[Vectors, dict[str, list[int] | None]]:
    """Return the vectors of an answer, and its numbers for each row."""
    names = ("next_offset", "lengths", "truncated")
    media = response.headers["Content-Type"]
    if media == JSON:
        document = response.json()
        vectors = np.frombuffer(base64.b64decode(document["embeddings"]), "<f4").reshape(document["shape"])
        return vectors, {name: document.get(name) for name in names}
    if media == SAFETENSORS:
        tensors = safetensors.numpy.load(response.content)
        return tensors["embeddings"], {name: tensors[name].tolist() if name in tensors else None for name in names}
    shape = list(map(int, response.headers["Preblock-Shape"].split(",")))
    vectors = np.load(io.BytesIO(response.content)) if media == NPY else np.frombuffer(response.content, "<f4")
    found = {name: numbers(response, name.replace("_", "-").title(), rows) for name in names}
    return vectors.reshape(shape), found


@pytest.mark.parametrize("accept", [JSON, BYTES, NPY, SAFETENSORS])
@pytest.mark.parametrize("kind", [JSON, BYTES, NPY, SAFETENSORS])
@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": ROWS, "offset": [2, 0]},
        {"input_ids": [*ROWS, [1] * 9], "truncate": "right"},
        {"input_ids": ROWS, "pooling": "mean"},
        {"input_ids": ROWS, "pooling": "last", "offset": [1, 0]},
        {"text": ["a b c", "a"]},
        {"text": ["a b c d e f g", "a"], "truncate": "left"},
        {"text": "a b c", "pooling": "mean"},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_every_format_holds_same_response(
    tiny_http: httpx.Client, accept: str, kind: str, fields: dict[str, Any]
) -> None:
    rows = fields["input_ids"] if "input_ids" in fields else fields["text"]
    count = 1 if isinstance(rows, str) else len(rows)
    vectors, found = read(ask(tiny_http, accept, kind, fields), count)
    expected, told = read(tiny_http.post("/models/bert/embed", json=fields), count)
    assert vectors.tobytes() == expected.tobytes()
    assert vectors.shape == expected.shape
    if accept == SAFETENSORS and told["lengths"] is None:
        assert len(set(found.pop("lengths") or [])) == 1  # a file always holds the lengths
        del told["lengths"]
    assert found == told


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling_returns_one_vector_per_row(tiny_http: httpx.Client, pooling: str) -> None:
    rows = [read(tiny_http.post("/models/bert/embed", json={"input_ids": [row]}), 1)[0][0] for row in ROWS]
    expected = {
        "mean": [row.astype(np.float64).mean(0).astype(np.float32) for row in rows],
        "first": [row[0] for row in rows],
        "last": [row[-1] for row in rows],
    }
    answer = tiny_http.post("/models/bert/embed", json={"input_ids": ROWS, "pooling": pooling}).json()
    assert answer["shape"] == [2, 4]
    found = np.frombuffer(base64.b64decode(answer["embeddings"]), "<f4").reshape(2, 4)
    assert found.tobytes() == np.stack(expected[pooling]).tobytes()
    pooled = tiny_http.post("/v1/embeddings", json={"model": "bert", "input": ROWS, "pooling": pooling}).json()
    assert found.tobytes() == np.array([item["embedding"] for item in pooled["data"]], np.float32).tobytes()


def test_pooling_ignores_padding(tiny_http: httpx.Client) -> None:
    padded = {"input_ids": [[0, 1, 2]], "attention_mask": [[0, 1, 1]], "pooling": "mean"}
    alone = {"input_ids": [[1, 2]], "pooling": "mean"}
    first, second = (
        tiny_http.post("/models/bert/embed", json=fields).json()["embeddings"] for fields in (padded, alone)
    )
    assert first == second


def test_next_offset_header_continues_repeated_requests(tiny_http: httpx.Client) -> None:
    """The requests after the first are prepared."""
    for ids in ([[1, 2], [3, 4]], [[5, 6], [0, 1]], [[2, 2], [3, 3]]):
        response = tiny_http.post(
            "/models/gpt/embed?offset=[1,3]&shape=2,2",
            content=np.array(ids, "<i8").tobytes(),
            headers={"Content-Type": BYTES, "Accept": BYTES},
        )
        assert response.headers["Preblock-Next-Offset"] == "3,5"
    response = tiny_http.post("/models/gpt/embed", json={"input_ids": [[1]] * 600}, headers={"Accept": NPY})
    assert response.headers["Preblock-Next-Offset"] == "1"  # one number stands for all rows


def test_oversized_headers_are_omitted(tiny_http: httpx.Client) -> None:
    """600 numbers for each row could be more than a client accepts; its own rows tell them."""
    rows = [[1] * (1 + row % 2) for row in range(600)]
    response = tiny_http.post("/models/gpt/embed", json={"input_ids": rows}, headers={"Accept": BYTES})
    assert response.headers["Preblock-Shape"] == "900,4"
    assert not {"Preblock-Next-Offset", "Preblock-Lengths"} & set(response.headers)


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"input_ids": [1], "pooling": "max"}, "pooling: got max"),
        ({"input_ids": [1], "pooling": 1}, "pooling: got 1"),
        ({"input_ids": [1], "pooling": "mean", "encoding": "prompt_embeds"}, "pooling: got mean"),
    ],
)
def test_bad_pooling_is_rejected(tiny_http: httpx.Client, fields: dict[str, Any], detail: str) -> None:
    response = tiny_http.post("/models/bert/embed", json=fields)
    assert (response.status_code, response.json()["detail"][: len(detail)]) == (422, detail)


@pytest.mark.parametrize("output", ["embeddings,token_embeddings", ["embeddings", "token_embeddings"]])
def test_output_list_may_be_comma_separated_string(tiny_http: httpx.Client, output: Any) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": [1], "output": output}).json()
    assert list(answer["outputs"]) == ["embeddings", "token_embeddings"]
    if isinstance(output, str):
        query = tiny_http.post("/models/gpt/embed", params={"output": output}, json={"input_ids": [1]}).json()
        assert query == answer


def test_npy_of_any_integer_dtype_and_order_is_accepted(tiny_http: httpx.Client) -> None:
    arrays = [np.array(EQUAL, dtype) for dtype in ("int64", "int32", "int16", "int8", "uint8", "uint64", ">i8", ">i4")]
    expected = post_json(tiny_http, "gpt", input_ids=EQUAL).json()
    for body in (*map(npy, arrays), npy(np.array(EQUAL, order="F")), npy(np.array(EQUAL), version=(2, 0))):
        assert post(tiny_http, "gpt", NPY, body).json() == expected, body
    assert post(tiny_http, "gpt", NPY, npy(np.array([1, 2, 3]))).json()["shape"] == [1, 3, 4]


def test_json_request_takes_other_fields_from_query(tiny_http: httpx.Client) -> None:
    response = post(tiny_http, "gpt", JSON, b'{"input_ids": [1]}', offset="3", encoding="float")
    assert response.json() == post_json(tiny_http, "gpt", input_ids=[1], offset=3, encoding="float").json()


def test_bad_query_is_rejected(tiny_http: httpx.Client) -> None:
    for query, detail in (
        ("offset=1&offset=2", "the query has 2 values of offset"),
        ("offset=x", "offset: got x"),
        ("offset=", "offset: got ,"),
        ("nope=1", "unknown field nope"),
        ("input_ids=[1]", "input_ids is both in the query and in the body"),
    ):
        for kind, body in ((NPY, npy(np.array([1]))), (JSON, b'{"input_ids": [1]}')):
            response = tiny_http.post(f"/models/gpt/embed?{query}", content=body, headers={"Content-Type": kind})
            assert response.status_code in (400, 422)
            assert response.json()["detail"].startswith(detail), (query, kind)
    status, detail = refusal(post(tiny_http, "gpt", NPY, npy(np.array([1, 2, 3, 4])), shape="2,2"))
    assert (status, detail[:15]) == (422, "shape: got 2,2,")


def test_npy_with_bfloat16_is_not_acceptable(tiny_http: httpx.Client) -> None:
    status, detail = refusal(post_json(tiny_http, "gpt", NPY, input_ids=[1], dtype="bfloat16"))
    assert (status, detail) == (406, f"Accept: got {NPY}, expected {JSON} or {BYTES} or {SAFETENSORS} for bfloat16")


ACCEPTED = [
    ("", JSON),
    ("application/*", JSON),
    (BYTES, BYTES),
    ("APPLICATION/X-NPY", NPY),
    (f"text/html, {BYTES}", BYTES),
    (f"{JSON};q=0.5, {NPY};q=0.4, {BYTES};q=0.6", BYTES),
    (f"{JSON};q=0, {BYTES};q=0, */*;q=0.001", NPY),
    (f"application/*;q=0.1, {NPY};q=0.2", NPY),
    (f"{JSON}; charset=utf-8", JSON),
    (f"{BYTES} ; q=1.0 , {NPY}\t;\tq=0.9", BYTES),
    (SAFETENSORS, SAFETENSORS),
    (f"{JSON};q=0, {BYTES};q=0, {NPY};q=0, */*", SAFETENSORS),
]


def test_response_format_follows_accept(tiny_http: httpx.Client) -> None:
    for accept, media in ACCEPTED:
        assert post_json(tiny_http, "gpt", accept, input_ids=[1]).headers["Content-Type"] == media, accept
    for accept in ("text/html", f"{JSON};q=0", "*/*;q=0", "image/*", f"{JSON};q=x", f"{JSON};q=2"):
        response = post_json(tiny_http, "gpt", accept, input_ids=[1])
        assert (response.status_code, response.json()["title"]) == (406, "NotAcceptable"), accept
        assert response.json()["got"] == accept
    lines = [("Accept", "text/html"), ("Accept", NPY)]
    response = tiny_http.post("/models/gpt/embed", json={"input_ids": [1]}, headers=lines)
    assert response.headers["Content-Type"] == NPY
