"""Binary frames, written here byte by byte."""

import struct
from typing import Any

import numpy as np
import pytest

from preblock.service.codecs.decode_frames import read_frame, read_number, write_closing, write_state
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
from preblock.service.core.types import TokenRequest

INDICES = ("token_type_ids", "word")


def frame_of(kind: int, flags: int, number: int, rows: int, tokens: int, body: bytes) -> bytes:
    return b"PRBK" + struct.pack("<BBHIII", 2, kind, flags, number, rows, tokens) + bytes(4) + body


def step(ids: list[int], lengths: list[int], number: int = 5) -> bytes:
    body = struct.pack(f"<{len(ids)}q", *ids) + struct.pack(f"<{len(lengths)}I", *lengths)
    return frame_of(1, 0, number, len(lengths), len(ids), body)


def values_of(rows: Any) -> Any:
    return None if rows is None else rows.values.tolist()


def step_of(message: DecodeMessage) -> TokenRequest:
    assert isinstance(message.operation, TokenRequest)
    return message.operation


@pytest.mark.parametrize("flags", range(8))
def test_step_has_parts_selected_by_flags(flags: int) -> None:
    for further in range(4):
        parts = {"position_ids": flags & 1, "attention_mask": flags & 2}
        parts |= {"token_type_ids": further & 1, "word": further & 2}
        values = {name: [10 * index, 10 * index + 1] for index, name in enumerate(parts) if parts[name]}
        body = struct.pack("<2q", 3, 4) + b"".join(struct.pack("<2q", *value) for value in values.values())
        body += (struct.pack("<2q", 7, 8) if flags & 4 else b"") + struct.pack("<2I", 0, 2)
        read = step_of(read_frame(frame_of(1, flags | further << 8, 9, 2, 2, body), INDICES))
        found = {"position_ids": read.position_ids, "attention_mask": read.attention_mask, **read.indices}
        assert {name: values_of(rows) for name, rows in found.items() if rows is not None} == values
        assert all(rows.lengths.tolist() == [0, 2] for rows in found.values() if rows is not None)
        assert (None if read.offset is None else read.offset.tolist()) == ([7, 8] if flags & 4 else None)
        for wrong in (body[:-1], body + b"\0"):
            with pytest.raises(PreblockError, match=r"^frame: got"):
                read_frame(frame_of(1, flags | further << 8, 9, 2, 2, wrong), INDICES)


def test_step_has_positions_of_three_axes() -> None:
    body = struct.pack("<12q", *range(3, 15)) + struct.pack("<2I", 1, 1)
    read = step_of(read_frame(frame_of(1, 1 | 16 | 2 | 4, 9, 2, 2, body), INDICES))
    axes = [values_of(rows) for rows in (read.position_ids, *read.further_positions)]
    assert axes == [[5, 6], [7, 8], [9, 10]]
    assert (values_of(read.attention_mask), np.array(read.offset).tolist()) == ([11, 12], [13, 14])
    with pytest.raises(Invalid, match=r"^flags: got 16, expected 17, for positions of three axes"):
        read_frame(frame_of(1, 16, 9, 2, 2, body), INDICES)


def test_every_operation_has_a_frame_kind() -> None:
    operations: list[tuple[int, list[int] | None, type[Operation]]] = [
        (4, [5, -1], RewindOp),
        (5, [1, 1, 0], ReorderOp),
        (6, [2**63 - 1], AppendOp),
        (7, [], DropOp),
        (8, None, PingOp),
        (9, None, CloseOp),
    ]
    for kind, values, operation in operations:
        count = len(values or [])
        message = read_frame(frame_of(kind, 0, 3, count, 0, struct.pack(f"<{count}q", *(values or []))))
        assert (type(message.operation), message.number) == (operation, 3)
        if values is not None:
            assert isinstance(message.operation, RowsOp)
            read: Any = message.operation.values
            assert (read.tolist(), read.dtype, message.operation.context) == (values, np.int64, None)
        size = bytes(8 * count)
        wrong = [(0, count, 0, size + b"x"), (0, count, 1, size), (1, count, 0, size)]
        for flags, rows, tokens, body in wrong + ([(0, 1, 0, bytes(8))] if values is None else []):
            with pytest.raises(PreblockError):
                read_frame(frame_of(kind, flags, 3, rows, tokens, body))


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


def test_truncated_step_frame_is_rejected() -> None:
    for cut in range(len(step([1], [1]))):
        with pytest.raises(PreblockError, match=f"^frame: got {cut} bytes"):
            read_frame(step([1], [1])[:cut])


def test_lengths_not_matching_ids_are_rejected() -> None:
    for ids, lengths in (([1], [2]), ([1, 2], [1, 2]), ([1], [0]), ([1, 2], [2**32 - 1, 3])):
        with pytest.raises(PreblockError, match=r"^lengths: got "):
            read_frame(step(ids, lengths))


def test_frames_hold_contexts_behind_offsets() -> None:
    running, body = RunningRows(np.array([3]), np.array([[7, 2**40]])), struct.pack("<qqq", 3, 7, 2**40)
    state = b"PRBK\x02\x0a\x08\x00" + struct.pack("<II", 0, 1) + bytes(4) + b"\x00\x00\x02\x00" + body
    assert write_state(running) == state
    assert write_closing(running, "idle") == state.replace(b"\x0a\x08", b"\x0b\x08", 1) + b"idle"
    append = frame_of(6, 8, 0, 1, 0, body)
    operation = read_frame(append, history=2).operation
    assert isinstance(operation, AppendOp)
    assert (operation.values.tolist(), values_of(operation.context)) == ([3], [7, 2**40])
    for frame, history in ((append, 0), (append, 3), (append[:-8], 2)):
        with pytest.raises((Invalid, Malformed)):
            read_frame(frame, history=history)
