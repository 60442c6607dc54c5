"""Bad requests of the native API: status and message of each."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import safetensors.numpy

from preblock.service.artifacts.names import DATA
from tests.service.api.http.native_requests import BYTES, IDS, JSON, NPY, SAFETENSORS, post, post_json, refusal
from tests.service.api.http.routes.test_embed_formats import npy
from tests.service.artifacts.broken_artifacts import seal
from tests.support.artifacts import copy_artifact
from tests.support.servers import serve

BOTH = ["token_embeddings", "embeddings"]
PROMPT = {"encoding": "prompt_embeds"}
BAD_JSON: list[tuple[str, dict[str, Any], str]] = [
    ("gpt", {"text": "a"}, "text: got 'a'"),
    ("bert", {"text": ""}, "text: got ''"),
    ("bert", {"text": []}, "text: got []"),
    ("bert", {"text": 3}, "text: got 3"),
    ("bert", {"text": "a", "token_type_ids": [[1]]}, "token_type_ids cannot be used with text"),
    ("bert", {"text": "a", "return_tokens": 1}, "return_tokens: got 1"),
    ("bert", {"input_ids": [1], "return_tokens": True}, "return_tokens: got True"),
    ("bert", {"text": "a", "special_tokens": 1}, "special_tokens: got 1"),
    ("bert", {"input_ids": [1], "special_tokens": False}, "special_tokens: got False"),
    ("bert", {"text": "a", "truncate": "middle"}, "truncate: got middle"),
    ("bert", {"text": "a", "truncate": ["left"]}, "truncate: got ['left']"),
    ("bert", {"input_ids": [1], "position_ids": [0], "truncate": "left"}, "truncate and position_ids exclude each"),
    ("bert", {"input_ids": [1], "offset": 8, "truncate": "left"}, "offset[0] + tokens: got 8 + 1 = 9"),
    ("bert", {"text": "a", "offset": 6, "truncate": "left"}, "offset[0] + tokens: got 6 + 3 = 9"),
    ("bert", {"text": "a", "offset": [0, 0]}, "offset: got 2 values"),
    ("bert", {"input_ids": [1], "pooling": "max"}, "pooling: got max"),
    ("bert", {"input_ids": [1], "pooling": "mean"} | PROMPT, "pooling: got mean"),
    ("gpt", {"input_ids": IDS, "output": "rotary_cos"}, "output: got rotary_cos"),
    ("gpt", {"input_ids": IDS, "output": 1}, "output: got 1"),
    ("gpt", {"input_ids": IDS, "output": []}, "output: got []"),
    ("gpt", {"input_ids": IDS, "output": ["embeddings"] * 2}, "output: got ['embeddings', 'embeddings']"),
]
BAD_QUERIES = [
    ("offset=1&offset=2", "the query has 2 values of offset"),
    ("offset=x", "offset: got x"),
    ("offset=", "offset: got ,"),
    ("nope=1", "unknown field nope"),
    ("input_ids=[1]", "input_ids is both in the query and in the body"),
]


def tensors(**values: list[Any]) -> bytes:
    return safetensors.numpy.save({name: np.array(value) for name, value in values.items()})


BAD_BODIES: list[tuple[str, bytes, dict[str, str], int, str]] = [
    (BYTES, bytes(9), {}, 400, "body: got 9 bytes"),
    (BYTES, b"", {}, 422, "input_ids shape: got (0,)"),
    (BYTES, bytes(48), {"shape": "2,2"}, 400, "body: got 6 values"),
    (BYTES, bytes(8), {"text": '"a"'}, 422, "input_ids cannot be used with text"),
    (NPY, npy(np.array([1, 2, 3, 4])), {"shape": "2,2"}, 422, "shape: got 2,2"),
    (JSON, b"null", {}, 400, "body: got null, expected a JSON object"),
    (JSON, b'{"text": "\\ud800"}', {}, 400, "body: not valid JSON"),
    (JSON, b'{"input_ids": [1]}', {"shape": "1"}, 422, "unknown field shape"),
    (JSON, b'{"input_ids": [1]}', {"lengths": "[1]"}, 422, "unknown field lengths"),
    (SAFETENSORS, bytes(8), {}, 400, "body: not a valid safetensors file (a header that is no JSON object), expected"),
    (SAFETENSORS, tensors(offset=[1]), {}, 422, "input_ids, text or parts is required: rows of token ids"),
    (SAFETENSORS, tensors(input_ids=[1], nope=[1]), {}, 422, "unknown field nope"),
    (SAFETENSORS, tensors(input_ids=[1, 7, 11], lengths=[2, 1]), {}, 422, "input_ids[1][0]: got 11"),
]
NOT_ACCEPTABLE: list[tuple[str, str, dict[str, Any], str]] = [
    ("gpt", NPY, {"input_ids": [1], "dtype": "bfloat16"}, f"{JSON} or {BYTES} or {SAFETENSORS} for bfloat16"),
    ("gpt", BYTES, {"input_ids": [1], "output": BOTH}, f"{JSON} or {SAFETENSORS} for several"),
    ("bert", NPY, {"text": "a", "return_tokens": True}, JSON),
    *(("gpt", media, {"input_ids": [1]} | PROMPT, JSON) for media in (BYTES, SAFETENSORS)),
]


def test_bad_json_is_rejected(tiny_http: httpx.Client) -> None:
    for model, fields, detail in BAD_JSON:
        status, found = refusal(post_json(tiny_http, model, **fields))
        assert (status, found[: len(detail)]) == (422, detail), fields
    status, found = refusal(post_json(tiny_http, "bert", text="a" * (2**20 + 1)))
    assert (status, found[:29]) == (413, "text: got 1048577 characters,")


def test_bad_query_is_rejected(tiny_http: httpx.Client) -> None:
    for query, detail in BAD_QUERIES:
        for kind, body in ((NPY, npy(np.array([1]))), (JSON, b'{"input_ids": [1]}')):
            response = tiny_http.post(f"/models/gpt/embed?{query}", content=body, headers={"Content-Type": kind})
            assert response.status_code in (400, 422)
            assert response.json()["detail"].startswith(detail), (query, kind)


def test_bad_body_is_rejected(tiny_http: httpx.Client) -> None:
    for kind, body, query, status, detail in BAD_BODIES:
        found = refusal(post(tiny_http, "bert", kind, body, **query))
        assert (found[0], found[1][: len(detail)]) == (status, detail), (kind, body)


def test_format_that_cannot_hold_the_answer_is_406(tiny_http: httpx.Client) -> None:
    for model, media, fields, expected in NOT_ACCEPTABLE:
        status, detail = refusal(post_json(tiny_http, model, media, **fields))
        assert (status, detail.startswith(f"Accept: got {media}, expected {expected}")) == (406, True), detail
    for many in ({"text": ["a"] * 513}, {"input_ids": [[1]] * 513, "truncate": "left"}):
        status, detail = refusal(post_json(tiny_http, "bert", NPY, **many))
        assert status == 406
        assert detail.endswith("for text or truncate with more than 512 rows, to state their lengths")


def test_infinite_numbers_are_refused_before_the_response(tmp_path: Path) -> None:
    """The export refuses an infinite value, an artifact may have it. The larger response is computed in chunks."""
    folder = copy_artifact("gpt-100x32x50", tmp_path, "gpt")
    data = bytearray((folder / DATA).read_bytes())
    data[:4] = np.float32(np.inf).tobytes()  # in the vector of id 0
    (folder / DATA).write_bytes(data)
    seal(folder)
    with serve(tmp_path) as server, httpx.Client(base_url=server.address) as http:
        for rows in (1, 256):
            ids = np.ones((rows, 50), np.int64)
            assert post_json(http, "gpt", JSON, input_ids=ids.tolist(), encoding="float").status_code == 200
            ids[-1, -1] = 0
            found = refusal(post_json(http, "gpt", JSON, input_ids=ids.tolist(), encoding="float"))
            assert (found[0], "infinite" in found[1]) == (422, True), found
