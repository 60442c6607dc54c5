"""Binary frames, written here byte by byte."""

import struct
from typing import Any

import numpy as np
import pytest

from preblock.service.codecs.decode_frames import (
    read_frame,
    read_number,
    write_closing,
    write_error,
    write_state,
    write_vectors,
)
from preblock.service.core.decode_ops import (
    AppendOp,
    CloseOp,
    DecodeMessage,
    DropOp,
    Operation,
    PingOp,
    ReorderOp,
    RewindOp,
    RowsOp,
    RunningRows,
)
from preblock.service.core.errors import Invalid, Malformed, PreblockError
from preblock.service.core.types import EmbedResult, TokenRequest

INDICES = ("token_type_ids", "word")


def frame_of(kind: int, flags: int, number: int, rows: int, tokens: int, body: bytes) -> bytes:
    return b"PRBK" + struct.pack("<BBHIII", 2, kind, flags, number, rows, tokens) + bytes(4) + body


def step(ids: list[int], lengths: list[int], number: int = 5) -> bytes:
    body = struct.pack(f"<{len(ids)}q", *ids) + struct.pack(f"<{len(lengths)}I", *lengths)
    return frame_of(1, 0, number, len(lengths), len(ids), body)


def step_of(message: DecodeMessage) -> TokenRequest:
    assert isinstance(message.operation, TokenRequest)
    return message.operation


def test_step_frame_has_ids_and_lengths() -> None:
    for ids, lengths in (([1], [1]), ([1, -2, 2**63 - 1], [3]), ([1, 2, 3], [1, 0, 2]), ([], []), ([], [0])):
        message = read_frame(step(ids, lengths, 2**32 - 1))
        read = step_of(message)
        assert message.number == 2**32 - 1
        assert (read.input_ids.values.tolist(), read.input_ids.lengths.tolist()) == (ids, lengths)
        assert read.input_ids.values.dtype == read.input_ids.lengths.dtype == np.int64
        assert (read.offset, read.position_ids, read.attention_mask, read.indices) == (None, None, None, {})


@pytest.mark.parametrize("flags", range(8))
def test_step_has_parts_selected_by_flags(flags: int) -> None:
    for further in range(4):
        parts = {"position_ids": flags & 1, "attention_mask": flags & 2}
        parts |= {"token_type_ids": further & 1, "word": further & 2}
        values = {name: [10 * index, 10 * index + 1] for index, name in enumerate(parts) if parts[name]}
        body = struct.pack("<2q", 3, 4) + b"".join(struct.pack("<2q", *value) for value in values.values())
        body += (struct.pack("<2q", 7, 8) if flags & 4 else b"") + struct.pack("<2I", 0, 2)
        read = step_of(read_frame(frame_of(1, flags | further << 8, 9, 2, 2, body), INDICES))
        found: dict[str, Any] = {"position_ids": read.position_ids, "attention_mask": read.attention_mask}
        found = {name: rows for name, rows in {**found, **read.indices}.items() if rows is not None}
        assert {name: rows.values.tolist() for name, rows in found.items()} == values
        assert all(rows.lengths.tolist() == [0, 2] for rows in found.values())
        assert (None if read.offset is None else read.offset.tolist()) == ([7, 8] if flags & 4 else None)
        for wrong in (body[:-1], body + b"\0"):
            with pytest.raises(PreblockError, match=r"^frame: got"):
                read_frame(frame_of(1, flags | further << 8, 9, 2, 2, wrong), INDICES)


def test_step_has_positions_of_three_axes() -> None:
    body = struct.pack("<12q", *range(3, 15)) + struct.pack("<2I", 1, 1)
    read = step_of(read_frame(frame_of(1, 1 | 16 | 2 | 4, 9, 2, 2, body), INDICES))
    assert read.position_ids is not None
    axes = [rows.values.tolist() for rows in (read.position_ids, *read.further_positions)]
    assert axes == [[5, 6], [7, 8], [9, 10]]
    assert read.attention_mask is not None
    assert read.attention_mask.values.tolist() == [11, 12]
    assert read.offset is not None
    assert read.offset.tolist() == [13, 14]
    with pytest.raises(Invalid, match=r"^flags: got 16, expected 17, for positions of three axes"):
        read_frame(frame_of(1, 16, 9, 2, 2, body), INDICES)


def test_unsupported_step_flags_are_rejected() -> None:
    for flags in (8, 128, 1 << 10, 1 << 15):
        with pytest.raises(Invalid, match=rf"got {flags}, 0 and 000000, expected flags 823 and 0 in a step$"):
            read_frame(frame_of(1, flags, 0, 1, 1, bytes(8) + b"\1\0\0\0"), INDICES)


