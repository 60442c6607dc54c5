"""Binary frames of a decode stream, little-endian and without padding.

Every frame begins with 24 bytes:

    bytes   field      version 2                                                version 1
    0-3     magic      "PRBK"
    4       version    2                                                        1
    5       kind       see below                                                1 step, 2 vectors, 3 error
    6-7     flags      of a step: its optional parts; 8: contexts; else 0       0
    8-11    step       0, or an ascending number of the client; the answer      any number; the answer
                       repeats it                                               repeats it
    12-15   rows       R, number of rows, or of integers
    16-19   tokens     T, number of tokens of all rows
    20      dtype      of vectors: 1 float32, 2 float16, 3 bfloat16, 4 int64, 5 float8_e4m3fn, 255 several;
                       0 in other frames
    21-23              of vectors: N, the number of outputs; else 0. From the   width D of vectors; else 0
                       server with flag 8: H, ids of a context; else 0. Then 0

Version 2, from the client:
    1   step       ids int64 (T); with flag 1 position_ids int64 (T); with flags 1 and 16 also positions of height and
                   width int64 (2, T); with flag 32 position_rows int64 (T); with flag 2 attention_mask int64 (T); with
                   flag 256 << i the i-th of the model's first 8 further inputs int64 (T), in the order of its manifest;
                   with flag 4 the offsets of the rows as the client knows them, int64 (R); lengths of the rows
                   uint32 (R)
    4   rewind     offsets int64 (R), one or one for each row
    5   reorder    for each new row, the number of the old row, int64 (R)
    6   append     offsets of the new rows int64 (R); with flag 8 the H ids before each, int64 (R, H)
    7   drop       rows int64 (R)
    8   ping, or 9 close

and from the server:
    2   vectors    next offsets int64 (R), lengths uint32 (R), widths uint32 (N), with dtype 255 the dtype of each
                   output uint8 (N), each output (T, width) in its dtype
    3   error      the problem as UTF-8 JSON
    10  state      next offsets int64 (R): the answer to kinds 4 to 8
    11  closing    next offsets int64 (R), then the reason as UTF-8: the last frame

With flag 8, the next contexts int64 (R, H) follow the next offsets: an output of the stream depends on earlier ids.

Version 1 has one output. Its step holds ids int64 (T), lengths uint32 (R); its vectors next offsets int64 (R), lengths
uint32 (R), vectors (T, D) in `dtype`. A reader rejects unknown kinds and flags, to leave them free for later versions.
"""

import struct
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal

import numpy as np

from preblock.service.codecs.chunks import raw_bytes
from preblock.service.codecs.decode_json import digest
from preblock.service.codecs.token_rows import token_inputs
from preblock.service.core.decode_ops import BARE_OPS, INTEGER_OPS, DecodeMessage, Operation, RunningRows, StepOp
from preblock.service.core.errors import Invalid, Malformed
from preblock.service.core.results import EmbedResult
from preblock.service.core.types import POSITION_ROWS, TokenRows

MAGIC = b"PRBK"
HEADER = struct.Struct("<4sBBHIIIB3s")
STEP, VECTORS, ERROR, REWIND, REORDER, APPEND, DROP, PING, CLOSE, STATE, CLOSING = range(1, 12)
POSITIONS_FLAG, MASK_FLAG, OFFSETS_FLAG, CONTEXT_FLAG, AXES_FLAG, ROWS_FLAG, INDICES_FLAG = 1, 2, 4, 8, 16, 32, 256
MAX_FURTHER_INPUTS = 8
"""Further inputs that the 16 bits of the flags can name; JSON messages have no such limit."""
AXES = ("position_ids[1]", "position_ids[2]")
NO_WIDTH = bytes(3)
DTYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3, "int64": 4, "float8_e4m3fn": 5}
SEVERAL_DTYPES = 255
NAMES = {STEP: "step"} | dict(enumerate(("rewind", "reorder", "append", "drop", "ping", "close"), REWIND))
KINDS = {1: (STEP,), 2: tuple(NAMES)}
"""Kinds of a client's frames, by version."""


