"""The compiled functions read and write nothing outside of the memory of their arguments."""

from typing import Any

import numpy as np
import pytest

from preblock.service.runtime.fused_embedding import BUILT

if not BUILT:
    pytest.skip("the kernels were not built", allow_module_level=True)

from preblock.service.runtime._kernels import add_rows, add_to_means, average_rows, gather_rows, open_table

FUNCTIONS = {function.__name__: function for function in (add_rows, gather_rows, add_to_means, average_rows)}


def ids(*shape: int) -> Any:
    return np.zeros(shape, np.int64)


def floats(*shape: int) -> Any:
    return np.full(shape, 7, np.float32)


def at_odd_address(size: int) -> Any:
    return np.zeros(size + 1, np.uint8)[1:]


def table(row_bytes: int) -> Any:
    return open_table((memoryview(bytes(8 * row_bytes)),), row_bytes)


def legal_arguments(function: str) -> dict[str, Any]:
    """Return arguments of a function in their order. The vectors that it writes are 7 before."""
    return {
        "add_rows": {"ids": ids(9), "table": floats(100, 4), "scale": 1.0, "positions": floats(3, 4)}
        | {"out": floats(9, 4), "width": 4},
        "gather_rows": {"ids": ids(3, 2, 2), "tables": (table(8), table(8))}
        | {"out": np.full((12, 8), 7, np.uint8), "heads": 2},
        "add_to_means": {"vectors": floats(2, 2), "lengths": np.array([1, 2]), "place": ids(2)}
        | {"total": np.zeros(2), "means": floats(2, 2)},
        "average_rows": {"ids": ids(3), "lengths": np.array([1, 2]), "table": floats(4, 2), "means": floats(2, 2)},
    }[function]


WRONG = [
    *(("add_rows", "ids", value) for value in (ids(8), ids(9).view(np.uint8)[:-1])),
    *(("add_rows", "table", value) for value in (floats(399), at_odd_address(16).view(np.float32))),
    *(
        ("add_rows", "positions", value)
        for value in (floats(2, 4), floats(0, 4), floats(11), at_odd_address(48).view(np.float32))
    ),
    *(("add_rows", "out", value) for value in (floats(8, 4), at_odd_address(144).view(np.float32))),
    *(("add_rows", "width", value) for value in (0, -4, 2**62, 5, 2)),
    *(("gather_rows", "ids", value) for value in (ids(2, 2, 2), ids(12).view(np.uint8)[:-1])),
    *(("gather_rows", "out", value) for value in (np.zeros((11, 8), np.uint8), np.zeros(95, np.uint8))),
    *(("gather_rows", "heads", value) for value in (0, 5, 2**63 - 1)),
    *(("gather_rows", "tables", value) for value in ((), (table(8), table(9)), (object(),))),
    *(("add_to_means", "vectors", value) for value in (floats(4, 2), floats(3))),
    *(("add_to_means", "lengths", value) for value in (np.array([1, 0]), at_odd_address(16).view(np.int64))),
    *(("add_to_means", "place", np.array(value)) for value in ([2, 0], [-1, 0], [0, -1], [-1, -9], [0, 0, 0])),
    *(("add_to_means", "means", floats(3, 2)), ("add_to_means", "total", np.zeros(0))),
    *(("average_rows", "ids", value) for value in (ids(4), np.zeros(25, np.uint8))),
    *(("average_rows", "lengths", np.array(value)) for value in ([3, 0], [4, -1], [2**62, 2**62])),
    *(("average_rows", "lengths", value) for value in (ids(0), at_odd_address(16).view(np.int64))),
    *(("average_rows", "table", value) for value in (floats(3), at_odd_address(16).view(np.float32))),
    *(("average_rows", "means", value) for value in (floats(0), floats(5))),
]


def is_unwritten(given: dict[str, Any]) -> bool:
    return all((given[name] == 7).all() for name in ("out", "means") if isinstance(given.get(name), np.ndarray))


@pytest.mark.parametrize(("function", "argument", "value"), WRONG, ids=range(len(WRONG)))
def test_argument_of_another_size_is_rejected(function: str, argument: str, value: Any) -> None:
    given = legal_arguments(function)
    FUNCTIONS[function](*given.values())
    written = legal_arguments(function)
    with pytest.raises(ValueError, match=r": got |PyCapsule"):
        FUNCTIONS[function](*(written | {argument: value}).values())
    assert is_unwritten(written)


@pytest.mark.parametrize("id_", [-1, 100, 2**63 - 1, -(2**63)])
def test_id_without_a_row_is_rejected(id_: int) -> None:
    for function in ("add_rows", "average_rows"):
        for place in (0, -1):
            given = legal_arguments(function)
            given["ids"][place] = id_
            with pytest.raises(IndexError, match=f"id: got {id_}, expected 0 to {len(given['table']) - 1}"):
                FUNCTIONS[function](*given.values())
            assert function == "average_rows" or is_unwritten(given), place


def test_memory_that_cannot_be_used_is_rejected() -> None:
    read_only, apart = floats(9, 4), floats(9, 8)[:, ::2]
    read_only.flags.writeable = False
    for changes, error, message in (
        ({"ids": np.arange(18)[::2]}, ValueError, "contiguous"),
        ({"out": apart}, TypeError, "argument 5 must be read-write"),
        ({"out": read_only}, TypeError, "argument 5 must be read-write"),
    ):
        given = legal_arguments("add_rows") | changes
        with pytest.raises(error, match=message):
            add_rows(*given.values())
        assert is_unwritten(given)


def test_unaligned_ids_are_accepted() -> None:
    given = legal_arguments("add_rows")
    given["ids"] = np.frombuffer(b"." + np.arange(9).tobytes(), np.int64, offset=1)
    add_rows(*given.values())
    assert (given["out"] == 14).all()


def test_parts_of_broken_rows_are_rejected() -> None:
    part = b"x" * 16
    cases: list[tuple[Any, int]] = [((part,), 0), ((part,), -8), ((part, part[1:]), 8), ((part, b""), 8), ((), 8)]
    for parts, row_bytes in cases:
        with pytest.raises(ValueError, match=f"^row_bytes: got {row_bytes}, " if parts else "^parts: got none"):
            open_table(parts, row_bytes)
    for other in ((memoryview(b"x" * 8), 5), [memoryview(b"x" * 8)]):
        with pytest.raises(TypeError):
            open_table(other, 8)  # type: ignore[arg-type]