@pytest.mark.parametrize(
    ("kind", "values", "operation"),
    [
        (4, [5, -1], RewindOp),
        (5, [1, 1, 0], ReorderOp),
        (6, [2**63 - 1], AppendOp),
        (7, [], DropOp),
        (8, None, PingOp),
        (9, None, CloseOp),
    ],
)
def test_every_operation_has_a_frame_kind(kind: int, values: list[int] | None, operation: type[Operation]) -> None:
    count = len(values or [])
    message = read_frame(frame_of(kind, 0, 3, count, 0, struct.pack(f"<{count}q", *(values or []))))
    assert (type(message.operation), message.number) == (operation, 3)
    if values is not None:
        assert isinstance(message.operation, RowsOp)
        read: Any = message.operation.values
        assert (read.tolist(), read.dtype, message.operation.context) == (values, np.int64, None)
    more = [frame_of(kind, 0, 3, 1, 0, bytes(8))] if values is None else []
    size = bytes(8 * count)
    for wrong in (frame_of(kind, 0, 3, count, 0, size + b"x"), frame_of(kind, 0, 3, count, 1, size), *more):
        with pytest.raises(PreblockError):
            read_frame(wrong)
    with pytest.raises(PreblockError):
        read_frame(frame_of(kind, 1, 3, count, 0, size))


def test_repeated_frame_has_equal_digest() -> None:
    assert read_frame(step([1], [1], 5)).digest == read_frame(step([1], [1], 5)).digest != b""
    assert read_frame(step([1], [1], 5)).digest != read_frame(step([2], [1], 5)).digest
    assert read_frame(step([1], [1], 0)).digest == b""


def test_truncated_step_frame_is_rejected() -> None:
    for cut in range(len(step([1], [1]))):
        with pytest.raises(PreblockError, match=f"^frame: got {cut} bytes"):
            read_frame(step([1], [1])[:cut])


def test_changed_header_byte_is_rejected_or_changes_number() -> None:
    frame = step([1, 2], [2])
    for position in range(24):
        changed = bytearray(frame)
        changed[position] ^= 1
        if 8 <= position < 12:
            assert read_number(bytes(changed)) != 5
            assert step_of(read_frame(bytes(changed))).input_ids.values.tolist() == [1, 2]
        else:
            with pytest.raises(PreblockError):
                read_frame(bytes(changed))


def test_lengths_not_matching_ids_are_rejected() -> None:
    for ids, lengths in (([1], [2]), ([1, 2], [1, 2]), ([1], [0]), ([1, 2], [2**32 - 1, 3])):
        with pytest.raises(PreblockError, match=r"^lengths: got "):
            read_frame(step(ids, lengths))


def test_number_of_broken_frame_is_read() -> None:
    broken = b"PRBK\2" + bytes(3) + b"\1\2\0\0"
    for frame, number in ((b"", 0), (bytes(23), 0), (b"x" * 8 + b"\1\2\0\0" + b"x" * 12, 513), (broken, 0)):
        assert read_number(frame) == number


def answer_of(**tensors: Any) -> EmbedResult:
    lengths, offsets = np.array([1, 2]), np.array([10, 2**40])
    return EmbedResult(model="m", version=1, dtype="float16", tensors=tensors, lengths=lengths, next_offset=offsets)


def test_vectors_frame_has_width_of_each_output() -> None:
    vectors = np.arange(12, dtype=np.float16).reshape(3, 4)
    cosines = np.arange(6, dtype=np.float16).reshape(3, 2)
    assert write_vectors(answer_of(embeddings=vectors, rotary_cos=cosines), 7) == (
        b"PRBK\x02\x02\x00\x00"
        + struct.pack("<III", 7, 2, 3)
        + b"\x02\x02\x00\x00"
        + struct.pack("<qq", 10, 2**40)
        + struct.pack("<IIII", 1, 2, 4, 2)
        + vectors.tobytes()
        + cosines.tobytes()
    )


def test_state_and_close_frames_hold_offsets() -> None:
    running = RunningRows(np.array([3, 2**40]))
    body = struct.pack("<qq", 3, 2**40)
    assert write_state(running, 7) == b"PRBK\x02\x0a\x00\x00" + struct.pack("<II", 7, 2) + bytes(8) + body
    last = b"PRBK\x02\x0b\x00\x00" + struct.pack("<II", 0, 2) + bytes(8) + body + b"idle"
    assert write_closing(running, "idle") == last


def test_contexts_follow_the_offsets() -> None:
    running = RunningRows(np.array([3]), np.array([[7, 2**40]]))
    body = struct.pack("<qqq", 3, 7, 2**40)
    state = b"PRBK\x02\x0a\x08\x00" + struct.pack("<II", 0, 1) + bytes(4) + b"\x00\x00\x02\x00" + body
    assert write_state(running) == state
    assert write_closing(running, "idle") == state.replace(b"\x0a\x08", b"\x0b\x08", 1) + b"idle"
    append = b"PRBK\x02\x06\x08\x00" + struct.pack("<II", 0, 1) + bytes(8) + body
    operation = read_frame(append, history=2).operation
    assert isinstance(operation, AppendOp)
    assert operation.values.tolist() == [3]
    assert operation.context is not None
    assert operation.context.values.tolist() == [7, 2**40]
    for frame, history in ((append, 0), (append, 3), (append[:-8], 2)):
        with pytest.raises((Invalid, Malformed)):
            read_frame(frame, history=history)


def test_error_frame_holds_the_problem() -> None:
    assert write_error(b'{"a":1}', 7) == b"PRBK\x02\x03\x00\x00" + struct.pack("<I", 7) + bytes(12) + b'{"a":1}'
