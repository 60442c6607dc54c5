"""The messages of a decode stream, described in `docs/decode.md`: frames, and JSON for steps that no frame can hold.

Letters: R rows, T tokens.
"""

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from preblock.client.errors import invalid
from preblock.client.results import ITEM_BYTES, Int64, Vectors, array_of
from preblock.client.token_ids import to_json

MAGIC, VERSION = b"PRBK", 2
HEADER = struct.Struct("<4sBBHIIIB3s")
STEP, VECTORS, ERROR, REWIND, REORDER, APPEND, DROP, PING, _, STATE, CLOSING = range(1, 12)
POSITIONS, MASK, OFFSETS, CONTEXT, AXES, ROWS, FURTHER = 1, 2, 4, 8, 16, 32, 256
MAX_FURTHER_INPUTS = 8
"""Further inputs that the flags of a step can name."""
DTYPES = {1: "float32", 2: "float16", 3: "bfloat16", 4: "int64", 5: "float8_e4m3fn"}
SEVERAL_DTYPES = 255
ANSWER_FIELDS = frozenset(
    ("model", "version", "dtype", "encoding", "use_as", "shape", "lengths", "next_offset", "next_context", "step")
)
"""Fields of an answer beside its output."""


@dataclass(frozen=True)
class AnswerFrame:
    """An answer of the service.

    Args:
        kind: VECTORS, ERROR, STATE or CLOSING.
        number: number of the answered message.
        offset: offset of each row.
        tensors: each output, (R, L, D) if all rows have one length, else (T, D).
        text: the problem document of an error, or the reason for closing.
        context: the ids before the next token of each row; None if no output depends on them.

    """

    kind: int
    number: int
    offset: list[int]
    tensors: list[Vectors]
    text: bytes
    context: list[list[int]] | None = None


def write_step(
    values: Mapping[str, Int64], lengths: Int64, number: int, offset: Sequence[int], indices: Sequence[str]
) -> bytes:
    """Return a step as a frame.

    Args:
        values: by input, int64 (T,): `input_ids`, and further inputs with a value for each token; `position_ids` of
            three axes are (3 * T,).
        lengths: int64 (R,), tokens of each row.
        number: number of the message, 1 or more.
        offset: expected offset of each row, checked by the service.
        indices: further inputs of the model, in the order of its manifest; only the first eight may have values.

    Raises:
        RequestError: the model has no such input.

    """
    flags = {"position_ids": POSITIONS, "position_rows": ROWS, "attention_mask": MASK}
    flags |= {name: FURTHER << index for index, name in enumerate(indices)}
    if len(values.get("position_ids", ())) > len(values["input_ids"]):
        flags["position_ids"] |= AXES
    for name in values.keys() - {"input_ids", *flags}:
        inputs = ", ".join(flags)
        raise invalid(name, "values", inputs, f"{name}: the model has no such input; it has {inputs}")
    given = [name for name in flags if name in values]
    stated = OFFSETS * (len(offset) == len(lengths))  # else the service reports the lengths it allows
    parts = [values["input_ids"], *(values[name] for name in given), *([np.array(offset)] if stated else [])]
    head = _header(STEP, sum(flags[name] for name in given) | stated, number, len(lengths), len(parts[0]))
    return b"".join((head, *(part.astype("<i8").tobytes() for part in parts), lengths.astype("<u4").tobytes()))


def write_move(kind: int, integers: Int64, number: int, context: Int64 | None = None) -> bytes:
    """Return an operation on rows other than a step as a frame: REWIND, REORDER, APPEND, DROP or PING.

    `context` holds the ids before appended rows, one row after another; None for none.
    """
    parts = [integers] if context is None else [integers, context]
    header = _header(kind, 0 if context is None else CONTEXT, number, len(integers), 0)
    return b"".join((header, *(part.astype("<i8").tobytes() for part in parts)))


def write_json_step(fields: Mapping[str, Any], number: int, offset: Sequence[int]) -> str:
    """Return a step as JSON.

    Args:
        fields: `input_ids` or `parts`, and further fields of the step.
        number: number of the message, 1 or more.
        offset: expected offset of each row, checked by the service.

    """
    return to_json({**fields, "step": number, "offset": [*offset] or None})


