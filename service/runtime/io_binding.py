"""Calls whose inputs and outputs lie in memory that stays: for a GPU, which is given its own kind of it.

Vectors are not copied out of it: what is returned holds its part until nobody has it any more.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Tensor
from preblock.service.runtime.cuda_memory import Bytes

LOG = logging.getLogger(__name__)
Float32 = NDArray[np.float32]
PART = 2**22
"""Bytes of all inputs and outputs of one call; a larger one is not bound."""
PARTS = 16
"""Calls whose outputs may be held at the same time; a further one is not bound."""
ALIGNMENT = 64


class Bound:
    """Calls of one graph.

    Args:
        call: runs it on such inputs, and writes such outputs.
        inputs: of the graph.
        outputs: of the graph, float32.
        memory: returns so many bytes, uint8; OSError: it has no more of them, which the log tells.

    """

    def __init__(
        self,
        call: Callable[[Mapping[str, NDArray[Any]], Mapping[str, Float32]], None],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        memory: Callable[[int], Bytes],
    ) -> None:
        self._call, self._memory = call, memory
        self._inputs, self._outputs = tuple(inputs), {tensor.name: tensor for tensor in outputs}
        self._parts: list[Bytes] = []
        self._made = 0
        self._lock = Lock()

    def run(self, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, Float32] | None:
        """Return outputs by name; None where there is no part that they fit in, or a shape is not known before."""
        shapes = self._shapes(feeds, names)
        if shapes is None:
            return None
        given = {tensor.name: feeds[tensor.name] for tensor in self._inputs}
        sizes = [*(values.nbytes for values in given.values()), *(4 * int(np.prod(shape)) for shape in shapes)]
        if sum(map(_aligned, sizes)) > PART or (part := self._take()) is None:
            return None
        loan, begin = _Loan(part, self._parts), 0
        for name, values in given.items():
            place = part[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
            place[...] = values
            given[name] = place
            begin += _aligned(values.nbytes)
        found: dict[str, Float32] = {}
        for name, shape, size in zip(names, shapes, sizes[len(given) :], strict=True):
            found[name] = np.asarray(_Lent(part[begin : begin + size].view(np.float32).reshape(shape), loan))
            begin += _aligned(size)
        self._call(given, found)
        return found

    def _shapes(self, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[tuple[int, ...]] | None:
        """Return the shapes of outputs: their dimensions are numbers, or have the names of dimensions of inputs."""
        sizes: dict[int | str | None, int] = {}
        for tensor in self._inputs:
            sizes |= zip(tensor.shape, feeds[tensor.name].shape, strict=True)
        shapes = []
        sizes.pop(None, None)  # dimensions without a name have nothing in common
        for name in names:
            shape = [size if isinstance(size, int) else sizes.get(size) for size in self._outputs[name].shape]
            if None in shape:
                return None
            shapes.append(tuple(size for size in shape if size is not None))
        return shapes

    def _take(self) -> Bytes | None:
        """Return a part that nobody has, or None."""
        with self._lock:
            if self._parts:
                return self._parts.pop()
            if self._made == PARTS:
                return None
            self._made += 1
        try:
            return self._memory(PART)
        except OSError as error:
            LOG.warning("calls are not bound: %s", error)
            self._made = PARTS
            return None


class _Loan:
    """Gives a part back when nothing of it is held any more."""

    def __init__(self, part: Bytes, parts: list[Bytes]) -> None:
        self._part, self._parts = part, parts

    def __del__(self) -> None:
        self._parts.append(self._part)


class _Lent:
    """An array as NumPy is told of one, which keeps the loan of its memory."""

    def __init__(self, values: Float32, loan: _Loan) -> None:
        self.__array_interface__ = values.__array_interface__
        self._loan = loan


def _aligned(size: int) -> int:
    """Return the bytes after which something else may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
