from typing import Any

from numpy.typing import NDArray

def add_rows(
    ids: NDArray[Any], table: NDArray[Any], scale: float, positions: NDArray[Any], out: NDArray[Any], width: int, /
) -> None: ...
def guard_output() -> None: ...
