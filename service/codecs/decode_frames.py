"""Binary frames of a decode stream, little-endian and without padding.

Every frame begins with 24 bytes:

    bytes   field      value
    0-3     magic      "PRBK"
    4       version    2
    5       kind       see below
    6-7     flags      of a step: its optional parts; 8: contexts; else 0
    8-11    step       0, or an ascending number of the client; the answer repeats it
    12-15   rows       R, number of rows, or of integers
    16-19   tokens     T, number of tokens of all rows
    20      dtype      of vectors: 1 float32, 2 float16, 3 bfloat16, 4 int64, 5 float8_e4m3fn, 255 several;
                       0 in other frames
    21-23              of vectors: N, the number of outputs; else 0. From the server with flag 8: H, ids of a context;
                       else 0. Then 0

From the client:
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

From the server:
    2   vectors    next offsets int64 (R), lengths uint32 (R), widths uint32 (N), with dtype 255 the dtype of each
                   output uint8 (N), each output (T, width) in its dtype
    3   error      the problem as UTF-8 JSON
    10  state      next offsets int64 (R): the answer to kinds 4 to 8
    11  closing    next offsets int64 (R), then the reason as UTF-8: the last frame

With flag 8, the next contexts int64 (R, H) follow the next offsets: an output of the stream depends on earlier ids.

A reader rejects unknown kinds and flags, to leave them free for later versions.

Simple steps have rows of one length, and no optional part except offsets. The fast path answers them.
"""

import struct
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from preblock.service.codecs.chunks import raw_bytes
from preblock.service.codecs.decode_json import digest
from preblock.service.codecs.token_rows import token_inputs
from preblock.service.core.decode_ops import BARE_OPS, INTEGER_OPS, DecodeMessage, Operation, RunningRows
from preblock.service.core.errors import Invalid, Malformed
from preblock.service.core.types import POSITION_ROWS, EmbedResult, Int64, TokenRequest, TokenRows

MAGIC, VERSION = b"PRBK", 2
HEADER = struct.Struct("<4sBBHIIIB3s")
STEP, VECTORS, ERROR, REWIND, REORDER, APPEND, DROP, PING, CLOSE, STATE, CLOSING = range(1, 12)
POSITIONS_FLAG, MASK_FLAG, OFFSETS_FLAG, CONTEXT_FLAG, AXES_FLAG, ROWS_FLAG, INDICES_FLAG = 1, 2, 4, 8, 16, 32, 256
MAX_FURTHER_INPUTS = 8
"""Further inputs that the 16 bits of the flags can name; JSON messages have no such limit."""
AXES = ("position_ids[1]", "position_ids[2]")
NO_LAST = bytes(3)
DTYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3, "int64": 4, "float8_e4m3fn": 5}
SEVERAL_DTYPES = 255
NAMES = {STEP: "step"} | dict(enumerate(("rewind", "reorder", "append", "drop", "ping", "close"), REWIND))
"""Names of a client's frames, by kind."""
INT64 = np.dtype("<i8")
MAX_SIMPLE_STEP_BYTES = 2**16
"""The fast path gains nothing for longer frames."""
OutputForms = tuple[tuple[int, str], ...]
"""Width and type of each output."""


