"""Calls whose inputs and outputs lie in memory that stays: for a GPU, which is given its own kind of it.

Vectors are not copied out of it: what is returned holds its part until nobody has it any more.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from incipit.service.manifest import Tensor

LOG = logging.getLogger(__name__)
Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
PART = 2**22
"""Bytes of all inputs and outputs of one call; a larger one is not bound."""
PARTS = 8
"""Calls whose outputs may be held at the same time; a further one is not bound."""
ALIGNMENT = 64


class Binding(Protocol):
    """What onnxruntime calls an IOBinding."""

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Say where an input lies."""

    def bind_output(
        self,
        name: str,
        device_type: str = ...,
        device_id: int = ...,
        element_type: Any = ...,
        shape: Sequence[int] | None = ...,
        buffer_ptr: int | None = ...,
    ) -> None:
        """Say where an output is to lie."""


class Bindable(Protocol):
    """A session of onnxruntime, as far as it is needed here."""

    def io_binding(self) -> Binding:
        """Return a binding of no inputs and outputs."""

    def run_with_iobinding(self, iobinding: Any) -> None:
        """Run, and return when all outputs are where they are to be."""


class Bound:
    """Calls of one graph.

    Args:
        session: runs them.
        inputs: of the graph.
        outputs: of the graph, float32.
        memory: returns so many bytes, uint8; OSError: it has no more of them, which the log tells.

    """

    def __init__(
        self,
        session: Bindable,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        memory: Callable[[int], Bytes],
    ) -> None:
        self._session, self._memory = session, memory
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
        loan, binding, begin = _Loan(part, self._parts), self._session.io_binding(), 0
        for name, values in given.items():
            place = part[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
            place[...] = values
            binding.bind_input(name, "cpu", 0, values.dtype.type, values.shape, place.ctypes.data)
            begin += _aligned(values.nbytes)
        found: dict[str, Float32] = {}
        for name, shape, size in zip(names, shapes, sizes[len(given) :], strict=True):
            place = part[begin : begin + size].view(np.float32).reshape(shape)
            binding.bind_output(name, "cpu", 0, np.float32, shape, place.ctypes.data)
            found[name] = np.asarray(_Lent(place, loan))
            begin += _aligned(size)
        self._session.run_with_iobinding(binding)
        return found

    def _shapes(self, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[tuple[int, ...]] | None:
        """Return the shapes of outputs: their dimensions are numbers, or have the names of dimensions of inputs."""
        sizes: dict[int | str | None, int] = {}
        for tensor in self._inputs:
            sizes |= zip(tensor.shape, feeds[tensor.name].shape, strict=True)
        shapes = []
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
