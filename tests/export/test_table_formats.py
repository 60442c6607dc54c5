"""Rounding to stored types. Oracles: numpy's float16, ml-dtypes' bfloat16, and whole numbers counted one by one."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.export.errors import ExportError
from preblock.export.table_formats import find_format

Float32 = NDArray[np.float32]
HARD = np.array(
    # Halves between two neighbours, either way to even; ends of the normal numbers; the smallest; zeros of both signs.
    [[1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504, 6.1e-5, 2**-14, 2**-24, 2**-25, 0, -0.0, 1e-30]],
    np.float32,
)


def stored(values: Float32, dtype: str, scale: str | None = None) -> tuple[dict[str, NDArray[Any]], Float32]:
    """Return the stored parts of a table, and their values in float32."""
    format_ = find_format(dtype, scale)
    assert format_ is not None
    whole = format_.whole(iter(np.array_split(values, -(-len(values) // 7))))
    parts = whole | format_.narrow(values, whole)
    widened = format_.widen(parts)
    assert widened.dtype == np.float32
    return parts, widened


RANDOM = (
    np.random.default_rng(0).standard_normal((20, 9), np.float32) * np.logspace(-6, 3, 20, dtype=np.float32)[:, None]
)


@pytest.mark.parametrize(("dtype", "type_"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("values", [HARD, -HARD, RANDOM], ids=["hard", "negative", "random"])
def test_float16_and_bfloat16_round_to_nearest_even(dtype: str, type_: type, values: Float32) -> None:
    _, widened = stored(values, dtype)
    assert widened.tobytes() == values.astype(type_).astype(np.float32).tobytes()  # signs of zeros too


@pytest.mark.parametrize(("dtype", "scale"), [("int8", "row"), ("int8", "tensor"), ("int4", None)])
def test_zeros_and_subnormal_values_stay_finite(dtype: str, scale: str | None) -> None:
    for value in (0, 1e-45, 1.9e-43, 2e-38):
        _, widened = stored(np.array([[value, -value]], np.float32), dtype, scale)
        assert np.isfinite(widened).all()
        assert np.abs(widened).max() <= 2 * value


def test_find_format_rejects_unknown_names() -> None:
    for names, message in (
        (("float64",), "--dtype: got 'float64', expected float32, float16, bfloat16, int8, int4"),
        (("int8", "column"), "--scale: got 'column', expected row, tensor"),
    ):
        with pytest.raises(ExportError, match=message):
            find_format(*names)