def read_frame(frame: bytes, indices: Iterable[str] = (), history: int = 0) -> DecodeMessage:
    """Read a client's frame; `indices` names the further inputs of the model, in the order of its manifest.

    `history` is the number of ids of a context; 0 for a stream without contexts.

    Raises:
        Malformed: an unknown magic or version, or another size than declared.
        Invalid: an unknown kind or flag.

    """
    if len(frame) < HEADER.size:
        raise Malformed("frame", f"{len(frame)} bytes", f"a header of {HEADER.size} bytes and its declared parts")
    magic, version, kind, flags, number, rows, tokens, dtype, last = HEADER.unpack_from(frame)
    if (magic, version) != (MAGIC, VERSION):
        raise Malformed("frame", f"magic {magic!r}, version {version}", f"magic {MAGIC!r}, version {VERSION}")
    if kind not in NAMES:
        raise Invalid("kind", kind, ", ".join(f"{code} ({name})" for code, name in NAMES.items()))
    parts = _step_flags(tuple(indices)) if kind == STEP else {}
    if history and kind == APPEND:
        parts = {"context": CONTEXT_FLAG}
    known_flags = sum(parts.values())
    if flags & ~known_flags or dtype or last != NO_LAST:
        known = f"flags {known_flags} and 0" if parts else "0"
        raise Invalid(
            "flags, dtype and last bytes", f"{flags}, {dtype} and {last.hex()}", f"{known} in a {NAMES[kind]}"
        )
    if kind == STEP:
        operation: Operation = _read_step(frame, rows, tokens, [name for name, flag in parts.items() if flags & flag])
    else:
        operation = _read_operation(frame, NAMES[kind], rows, tokens, history if flags else 0)
    return DecodeMessage(operation, number, digest(frame)) if number else DecodeMessage(operation)


@cache
def _step_flags(indices: tuple[str, ...]) -> Mapping[str, int]:
    """Return the flag of each optional part of a step, in their order in the frame."""
    further = {name: INDICES_FLAG << index for index, name in enumerate(indices[:MAX_FURTHER_INPUTS])}
    positions = {"position_ids": POSITIONS_FLAG, "position_ids[1:]": AXES_FLAG, POSITION_ROWS: ROWS_FLAG}
    return {**positions, "attention_mask": MASK_FLAG, **further, "offset": OFFSETS_FLAG}


def _read_step(frame: bytes, rows: int, tokens: int, parts: list[str]) -> TokenRequest:
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
    return TokenRequest(offset=offset, further_positions=further, **token_inputs(values))


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


def read_number(frame: bytes) -> int:
    """Return the client's number of a frame, which may be broken; 0 for a shorter frame than a header."""
    return int.from_bytes(frame[8:12], "little") if len(frame) >= HEADER.size else 0


def write_vectors(answer: EmbedResult, number: int) -> bytes:
    """Write the vectors of a step."""
    tensors = list(answer.arrays.values())
    forms = tuple((tensor.shape[-1], tensor.dtype.name) for tensor in tensors)
    running = RunningRows(answer.next_offset, answer.next_context)
    rows, tokens = len(answer.lengths), int(answer.lengths.sum())
    dtype, last, end = _describe_outputs(forms, running.history)
    header = _write_header(VECTORS, number, rows, tokens, dtype, last)
    lengths = answer.lengths.astype("<u4").tobytes()
    return b"".join((header, _write_rows(running), lengths, end, *map(raw_bytes, tensors)))


def write_state(running: RunningRows, number: int = 0) -> bytes:
    """Write the offsets and contexts of the rows."""
    return _state_header(STATE, number, running) + _write_rows(running)


def write_closing(running: RunningRows, reason: str) -> bytes:
    """Write the last frame of a stream: the offsets and contexts of the rows, and the reason."""
    return _state_header(CLOSING, 0, running) + _write_rows(running) + reason.encode()


def write_error(problem: bytes, number: int) -> bytes:
    """Write an error; `problem` is JSON in UTF-8."""
    return _write_header(ERROR, number) + problem


def _write_header(
    kind: int, number: int, rows: int = 0, tokens: int = 0, dtype: int = 0, last: bytes = NO_LAST
) -> bytes:
    """Write the header of a frame from the server; `last` are its last three bytes."""
    flags = CONTEXT_FLAG if last[1] else 0
    return HEADER.pack(MAGIC, VERSION, kind, flags, number, rows, tokens, dtype, last)


def _state_header(kind: int, number: int, running: RunningRows) -> bytes:
    return _write_header(kind, number, len(running.offset), last=bytes((0, running.history, 0)))


