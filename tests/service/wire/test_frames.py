"""Binary frames, written here byte by byte."""

import struct

import numpy as np
import pytest

from incipit.service.errors import IncipitError
from incipit.service.messages import TokenAnswer
from incipit.service.wire.frames import read_step, step_number, write_error, write_vectors


def step(ids: list[int], lengths: list[int], number: int = 5) -> bytes:
    return (
        b"INCP\x01\x01\x00\x00"
        + struct.pack("<III", number, len(lengths), len(ids))
        + bytes(4)
        + struct.pack(f"<{len(ids)}q", *ids)
        + struct.pack(f"<{len(lengths)}I", *lengths)
    )


@pytest.mark.parametrize(
    ("ids", "lengths"), [([1], [1]), ([1, -2, 2**63 - 1], [3]), ([1, 2, 3], [1, 2]), ([], []), ([], [0])]
)
def test_read_step_reads_ids_and_lengths(ids: list[int], lengths: list[int]) -> None:
    read = read_step(step(ids, lengths, number=2**32 - 1))
    assert read.number == 2**32 - 1
    assert (read.input_ids.values.tolist(), read.input_ids.lengths.tolist()) == (ids, lengths)
    assert read.input_ids.values.dtype == read.input_ids.lengths.dtype == np.int64


@pytest.mark.parametrize("cut", range(36))
def test_every_cut_of_a_step_is_refused(cut: int) -> None:
    assert len(step([1], [1])) == 36
    with pytest.raises(IncipitError, match=f"^frame: got {cut} bytes"):
        read_step(step([1], [1])[:cut])


def test_every_changed_byte_of_the_header_is_refused_or_changes_the_number_alone() -> None:
    frame = step([1, 2], [2])
    for position in range(24):
        changed = bytearray(frame)
        changed[position] ^= 1
        if 8 <= position < 12:
            assert read_step(bytes(changed)).number != 5
        else:
            with pytest.raises(IncipitError):
                read_step(bytes(changed))


@pytest.mark.parametrize("frame", [step([1], [2]), step([1, 2], [1, 2]), step([1], [0]), step([1, 2], [2**32 - 1, 3])])
def test_lengths_that_do_not_sum_up_are_refused(frame: bytes) -> None:
    with pytest.raises(IncipitError, match=r"^lengths: got "):
        read_step(frame)


@pytest.mark.parametrize(("frame", "number"), [(b"", 0), (bytes(23), 0), (b"x" * 8 + b"\1\2\0\0" + b"x" * 12, 513)])
def test_the_number_of_a_broken_frame_is_read_where_there_is_one(frame: bytes, number: int) -> None:
    assert step_number(frame) == number


def test_write_vectors_lays_out_what_the_docstring_says() -> None:
    vectors = np.arange(12, dtype=np.float16).reshape(3, 4)
    answer = TokenAnswer(
        model="m",
        version=1,
        dtype="float16",
        tensors={"embeddings": vectors},
        lengths=np.array([1, 2]),
        next_offset=np.array([10, 2**40]),
    )
    assert write_vectors(answer, 7) == (
        b"INCP\x01\x02\x00\x00"
        + struct.pack("<III", 7, 2, 3)
        + b"\x02\x04\x00\x00"
        + struct.pack("<qq", 10, 2**40)
        + struct.pack("<II", 1, 2)
        + vectors.tobytes()
    )


def test_write_error_holds_the_problem() -> None:
    assert write_error(b'{"a":1}', 7) == b"INCP\x01\x03\x00\x00" + struct.pack("<I", 7) + bytes(12) + b'{"a":1}'
