"""One array as a body. Oracle: numpy."""

import io
import itertools
from typing import Any

import numpy as np
import pytest

from preblock.service.codecs.arrays import npy_header, read_npy, read_raw
from preblock.service.core.errors import Malformed


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version)
    return stream.getvalue()


def test_read_npy_reads_files_of_numpy() -> None:
    orders: list[Any] = ["C", "F"]
    for dtype, order, major in itertools.product(("<i8", ">i4", "u1", "<f4"), orders, (1, 2)):
        array = np.arange(6).reshape(2, 3).astype(dtype, order=order)
        body = saved(array, (major, 0))
        found = read_npy(body)
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
        assert np.shares_memory(found, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(1, 2, 5), (3, 5), (70000, 1)])
def test_npy_header_equals_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    assert npy_header(array.dtype, array.shape) + array.tobytes() == saved(array, (1, 0))


def test_raw_values_take_requested_shape() -> None:
    body = np.arange(6).astype("<i8").tobytes()
    for shape, found in ((None, (6,)), ("6", (6,)), ("2,3", (2, 3)), ("3,2", (3, 2)), ("1,6", (1, 6))):
        array = read_raw(body, shape)
        assert array.shape == found
        assert array.ravel().tolist() == [0, 1, 2, 3, 4, 5]
        assert np.shares_memory(array, np.frombuffer(body, np.uint8))


def test_raw_body_not_matching_shape_is_rejected() -> None:
    with pytest.raises(Malformed, match=r"^body: got 47 bytes, expected int64 values"):
        read_raw(bytes(47), None)
    for shape in ("2,2", "999999999999999999,999999999999999999"):
        with pytest.raises(Malformed, match=r"^body: got 6 values, expected "):
            read_raw(bytes(48), shape)
    for shape in ("1,2,3", "0,9", "-2,-3", "[2,3]", " 2,3", "\u0662,\u0663", "", "2,3\n", "9" * 10_000):
        with pytest.raises(Malformed) as refused:
            read_raw(bytes(48), shape)
        assert (refused.value.field, refused.value.got.rstrip("…")) == ("shape", shape[:80])
