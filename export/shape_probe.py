"""Runs a graph at shapes not used for its export, and reports axes and values frozen by the exporter.

An exporter may silently take a size or a value of its sample for a constant.

Letters: B batch, L length, D output width, M maximum length.
"""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from preblock.export.errors import ParityError
from preblock.export.outputs import OUTPUTS
from preblock.export.parity import Arguments, Float32, compare, judge
from preblock.export.parity_cases import UNLIMITED_LENGTH, GridCase, feeds_of, longest
from preblock.export.reference import Reference
from preblock.service.artifacts.names import CONTEXT, EMBEDDINGS
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.session import Session

BATCHES, LENGTHS = (0, 1, 3, 64), (0, 1, 5)
MAX_OUTPUT_VALUES = 2**22
"""Most values of an output of several rows. Larger ones take several times the memory, and prove no more."""


class ShapeProbe:
    """The check of one graph of token ids against its reference.

    Args:
        reference: the expected values.
        session: session of the graph.
        graph: name of the graph, for errors.

    """

    def __init__(self, reference: Reference, session: Session, graph: str) -> None:
        output = OUTPUTS[graph]
        self._reference, self._session, self._graph = reference, session, graph
        self._output = session.outputs[0].name
        self._expected, self._allowed = output.expect, output.allowed_ulp(reference)
        self._shape = output.shape(reference) or ()
        self._end = reference.signature.max_len or UNLIMITED_LENGTH

    def check(self) -> None:
        """Run the graph over batches, lengths and offsets.

        Raises:
            ParityError: an axis is frozen, the offset is constant, or positions are clamped.

        """
        for tensor in (*self._session.inputs, *self._session.outputs):
            axes = {"offset": ("offsets",), CONTEXT: ("batch",)}.get(tensor.name, ("batch", "length"))
            for axis, size in zip(axes, tensor.shape, strict=False):  # the width of vectors is fixed
                if isinstance(size, int):
                    raise self._error(f"axis {axis} of {tensor.name} is frozen at {size}")
        if self._output == EMBEDDINGS:
            self._check_offset()
        lengths = sorted({min(length, self._end) for length in (*LENGTHS, longest(self._reference.signature))})
        first = 0 if self._reference.config else 1  # code with `view` and -1 takes no empty tensors
        for batch in BATCHES[first:]:
            self._check_axis("batch", batch, min(LENGTHS[-1], self._end))
        for length in lengths[first:]:
            self._check_axis("length", 1, length)
        for batch, length in itertools.product(BATCHES[1:], lengths[1:]):
            if batch == 1 or batch * length * math.prod(self._shape) <= MAX_OUTPUT_VALUES:
                self._check_values(batch, length)
        if self._output == EMBEDDINGS and self._reference.signature.max_len and self._session.provider == CPU:
            self._check_beyond()

    def _check_offset(self) -> None:
        """Compare the last legal offset of one token with the first, and with the one before."""
        last = self._end - 1
        for fault, other in (("offset is baked in", 0), ("positions are clamped", last - 1)):
            if other < 0:
                continue
            graph, reference = (
                np.array_equal(run(1, 1, (other,)), run(1, 1, (last,))) for run in (self._run, self._expect)
            )
            if graph and not reference:
                raise self._error(f"{fault}: offset {last} gives the vectors of {other}")

    def _check_axis(self, axis: str, batch: int, length: int) -> None:
        found = self._try(batch, length, (0,))
        if isinstance(found, str) or found.shape != (batch, length, *self._shape):
            reason = found if isinstance(found, str) else f"the vectors have shape {found.shape}"
            raise self._error(f"axis {axis} is frozen: at batch {batch} and length {length}, {reason}")

    def _check_values(self, batch: int, length: int) -> None:
        """Compare graph and reference at the first and the last offset, and at one offset for each row."""
        last = self._end - length
        offsets = {(0,): "", (last,): ""}
        if batch > 1:
            offsets[tuple(np.linspace(last, 0, batch, dtype=int).tolist())] = "offset is the same for every row: "
        for offset, hint in offsets.items() if self._output == EMBEDDINGS else (((0,), ""),):
            arguments: Arguments = {"batch": batch, "length": length, "offset": list(offset)}
            found, expected = self._run(batch, length, offset), self._expect(batch, length, offset)
            try:
                judge(self._output, [compare(found, expected, arguments)], self._allowed)
            except ParityError as error:
                raise self._error(f"{hint}{error}") from error

    def _check_beyond(self) -> None:
        """Run one position over the limit: equal vectors there and at the last legal position show clamping."""
        end = self._end
        if end < 2 or np.array_equal(self._run(1, 1, (end - 2,)), last := self._run(1, 1, (end - 1,))):
            return  # positions make no difference in this graph
        for length in (1, 2):
            found = self._try(1, length, (end + 1 - length,))
            if isinstance(found, str):
                continue
            if found.shape[1] != length or np.array_equal(found[:, -1:], last):
                raise self._error(f"positions are clamped: {end}, beyond the last, gives the vectors of {end - 1}")

    def _feeds(self, batch: int, length: int, offset: tuple[int, ...]) -> dict[str, NDArray[np.int64]]:
        """Return inputs with equal ids, so that tokens differ only in position."""
        signature = self._reference.signature
        token = feeds_of(signature, GridCase(1, 1, (0,), bool(signature.needed), "none"))
        lengths = {CONTEXT: signature.history}
        feeds = {name: np.full((batch, lengths.get(name, length)), value) for name, value in token.items()}
        return feeds | {"offset": np.array(offset)}

    def _try(self, batch: int, length: int, offset: tuple[int, ...]) -> Float32 | str:
        """Return the vectors of the graph, or the error message."""
        feeds = self._feeds(batch, length, offset)
        refusal = self._session.refusal({tensor.name: feeds[tensor.name] for tensor in self._session.inputs})
        return refusal or self._session.run(feeds, [self._output])[self._output]

    def _run(self, batch: int, length: int, offset: tuple[int, ...]) -> Float32:
        found = self._try(batch, length, offset)
        if isinstance(found, str):
            raise self._error(f"it fails at batch {batch}, length {length}, offset {list(offset)}: {found}")
        return found

    def _expect(self, batch: int, length: int, offset: tuple[int, ...]) -> Float32:
        signature, feeds = self._reference.signature, self._feeds(batch, length, offset)
        omitted = ("attention_mask", *(() if signature.needed else signature.indices))
        return self._expected(self._reference, {name: value for name, value in feeds.items() if name not in omitted})

    def _error(self, reason: str) -> ParityError:
        return ParityError(f"{self._graph}: {reason}")
