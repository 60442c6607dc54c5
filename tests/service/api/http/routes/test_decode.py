"""The streaming protocol on a real server. Oracles: one call of the native API, the raw tables, the layout in words."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from websockets import InvalidStatus

from tests.service.api.http.native_requests import BYTES, ask, told
from tests.service.api.http.streaming.frames import as_frame, as_text, head, step, stream_of, tell
from tests.support.decode_protocols import FRAME
from tests.support.protocols import ERROR, STEP, Clients, native_bytes


@pytest.mark.parametrize("model", ["gpt2-small", "minilm", "transformer-base"])
def test_decode_steps_equal_one_call_bit_for_bit(model_clients: Clients, model: str) -> None:
    ids = np.random.default_rng(0).integers(0, 30000, 30)
    expected = native_bytes(model_clients, model, {"input_ids": ids.tolist()}).tobytes()
    for kinds in ([as_text], [as_frame], [as_text, as_frame]):
        with stream_of(model_clients, model) as stream:
            parts = [
                kinds[number % len(kinds)](stream, input_ids=[part.tolist()]).tensors[0]
                for number, part in enumerate(np.split(ids, [1, 2, 7, 8, 28]))
            ]
        assert np.concatenate(parts).tobytes() == expected


def test_decode_frame_has_documented_layout(tiny_clients: Clients, tiny_tables: dict[str, Any]) -> None:
    with stream_of(tiny_clients, "gpt?offset=3") as stream:
        stream.send(step([[4, 5]], number=0xFFFFFFFE))
        frame = stream.recv()
    expected = tiny_tables["tokens"][[4, 5]] + tiny_tables["positions"][[3, 4]]
    assert frame == (
        b"PRBK"  # magic
        + bytes([2, 2, 0, 0])  # version 2, kind vectors, flags 0
        + struct.pack("<III", 0xFFFFFFFE, 1, 2)  # step, rows, tokens
        + bytes([1, 1, 0, 0])  # float32, one output
        + struct.pack("<q", 5)  # next offset
        + struct.pack("<I", 2)  # length of the row
        + struct.pack("<I", 4)  # width
        + expected.tobytes()
    )


def test_query_selects_offset_dtype_and_version(tiny_clients: Clients) -> None:
    fields: dict[str, Any] = {"input_ids": [1, 2], "offset": 2}
    for dtype, code in (("float32", 1), ("float16", 2), ("bfloat16", 3)):
        content = ask(tiny_clients.http, "gpt", BYTES, **fields, dtype=dtype).content
        with stream_of(tiny_clients, f"gpt?dtype={dtype}&offset=[2]") as stream:
            answer = tell(stream, input_ids=[1, 2])
            assert answer == told(tiny_clients.http, "gpt", **fields, dtype=dtype)
            tell(stream, rewind=2)
            stream.send(step([[1, 2]]))
            frame: Any = stream.recv()
        assert (frame[20], frame[FRAME.size + 16 :]) == (code, content)
    for version in (1, 2):
        with stream_of(tiny_clients, f"bert/versions/{version}") as stream:
            assert tell(stream, input_ids=[1])["version"] == version


BAD_TEXT = [
    ("", "body: not valid JSON"),
    ("[1]", "body: got a JSON list"),
    ("[" * 100_000, "body: not valid JSON (depth limit exceeded"),
    ("{}", "input_ids: got None"),
    ('{"input_ids": [[]]}', "input_ids[0]: got an empty row"),
    ('{"input_ids": [[1], [2]]}', "input_ids: got 2 rows"),
    ('{"input_ids": [7]}', "input_ids[0]: got 7"),
    ('{"input_ids": [1], "offset": 2}', "offset[0]: got 2"),
    ('{"input_ids": [1], "offset": [1, 1]}', "offset: got 2 values"),
    ('{"input_ids": [1], "attention_mask": [2]}', "attention_mask[0]: got 2"),
    ('{"input_ids": [1], "text": "a"}', "unknown field text"),
    ('{"input_ids": [1], "ping": true}', "unknown field input_ids"),
    ('{"input_ids": [1], "step": -1}', "step: got -1"),
    ('{"input_ids": [1], "step": 4294967296}', "step: got 4294967296"),
    ('{"input_ids": [1], "step": true}', "step: got True"),
    ('{"rewind": [0, 0]}', "rewind: got 2 values"),
    ('{"rewind": "0"}', "rewind: got '0'"),
    ('{"rewind": [9223372036854775808]}', "rewind[0]: got 9223372036854775808"),
    ('{"reorder": 0}', "reorder: got 0"),
    ('{"append": [7]}', "append: got 7"),
    ('{"ping": 1}', "ping: got 1"),
    ('{"open": {}}', "an open message must be the first message of its stream"),
    ('{"input_ids": [1], "token_type_ids": [0]}', "token_type_ids is not an input: this model has no segments"),
    ('{"input_ids": [0, 0, 0, 0, 0, 0]}', "offset[0] + tokens: got 1 + 6 = 7"),
]
BAD_FRAMES = [
    (step([[1]], 77, version=1), "frame: got magic b'PRBK', version 1"),
    (head(0, 1, 1, 77) + step([[1]])[FRAME.size :], "kind: got 0"),
    (head(STEP, 1, 1, 77, flags=8) + step([[1]])[FRAME.size :], "flags, dtype and last bytes: got 8, 0 and 000000"),
    (head(STEP, number=77), "input_ids: got 0 rows"),
    (head(STEP, 1, 1, 77) + bytes(8) + b"\2\0\0\0", "lengths: got 2 tokens in all"),
    (step([[-1]], 77), "input_ids[0][0]: got -1"),
    (step([[0] * 6], 77), "offset[0] + tokens: got 1 + 6 = 7"),
]


def test_bad_message_leaves_decode_stream_usable(tiny_clients: Clients) -> None:
    both = native_bytes(tiny_clients, "gpt", {"input_ids": [3, 5]}).tobytes()
    with stream_of(tiny_clients, "gpt") as stream:
        first = as_text(stream, input_ids=[[3]])
        for text, detail in BAD_TEXT:
            stream.send(text)
            error = json.loads(stream.recv())
            assert list(error) == ["error"], text
            assert error["error"]["detail"].startswith(detail), text
            assert error["error"]["status"] in (400, 409, 422)
        for frame, detail in BAD_FRAMES:
            stream.send(frame)
            answer: Any = stream.recv()
            assert answer[: FRAME.size] == head(ERROR, number=77)
            assert json.loads(answer[FRAME.size :])["detail"].startswith(detail), frame
        second = as_frame(stream, input_ids=[[5]])
    assert np.concatenate([*first.tensors, *second.tensors]).tobytes() == both


def test_bad_decode_handshake_is_rejected(tiny_clients: Clients) -> None:
    requests = [
        ("nope?", 404, "model: got nope"),
        ("gpt?offset=7", 422, "offset: got 7"),
        ("gpt?offset=9223372036854775807", 422, "offset: got 9223372036854775807"),
        ("gpt?offset=1.0", 422, "offset: got 1.0"),
        ("gpt?offset=[0,7]", 422, "offset[1]: got 7"),
        ("gpt?offset=[0,1]&rows=3", 422, "offset: got 2 values"),
        ("gpt?rows=-1", 422, "rows: got -1"),
        ("gpt?rows=1000000000000", 413, "rows: got 1000000000000 rows"),
        ("gpt?output=rotary_cos", 422, "output: got rotary_cos"),
        ("gpt?output=embeddings,embeddings", 422, "output: got"),
        ("gpt?offset=x", 400, "offset: got x"),
        ("gpt?offset=1&offset=2", 422, "the query has 2 values of offset; send one"),
        ("gpt?dtype=int8", 422, "dtype: got int8"),
        ("gpt?encoding=hex", 422, "encoding: got hex"),
        ("gpt?nope=1", 422, "unknown field nope"),
    ]
    for path, status, detail in requests:
        with pytest.raises(InvalidStatus) as refused:
            stream_of(tiny_clients, path)
        response = refused.value.response
        assert response.status_code == status, path
        assert response.headers["Content-Type"] == "application/problem+json"
        assert json.loads(response.body or b"")["detail"].startswith(detail), path