def read_frame(frame: bytes, indices: Iterable[str] = (), history: int = 0) -> DecodeMessage:
    """Read a client's frame; `indices` names the further inputs of the model, in the order of its manifest.

    `history` is the number of ids of a context; 0 for a stream without contexts.

    Raises:
        Malformed: an unknown magic or version, or another size than declared.
        Invalid: an unknown kind or flag.

    """
    if len(frame) < HEADER.size:
        raise Malformed("frame", f"{len(frame)} bytes", f"a header of {HEADER.size} bytes and its declared parts")
    magic, version, kind, flags, number, rows, tokens, dtype, width = HEADER.unpack_from(frame)
    if magic != MAGIC or version not in KINDS:
        raise Malformed("frame", f"magic {magic!r}, version {version}", f"magic {MAGIC!r}, version 1 or 2")
    if kind not in KINDS[version]:
        raise Invalid("kind", kind, ", ".join(f"{code} ({NAMES[code]})" for code in KINDS[version]))
    parts = _step_flags(tuple(indices)) if version == 2 and kind == STEP else {}
    if history and kind == APPEND:
        parts = {"context": CONTEXT_FLAG}
    known_flags = sum(parts.values())
    if flags & ~known_flags or dtype or width != NO_WIDTH:
        known = f"flags {known_flags} and 0" if parts else "0"
        raise Invalid("flags, dtype and width", f"{flags}, {dtype} and {width.hex()}", f"{known} in a {NAMES[kind]}")
    if kind == STEP:
        operation: Operation = _read_step(frame, rows, tokens, [name for name, flag in parts.items() if flags & flag])
    else:
        operation = _read_operation(frame, NAMES[kind], rows, tokens, history if flags else 0)
    # The number of version 1 is an echo and does not mark repetitions.
    return DecodeMessage(operation) if version == 1 or not number else DecodeMessage(operation, number, digest(frame))


def write_header(
    version: int, kind: int, number: int, rows: int = 0, tokens: int = 0, dtype: int = 0, last: bytes = NO_WIDTH
) -> bytes:
    """Write the header of a frame from the server; `last` are its last three bytes."""
    flags = CONTEXT_FLAG if version == 2 and last[1] else 0
    return HEADER.pack(MAGIC, version, kind, flags, number, rows, tokens, dtype, last)


def describe_outputs(version: int, widths: list[int], codes: list[int], history: int) -> tuple[int, bytes, bytes]:
    """Return the type and the last bytes of the header of vectors, and the part of the frame after the lengths."""
    several = len(set(codes)) > 1
    last = widths[0].to_bytes(3, "little") if version == 1 else bytes((len(widths), history, 0))
    end = b"" if version == 1 else struct.pack(f"<{len(widths)}I", *widths)
    return (SEVERAL_DTYPES if several else codes[0]), last, end + (bytes(codes) if several else b"")


@cache
def _step_flags(indices: tuple[str, ...]) -> Mapping[str, int]:
    """Return the flag of each optional part of a step, in their order in the frame."""
    further = {name: INDICES_FLAG << index for index, name in enumerate(indices[:MAX_FURTHER_INPUTS])}
    positions = {"position_ids": POSITIONS_FLAG, "position_ids[1:]": AXES_FLAG, POSITION_ROWS: ROWS_FLAG}
    return {**positions, "attention_mask": MASK_FLAG, **further, "offset": OFFSETS_FLAG}


def _read_step(frame: bytes, rows: int, tokens: int, parts: list[str]) -> StepOp:
    stated = "offset" in parts
    if "position_ids[1:]" in parts and "position_ids" not in parts:
        raise Invalid("flags", AXES_FLAG, f"{POSITIONS_FLAG | AXES_FLAG}, for positions of three axes")
    per_token = [one for name in parts for one in (AXES if name == "position_ids[1:]" else (name,)) if name != "offset"]
    at = HEADER.size + 8 * tokens * (1 + len(per_token)) + 8 * rows * stated
    _check_size(frame, at + 4 * rows, rows, tokens)
    lengths = np.frombuffer(frame, "<u4", rows, at).astype(np.int64)
    if int(lengths.sum()) != tokens:
        raise Malformed("lengths", f"{int(lengths.sum())} tokens in all", f"{tokens}, as the header says")
    # Copies, because the frame need not align its values.
    values = {
        name: TokenRows(np.frombuffer(frame, "<i8", tokens, HEADER.size + 8 * tokens * index).astype(np.int64), lengths)
        for index, name in enumerate(["input_ids", *per_token])
    }
    offset = np.frombuffer(frame, "<i8", rows, at - 8 * rows).astype(np.int64) if stated else None
    further = tuple(values.pop(name) for name in AXES if name in values)
    return StepOp(offset=offset, further_positions=further, **token_inputs(values))


