"""One array as a body. Oracle: numpy."""

import io
from typing import Any

import numpy as np
import pytest

from preblock.service.codecs.arrays import npy_header, read_npy, read_raw
from preblock.service.core.errors import Malformed


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version)
    return stream.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["<i8", ">i4", "u1", "<f4", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_read_npy_reads_files_of_numpy(version: tuple[int, int], dtype: str, order: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype, order=order)
    found = read_npy(saved(array, version))
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


def test_read_npy_does_not_copy() -> None:
    body = saved(np.arange(6))
    assert np.shares_memory(read_npy(body), np.frombuffer(body, np.uint8))


def test_read_npy_rejects_pickle() -> None:
    with pytest.raises(Malformed, match=r"it holds objects.*expected an integer array"):
        read_npy(saved(np.array([{}], dtype=object)))


@pytest.mark.parametrize("cut", [0, 5, 6, 8, 9, 10, 40, 127, 128, 129, 175])
def test_read_npy_rejects_truncated_file(cut: int) -> None:
    body = saved(np.arange(6))
    assert len(body) == 176
    with pytest.raises(Malformed, match=r"^body: not a valid \.npy file \(it"):
        read_npy(body[:cut])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(1, 2, 5), (3, 5), (70000, 1)])
def test_npy_header_equals_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    assert npy_header(array.dtype, array.shape) + array.tobytes() == saved(array, (1, 0))


@pytest.mark.parametrize(
    ("shape", "found"), [(None, (6,)), ("6", (6,)), ("2,3", (2, 3)), ("3,2", (3, 2)), ("1,6", (1, 6))]
)
def test_raw_values_take_requested_shape(shape: str | None, found: tuple[int, ...]) -> None:
    body = np.arange(6).astype("<i8").tobytes()
    array = read_raw(body, shape)
    assert array.shape == found
    assert array.ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize(
    ("size", "shape", "message"),
    [
        (47, None, "body: got 47 bytes, expected int64 values of 8 bytes each"),
        (48, "2,2", "body: got 6 values, expected 4, as the shape 2,2 declares"),
        (48, "1,2,3", "shape: got 1,2,3, expected one or two sizes with a comma, such as 2,3"),
        (0, "0,9", "shape: got 0,9, "),
        (48, "-2,-3", "shape: got -2,-3, "),
        (48, "[2,3]", r"shape: got \[2,3\], "),
        (48, " 2,3", "shape: got  2,3, "),
        (48, "\u0662,\u0663", "shape: got \u0662,\u0663, "),
        (48, "", "shape: got , "),
        (48, "2,3\n", "shape: got 2,3\n, "),
        (48, "999999999999999999,999999999999999999", "body: got 6 values, expected 999999999999999998000000"),
        (48, "9" * 10_000, "shape: got 9999"),
    ],
)
def test_raw_body_not_matching_shape_is_rejected(size: int, shape: str | None, message: str) -> None:
    with pytest.raises(Malformed, match=f"^{message}"):
        read_raw(bytes(size), shape)
