"""Invalid messages of a decode stream, and the fields of their errors."""

import numpy as np

from tests.support.decode_protocols import FRAME
from tests.support.protocols import ERROR, STEP, VECTORS

BAD_TEXT = [
    ("", "body: not valid JSON"),
    ("x", "body: not valid JSON"),
    ("[1]", "body: got a JSON list, expected a JSON object"),
    ("[" * 100_000, "body: not valid JSON (depth limit exceeded"),
    ("{}", "input_ids: got None, expected a list of integers"),
    ('{"input_ids": []}', "input_ids: got [], expected at least one row"),
    ('{"input_ids": [[]]}', "input_ids[0]: got an empty row, expected at least one id"),
    ('{"input_ids": [[1], [2]]}', "input_ids: got 2 rows, expected one row, as are running"),
    ('{"input_ids": [1.0]}', "input_ids[0]: got 1.0, expected a 64-bit integer"),
    ('{"input_ids": [7]}', "input_ids[0]: got 7, expected 0 to 6"),
    ('{"input_ids": [-1]}', "input_ids[0]: got -1, expected 0 to 6"),
    ('{"input_ids": [1], "offset": 2}', "offset[0]: got 2, expected 1, the offset of this row"),
    ('{"input_ids": [1], "offset": [1, 1]}', "offset: got 2 values, expected one value, or one for each of 1 rows"),
    ('{"input_ids": [1], "attention_mask": [2]}', "attention_mask[0]: got 2, expected 0 to 1"),
    ('{"input_ids": [1], "text": "a"}', "unknown field text; expected input_ids, position_ids, attention_mask"),
    ('{"input_ids": [1], "ping": true}', "unknown field input_ids; expected ping, step"),
    ('{"input_ids": [1], "step": -1}', "step: got -1, expected 0 to 4294967295"),
    ('{"input_ids": [1], "step": 4294967296}', "step: got 4294967296, expected 0 to 4294967295"),
    ('{"input_ids": [1], "step": true}', "step: got True, expected 0 to 4294967295"),
    ('{"rewind": 2}', "rewind: got 2, expected 0 to 1"),
    ('{"rewind": -1}', "rewind: got -1, expected 0 to 1"),
    ('{"rewind": [0, 0]}', "rewind: got 2 values, expected one value, or one for each of 1 rows"),
    ('{"rewind": "0"}', "rewind: got '0', expected a list of integers"),
    ('{"rewind": [9223372036854775808]}', "rewind[0]: got 9223372036854775808, expected a 64-bit integer"),
    ('{"reorder": [1]}', "reorder[0]: got 1, expected 0 to 0"),
    ('{"reorder": [0, -1]}', "reorder[1]: got -1, expected 0 to 0"),
    ('{"reorder": 0}', "reorder: got 0, expected a list of integers"),
    ('{"append": [7]}', "append: got 7, expected 0 to 6"),
    ('{"append": [0, -1]}', "append[1]: got -1, expected 0 to 6"),
    ('{"drop": [1]}', "drop[0]: got 1, expected 0 to 0"),
    ('{"ping": 1}', "ping: got 1, expected true"),
    ('{"close": false}', "close: got False, expected true"),
    ('{"open": {}}', "an open message must be the first message of its stream"),
    ('{"input_ids": [1], "token_type_ids": [0]}', "token_type_ids is not an input: this model has no segments"),
    ('{"input_ids": [0, 0, 0, 0, 0, 0]}', "offset[0] + tokens: got 1 + 6 = 7, expected at most 6"),
]


def header(
    magic: bytes = b"PRBK",
    version: int = 2,
    kind: int = STEP,
    flags: int = 0,
    rows: int = 1,
    tokens: int = 1,
    dtype: int = 0,
    width: bytes = bytes(3),
) -> bytes:
    return FRAME.pack(magic, version, kind, flags, 77, rows, tokens, dtype, width)


BODY = np.array([1], "<i8").tobytes() + np.array([1], "<u4").tobytes()
BAD_FRAMES = [
    (header(magic=b"KBRP") + BODY, "frame: got magic b'KBRP', version 2, expected magic b'PRBK', version 2"),
    (header(version=1) + BODY, "frame: got magic b'PRBK', version 1, expected magic b'PRBK', version 2"),
    (header(version=3) + BODY, "frame: got magic b'PRBK', version 3, expected magic b'PRBK', version 2"),
    (header(kind=0) + BODY, "kind: got 0, expected 1 (step)"),
    (header(kind=VECTORS) + BODY, "kind: got 2, expected 1 (step), 4 (rewind), 5 (reorder)"),
    (header(kind=ERROR) + BODY, "kind: got 3, expected 1 (step)"),
    (header(kind=255) + BODY, "kind: got 255, expected 1 (step)"),
    (header(flags=8) + BODY, "flags, dtype and width: got 8, 0 and 000000, expected flags 55 and 0 in a step"),
    (header(flags=0x8000) + BODY, "flags, dtype and width: got 32768, 0 and 000000, expected flags 55 and 0 in a step"),
    (header(dtype=1) + BODY, "flags, dtype and width: got 0, 1 and 000000, expected flags 55 and 0 in a step"),
    (header(width=b"\0\0\1") + BODY, "flags, dtype and width: got 0, 0 and 000001, expected flags 55 and 0 in a step"),
    (header() + BODY[:-1], "frame: got 35 bytes, expected 36 bytes for 1 tokens in 1 rows"),
    (header() + BODY + b"\0", "frame: got 37 bytes, expected 36 bytes for 1 tokens in 1 rows"),
    (header(), "frame: got 24 bytes, expected 36 bytes for 1 tokens in 1 rows"),
    (header(tokens=2**32 - 1, rows=2**32 - 1) + BODY, "frame: got 36 bytes, expected 51539607564 bytes"),
    (header(tokens=0, rows=0), "input_ids: got 0 rows, expected one row"),
    (header(tokens=0) + bytes(4), "input_ids[0]: got an empty row, expected at least one id"),
    (header(rows=2, tokens=2) + bytes(16) + b"\1\0\0\0\1\0\0\0", "input_ids: got 2 rows, expected one row"),
    (header() + BODY[:8] + b"\2\0\0\0", "lengths: got 2 tokens in all, expected 1, as the header says"),
    (header() + BODY[:8] + b"\xff\xff\xff\xff", "lengths: got 4294967295 tokens in all, expected 1"),
    (header() + b"\xff" * 8 + BODY[8:], "input_ids[0][0]: got -1, expected 0 to 6"),
    (header() + b"\x07" + BODY[1:], "input_ids[0][0]: got 7, expected 0 to 6"),
    (header(tokens=6) + bytes(48) + b"\6\0\0\0", "offset[0] + tokens: got 1 + 6 = 7, expected at most 6"),
]