def _read_operation(frame: bytes, name: str, rows: int, tokens: int, history: int) -> Operation:
    _check_size(frame, HEADER.size + 8 * rows * (1 + history), rows, 0)
    if tokens or (rows and name in BARE_OPS):
        nothing = "rows and tokens" if name in BARE_OPS else "tokens"
        raise Malformed("frame", f"{rows} rows and {tokens} tokens", f"no {nothing} in a {name}")
    if name in BARE_OPS:
        return BARE_OPS[name]()
    values = np.frombuffer(frame, "<i8", rows * (1 + history), HEADER.size).astype(np.int64)
    context = TokenRows.of_array(values[rows:].reshape(rows, history)) if history else None
    return INTEGER_OPS[name](values[:rows], context)


def _check_size(frame: bytes, declared: int, rows: int, tokens: int) -> None:
    if len(frame) != declared:
        raise Malformed("frame", f"{len(frame)} bytes", f"{declared} bytes for {tokens} tokens in {rows} rows")


def read_header(frame: bytes) -> tuple[Literal[1, 2], int]:
    """Return the version for the answer to a frame, and the client's number; 1 and 0 for a broken frame."""
    if len(frame) < HEADER.size:
        return 1, 0
    _, version, _, _, number, *_ = HEADER.unpack_from(frame)
    return (2 if version == 2 else 1), int(number)


def write_vectors(answer: EmbedResult, number: int, version: int = 2) -> bytes:
    """Write the vectors of a step.

    Raises:
        Invalid: several outputs, or contexts, in version 1.

    """
    tensors = list(answer.arrays.values())
    if version == 1 and len(tensors) > 1:
        raise Invalid("output", list(answer.arrays), "one output, or frames of version 2")
    widths = [tensor.shape[-1] for tensor in tensors]
    history = 0 if answer.next_context is None else answer.next_context.shape[1]
    if version == 1 and history:
        raise Invalid("version", 1, f"2, since {', '.join(answer.arrays)} depend on earlier ids")
    rows, tokens = len(answer.lengths), int(answer.lengths.sum())
    codes = [DTYPE_CODES[tensor.dtype.name] for tensor in tensors]
    dtype, last, end = describe_outputs(version, widths, codes, history)
    return b"".join(
        (
            write_header(version, VECTORS, number, rows, tokens, dtype, last),
            _write_rows(RunningRows(answer.next_offset, answer.next_context)),
            answer.lengths.astype("<u4").tobytes(),
            end,
            *map(raw_bytes, tensors),
        )
    )


def write_state(running: RunningRows, number: int = 0) -> bytes:
    """Write the offsets and contexts of the rows."""
    return _state_header(STATE, number, running) + _write_rows(running)


def write_closing(running: RunningRows, reason: str) -> bytes:
    """Write the last frame of a stream: the offsets and contexts of the rows, and the reason."""
    return _state_header(CLOSING, 0, running) + _write_rows(running) + reason.encode()


def _state_header(kind: int, number: int, running: RunningRows) -> bytes:
    history = 0 if running.context is None else running.context.shape[1]
    return write_header(2, kind, number, len(running.offset), last=bytes((0, history, 0)))


def _write_rows(running: RunningRows) -> bytes:
    context = b"" if running.context is None else running.context.astype("<i8").tobytes()
    return running.offset.astype("<i8").tobytes() + context


def write_error(problem: bytes, number: int, version: int = 2) -> bytes:
    """Write an error; `problem` is JSON in UTF-8."""
    return write_header(version, ERROR, number) + problem