def _describe_outputs(forms: OutputForms, history: int) -> tuple[int, bytes, bytes]:
    """Return the type and the last bytes of the header of vectors, and the part of the frame after the lengths."""
    codes = [DTYPE_CODES[dtype] for _, dtype in forms]
    several = len(set(codes)) > 1
    widths = struct.pack(f"<{len(forms)}I", *(width for width, _ in forms))
    last = bytes((len(forms), history, 0))
    return (SEVERAL_DTYPES if several else codes[0]), last, widths + (bytes(codes) if several else b"")


def _write_rows(running: RunningRows) -> bytes:
    context = b"" if running.context is None else running.context.astype("<i8").tobytes()
    return running.offset.astype("<i8").tobytes() + context


class SimpleStepShape(NamedTuple):
    """The common part of simple steps with the same header and size: R rows of L ids each.

    Args:
        rows: R.
        length: L.
        offset_size: number of bytes of the client's offsets, or 0.
        lengths: last bytes of the frame, the lengths of the rows.
        advance: int64 (1,), L, for the growth of the offsets.

    """

    rows: int
    length: int
    offset_size: int
    lengths: bytes
    advance: Int64


class SimpleStep(NamedTuple):
    """A step with rows of one length, and no optional part except offsets.

    Args:
        shape: the part in common with other steps.
        number: the client's number of the step, or 0.
        ids: int64 (R, L).
        offset: the client's offsets as int64 bytes (R,), or empty.

    """

    shape: SimpleStepShape
    number: int
    ids: Int64
    offset: bytes


def read_simple_step(frame: bytes) -> SimpleStep | None:
    """Read a simple step; return None for any other frame, which `read_frame` then reads or rejects."""
    # Clients repeat the same header with another number.
    shape = _simple_step_shape(frame[:8], frame[12 : HEADER.size], len(frame))
    if shape is None or not frame.endswith(shape.lengths):
        return None
    ids: Int64 = np.ndarray((shape.rows, shape.length), INT64, frame, HEADER.size)
    until = len(frame) - len(shape.lengths)
    return SimpleStep(shape, int.from_bytes(frame[8:12], "little"), ids, frame[until - shape.offset_size : until])


@lru_cache  # entries are small: shorter than their frames
def _simple_step_shape(first: bytes, last: bytes, size: int) -> SimpleStepShape | None:
    """Return the common part of simple steps with a header of `first`, a number and `last`; None for other frames."""
    header = first + bytes(4) + last
    if len(header) < HEADER.size or size > MAX_SIMPLE_STEP_BYTES:
        return None
    _, _, _, flags, _, rows, tokens, _, _ = HEADER.unpack(header)
    offset_size = 8 * rows if flags == OFFSETS_FLAG else 0
    plain = HEADER.pack(MAGIC, VERSION, STEP, OFFSETS_FLAG if offset_size else 0, 0, rows, tokens, 0, NO_LAST)
    if header != plain or not rows or not tokens or tokens % rows:
        return None
    if size != HEADER.size + 8 * tokens + offset_size + 4 * rows:
        return None
    length = tokens // rows
    return SimpleStepShape(rows, length, offset_size, length.to_bytes(4, "little") * rows, np.array([length]))


def write_simple_step_header(step: SimpleStep, after: RunningRows, forms: OutputForms) -> bytes:
    """Return the bytes before the vectors in the answer to a step, after which the rows are in the state `after`."""
    shape = step.shape
    first, last, end = _simple_step_header(shape.rows, shape.length, forms, after.history)
    context = b"" if after.context is None else after.context.data
    return b"".join((first, step.number.to_bytes(4, "little"), last, after.offset.data, context, shape.lengths, end))


@lru_cache
def _simple_step_header(rows: int, length: int, forms: OutputForms, history: int) -> tuple[bytes, bytes, bytes]:
    """Return the bytes before and after the number in the header of an answer, and the bytes after its lengths."""
    dtype, last, end = _describe_outputs(forms, history)
    header = _write_header(VECTORS, 0, rows, rows * length, dtype, last)
    return header[:8], header[12:], end
