"""Invalid messages of a decode stream, and the fields of their errors."""

import numpy as np

from tests.support.decode_protocols import FRAME
from tests.support.protocols import STEP

BAD_TEXT = [
    ("", "body: not valid JSON"),
    ("[1]", "body: got a JSON list"),
    ("[" * 100_000, "body: not valid JSON (depth limit exceeded"),
    ("{}", "input_ids: got None"),
    ('{"input_ids": []}', "input_ids: got []"),
    ('{"input_ids": [[]]}', "input_ids[0]: got an empty row"),
    ('{"input_ids": [[1], [2]]}', "input_ids: got 2 rows"),
    ('{"input_ids": [1.0]}', "input_ids[0]: got 1.0"),
    ('{"input_ids": [7]}', "input_ids[0]: got 7"),
    ('{"input_ids": [1], "offset": 2}', "offset[0]: got 2"),
    ('{"input_ids": [1], "offset": [1, 1]}', "offset: got 2 values"),
    ('{"input_ids": [1], "attention_mask": [2]}', "attention_mask[0]: got 2"),
    ('{"input_ids": [1], "text": "a"}', "unknown field text"),
    ('{"input_ids": [1], "ping": true}', "unknown field input_ids"),
    ('{"input_ids": [1], "step": -1}', "step: got -1"),
    ('{"input_ids": [1], "step": 4294967296}', "step: got 4294967296"),
    ('{"input_ids": [1], "step": true}', "step: got True"),
    ('{"rewind": 2}', "rewind: got 2"),
    ('{"rewind": [0, 0]}', "rewind: got 2 values"),
    ('{"rewind": "0"}', "rewind: got '0'"),
    ('{"rewind": [9223372036854775808]}', "rewind[0]: got 9223372036854775808"),
    ('{"reorder": [1]}', "reorder[0]: got 1"),
    ('{"reorder": 0}', "reorder: got 0"),
    ('{"append": [7]}', "append: got 7"),
    ('{"drop": [1]}', "drop[0]: got 1"),
    ('{"ping": 1}', "ping: got 1"),
    ('{"open": {}}', "an open message must be the first message of its stream"),
    ('{"input_ids": [1], "token_type_ids": [0]}', "token_type_ids is not an input: this model has no segments"),
    ('{"input_ids": [0, 0, 0, 0, 0, 0]}', "offset[0] + tokens: got 1 + 6 = 7"),
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
    (header(version=1) + BODY, "frame: got magic b'PRBK', version 1"),
    (header(kind=0) + BODY, "kind: got 0"),
    (header(flags=8) + BODY, "flags, dtype and last bytes: got 8, 0 and 000000"),
    (header(tokens=0, rows=0), "input_ids: got 0 rows"),
    (header() + BODY[:8] + b"\2\0\0\0", "lengths: got 2 tokens in all"),
    (header() + b"\xff" * 8 + BODY[8:], "input_ids[0][0]: got -1"),
    (header(tokens=6) + bytes(48) + b"\6\0\0\0", "offset[0] + tokens: got 1 + 6 = 7"),
]