def _header(kind: int, flags: int, number: int, rows: int, tokens: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, kind, flags, number, rows, tokens, 0, bytes(3))


def read_answer(received: bytes) -> AnswerFrame:
    """Read an answer of either form; its tensors are writable.

    Raises:
        KeyError, TypeError, ValueError: it is no answer of a decode stream.

    """
    # After a message in JSON the service answers, and closes the stream, in JSON too.
    return _read_json(received) if received.startswith(b"{") else read_frame(received)


def read_frame(frame: bytes) -> AnswerFrame:
    """Read an answer; its tensors are writable.

    Raises:
        ValueError: the frame has another version, or a length other than its header states.

    """
    if len(frame) < HEADER.size:
        raise ValueError(f"a frame of {len(frame)} bytes")
    magic, version, kind, flags, number, rows, tokens, dtype, last = HEADER.unpack_from(frame)
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"frame: got magic {magic!r}, version {version}, expected magic {MAGIC!r}, version {VERSION}")
    if flags & ~CONTEXT or kind not in (VECTORS, ERROR, STATE, CLOSING):
        raise ValueError(repr(frame[:80]))
    if kind == ERROR:
        return AnswerFrame(kind, number, [], [], frame[HEADER.size :])
    at = HEADER.size + 8 * rows
    offset, context = np.frombuffer(frame, "<i8", rows, HEADER.size).tolist(), None
    if flags:
        context = np.frombuffer(frame, "<i8", rows * last[1], at).reshape(rows, last[1]).tolist()
        at += 8 * rows * last[1]
    if kind != VECTORS:
        return AnswerFrame(kind, number, offset, [], frame[at:], context)
    lengths = np.frombuffer(frame, "<u4", rows, at)
    widths = np.frombuffer(frame, "<u4", last[0], at + 4 * rows).tolist()
    at += 4 * rows + 4 * len(widths)
    codes = [dtype] * len(widths)
    if dtype == SEVERAL_DTYPES:
        codes = list(frame[at : at + len(widths)])
        at += len(widths)
    if not DTYPES.keys() >= set(codes) or int(lengths.sum()) != tokens:
        raise ValueError(f"a frame of types {codes} and {tokens} tokens in rows of {lengths.tolist()}")
    even = rows > 0 and (lengths == lengths[0]).all()
    leading = (rows, tokens // rows) if even else (tokens,)
    data = bytearray(memoryview(frame)[at:])  # a copy makes the vectors writable
    sizes = [tokens * width * ITEM_BYTES[DTYPES[code]] for code, width in zip(codes, widths, strict=True)]
    if len(data) != sum(sizes):
        raise ValueError(f"a frame of {len(data)} bytes of values for {tokens} tokens of {widths}")
    parts = [memoryview(data)[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
    tensors = [
        array_of(part, DTYPES[code], [*leading, width]) for part, code, width in zip(parts, codes, widths, strict=True)
    ]
    return AnswerFrame(kind, number, offset, tensors, b"", context)


def _read_json(message: bytes) -> AnswerFrame:
    """Read the JSON answer to a step, an error or a close message; its tensors are writable.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: the message is no such answer.

    """
    document = json.loads(message)
    number = document.get("step", 0)
    if "error" in document:
        return AnswerFrame(ERROR, number, [], [], json.dumps(document["error"]).encode())
    offset, context = document["next_offset"], document.get("next_context")
    if "closing" in document:
        return AnswerFrame(CLOSING, number, offset, [], document["closing"].encode(), context)
    if "outputs" in document:
        found = [(output["data"], output["dtype"], output["shape"]) for output in document["outputs"].values()]
    else:  # one output, under its name
        (name,) = document.keys() - ANSWER_FIELDS
        found = [(document[name], document["dtype"], document["shape"])]
    tensors = [array_of(bytearray(base64.b64decode(data)), dtype, shape) for data, dtype, shape in found]
    return AnswerFrame(VECTORS, number, offset, tensors, b"", context)
