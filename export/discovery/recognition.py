"""Recognises the parts of a front-end in the recorded operations of a library's model.

Letters: B batch, L length.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from preblock.export.discovery.errors import DiscoveryError
from preblock.export.discovery.index_rules import without_fill
from preblock.export.discovery.trace import Value

VIEWS = {
    *("view", "_unsafe_view", "_reshape_alias", "reshape", "expand", "unsqueeze", "squeeze", "flatten", "unflatten"),
    *("slice", "select", "permute", "transpose", "t", "alias", "detach", "clone", "contiguous", "_to_copy"),
    *("constant_pad_nd", "repeat"),
}
"""Operations with the values of their first argument, perhaps in another shape, or with padding at its end."""
REPLACEMENTS = {"where", "masked_fill", "masked_scatter", "index_put", "copy", "slice_scatter", "select_scatter"}
"""Operations that may put other vectors in place of some ids'. The proof over every id finds these ids."""
FILLS = {"new_full", "new_zeros", "new_ones", "full_like", "zeros_like", "ones_like"}
"""Operations with the shape of their first argument at most, not its values."""
GATHERS = {"embedding", "index_select", "index"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One step of a front-end as the library runs it.

    Args:
        kind: "tokens"; "scale"; "rows" for added rows of a table; "norm"; "rms_norm"; "project"; "mask".
        weight: name in the model of the table or matrix; empty for computed rows, and for a norm without a weight.
        bias: name in the model of the bias; empty for none.
        by: factor of a scale, or of added rows.
        cast: the factor was a tensor.
        eps: of a norm.
        index: row of each token; None for rows in order, beginning at `first`.
        first: row of the first token, without an index.
        vectors: the added rows themselves, before their factor.

    """

    kind: Literal["tokens", "scale", "rows", "norm", "rms_norm", "project", "mask"]
    weight: str = ""
    bias: str = ""
    by: float = 1.0
    cast: bool = False
    eps: float = 0.0
    index: Tensor | None = None
    first: int = 0
    vectors: Tensor | None = None


def recognise_ids(value: Value, ids: Tensor) -> list[Part]:
    """Return the parts between the token ids (B, L) and `value`, the token table first.

    Raises:
        DiscoveryError: an operation is outside the general form of a front-end; the message names it.

    """
    return _Reader(lambda value: _is_token_lookup(value, ids)).read(value)


def recognise_vectors(value: Value, name: str) -> list[Part]:
    """Return the parts between the vectors given as the input `name`, and `value`.

    Raises:
        DiscoveryError: as `recognise_ids`.

    """
    return _Reader(lambda value: value.operation == "input" and value.name == name).read(value)


def _is_token_lookup(value: Value, ids: Tensor) -> bool:
    if value.operation not in GATHERS:
        return False
    index = _gather_index(value)
    if index is None:
        return False
    index = without_fill(index, ids)
    return index.numel() == ids.numel() and any(
        torch.equal(index.reshape(-1), given.reshape(-1)) for given in (ids, ids.t())
    )


def _gather_index(value: Value) -> Tensor | None:
    place = 2 if value.operation == "index_select" else 1
    index = value.arguments[place]
    return index.tensor if isinstance(index, Value) and index.operation != "list" else None


class _Reader:
    """Reads a graph of values backwards, along the values behind a start."""

    def __init__(self, is_start: Callable[[Value], bool]) -> None:
        self._is_start = is_start
        self._known: dict[int, bool] = {}

    def read(self, value: Value) -> list[Part]:
        parts: list[Part] = []
        while True:
            value = self._through_views(value)
            if self._is_start(value):
                if value.operation != "input":
                    parts.append(Part(kind="tokens", weight=_tensor_name(value.arguments[0])))
                return parts[::-1]
            part, value = self._read_one(value)
            if part is not None:
                parts.append(part)

    def _read_one(self, value: Value) -> tuple[Part | None, Value]:
        operation, arguments = value.operation, value.arguments
        for read in (self._read_norm, self._read_rms_norm):
            if norm := read(value):
                return norm
        carriers = [source for source in value.sources() if self._carries(source)]
        if not carriers:
            raise DiscoveryError(f"block 0 reads {operation}() of {', '.join(sorted(value.leaves())) or 'constants'}")
        if len(carriers) > 1:
            raise DiscoveryError(f"{operation}() joins several lookups of the token ids")
        carrier = carriers[0]
        others = [argument for argument in arguments[:2] if argument is not carrier]
        if operation in REPLACEMENTS or operation == "cat":
            return None, carrier
        if operation == "list" and carrier is arguments[0] and _is_fill(arguments[1:], carrier):
            return None, carrier
        if operation == "add" and all(extra == 1 for extra in arguments[2:]) and isinstance(others[0], Value):
            return _rows(others[0]), carrier
        if operation == "add" and others[0] == 0:
            return None, carrier
        if operation == "mul":
            return _product(others[0]), carrier
        # The reciprocal of a power of two is exact.
        if operation == "div" and isinstance(others[0], int | float) and math.frexp(others[0])[0] == 0.5:
            return Part(kind="scale", by=1 / others[0]), carrier
        if operation in ("native_layer_norm", "layer_norm") and carrier is arguments[0]:
            _, shape, weight, bias, eps = arguments[:5]
            if len(shape) == 1 and isinstance(weight, Value):
                return Part(kind="norm", weight=_tensor_name(weight), bias=_optional_name(bias), eps=eps), carrier
        if operation == "addmm" and carrier is arguments[1] and all(extra == 1 for extra in arguments[3:]):
            return Part(kind="project", weight=_matrix(arguments[2]), bias=_tensor_name(arguments[0])), carrier
        if operation == "mm" and carrier is arguments[0]:
            return Part(kind="project", weight=_matrix(arguments[1])), carrier
        raise DiscoveryError(f"{operation}() between the token ids and block 0 is no step of a front-end")

    def _read_norm(self, value: Value) -> tuple[Part, Value] | None:
        """Return a LayerNorm made of single operations: (x - mean) / sqrt(variance + eps) * weight + bias."""
        product, bias = self._find(value, "add")[:2]
        for quotient, weight in self._both_ways(product, "mul"):
            difference, root = self._find(quotient, "div")[:2]
            x, mean = self._find(difference, "sub")[:2]
            eps = self._eps(self._find(root, "sqrt")[0])[1]
            if isinstance(x, Value) and eps is not None and self._find(mean, "mean")[0] is x:
                return Part(kind="norm", weight=_tensor_name(weight), bias=_tensor_name(bias), eps=eps), x
        return None

    def _read_rms_norm(self, value: Value) -> tuple[Part, Value] | None:
        """Return an RMSNorm made of single operations: x * rsqrt(mean(x²) + eps), perhaps * weight."""
        factors = [(value, None), *self._both_ways(value, "mul")]
        for normed, weight in factors:
            for x, root in self._both_ways(normed, "mul"):
                power = self._find(root, "pow")
                mean, eps = self._eps(power[0] if power[1] == -0.5 else self._find(root, "rsqrt")[0])
                square = self._find(self._find(mean, "mean")[0], "pow")
                if isinstance(x, Value) and eps is not None and square[0] is x and square[1] == 2:
                    return Part(kind="rms_norm", weight=_optional_name(weight), eps=eps), x
        return None

    def _find(self, start: object, operation: str) -> list[Any]:
        """Return the arguments of `operation` behind views, or two times None for another operation."""
        found = self._through_views(start) if isinstance(start, Value) else None
        return list(found.arguments) if found is not None and found.operation == operation else [None, None]

    def _both_ways(self, start: object, operation: str) -> list[tuple[Any, Any]]:
        one, other = self._find(start, operation)[:2]
        return [(one, other), (other, one)]

    def _eps(self, start: object) -> tuple[Any, float | None]:
        """Return both terms of a sum, the number last; None for it if there is none."""
        for term, eps in self._both_ways(start, "add"):
            if isinstance(eps, float):
                return term, eps
        return None, None

    def _through_views(self, value: Value) -> Value:
        while value.operation in VIEWS and not self._is_start(value):
            value = next(value.sources())
        return value

    def _carries(self, value: Value) -> bool:
        waiting = [value]
        while waiting:  # no recursion, because graphs may be deep
            current = waiting[-1]
            if id(current) in self._known:
                waiting.pop()
                continue
            if self._is_start(current) or current.operation in FILLS:
                self._known[id(current)] = current.operation not in FILLS
                continue
            unknown = [source for source in current.sources() if id(source) not in self._known]
            if unknown:
                waiting.extend(unknown)
                continue
            self._known[id(current)] = any(self._known[id(source)] for source in current.sources())
        return self._known[id(value)]


def _is_fill(further: tuple[object, ...], vectors: Value) -> bool:
    """Return whether `further` parts of a row are made from tensors of `vectors` alone: padding up to a window."""
    known = vectors.leaves()
    return all(isinstance(part, Value) and part.name == "" and part.leaves() <= known for part in further)


def _product(other: object) -> Part:
    if isinstance(other, int | float):
        return Part(kind="scale", by=float(other))
    assert isinstance(other, Value)
    inputs = other.leaves()
    if other.tensor.numel() == 1 and not {"input_ids", "attention_mask"} & inputs:
        return Part(kind="scale", by=float(other.tensor), cast=True)
    bits = other.tensor.eq(0).logical_or(other.tensor.eq(1))
    if other.tensor.ndim == 3 and other.tensor.shape[-1] == 1 and bool(bits.all()):
        return Part(kind="mask")
    raise DiscoveryError(f"mul() by values of {', '.join(sorted(inputs)) or 'constants'} is no step of a front-end")


def _rows(value: Value) -> Part:
    """Return added rows: of a table by an index, of a table in order, or computed."""
    value, by = _unscaled(value)
    vectors = value.tensor
    if value.operation in GATHERS:
        table = _without_views(value.arguments[0])[0]
        index = _gather_index(value)
        if index is not None and table.operation in ("tensor", "constant"):
            return Part(kind="rows", weight=table.name, by=by, index=index, vectors=vectors)
    table, first = _without_views(value)
    if table.operation == "tensor" and table.tensor.ndim == 1:
        raise DiscoveryError(f"the vector {table.name} is added to every token")
    if table.operation == "tensor":
        return Part(kind="rows", weight=table.name, by=by, first=first, vectors=vectors)
    if {"input_ids", "attention_mask"} & value.leaves():
        raise DiscoveryError(f"{value.operation}() of the token ids is added to the lookup")
    return Part(kind="rows", by=by, vectors=vectors)


def _unscaled(value: Value) -> tuple[Value, float]:
    by = 1.0
    while value.operation in VIEWS or value.operation == "mul":
        if value.operation == "mul":
            number = next((a for a in value.arguments if isinstance(a, int | float)), None)
            if number is None or by != 1.0:
                break
            by = float(number)
        inner = next(value.sources())
        if inner.operation == "tensor":
            break
        value = inner
    return value, by


def _without_views(value: Value) -> tuple[Value, int]:
    """Return the tensor behind views, and the first of its rows in the view."""
    first = 0
    while value.operation in VIEWS:
        if value.operation == "slice" and len(value.arguments) > 2:
            _, _, begin = value.arguments[:3]
            first += begin or 0
        value = next(value.sources())
    return value, first


def _tensor_name(value: object) -> str:
    found = _without_views(value)[0] if isinstance(value, Value) else None
    if found is None or found.operation != "tensor":
        raise DiscoveryError("a table or matrix of the front-end is computed, not stored")
    return found.name


def _optional_name(value: object) -> str:
    return "" if value is None else _tensor_name(value)


def _matrix(value: object) -> str:
    """Return the name of a weight (out, in) that is multiplied transposed."""
    if not isinstance(value, Value) or value.operation not in ("t", "transpose", "permute"):
        raise DiscoveryError("a matrix before block 0 is not stored as (out, in)")
    return _tensor_name(value)
