"""Large answers: computed a piece after another, so that neither memory nor the time of others goes with their size.

Letters: B batch, T tokens of all rows.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from incipit.service.batching import SMALL
from incipit.service.calls import Call, Member
from incipit.service.manifest import Manifest
from incipit.service.messages import Int64, Request, Rows
from incipit.service.pooling import pool
from incipit.service.positions import real_tokens
from incipit.service.repository import Model
from incipit.service.rounding import cast

WRITTEN_WHOLE = 2**21
"""Values that are still computed and written as text at once, in a thread: several times as fast as piece by piece, and
some 30 MB of memory."""


def in_pieces(request: Request, call: Call, manifest: Manifest, size: int, most: int) -> bool:
    """Return whether a call for `size` values is large, and pieces of `most` tokens give its vectors."""
    return (
        size > (SMALL if request.check is None else WRITTEN_WHOLE)
        and len(request.outputs) == 1
        and not manifest.rotary_of(request.outputs)
        and (manifest.counts == "slots" or call.feeds["input_ids"].shape[1] <= most)
    )


def check_values(model: Model, name: str, member: Member, most: int) -> None:
    """Raise Invalid where a value of a call is too large for the type of the answer, or one that it cannot hold.

    This is the first half of the run that `computed` goes on with.
    """
    request = member.request
    assert request is not None
    member.execution.passed()
    for vectors in model.run_in_pieces(member.feeds, name, most):
        narrow = cast(vectors, request.dtype)
        if request.check is not None:
            request.check(narrow)


def computed(model: Model, name: str, member: Member, most: int) -> Iterator[NDArray[np.generic]]:
    """Yield no value, and then the vectors of a call in pieces of at most `most` tokens, and count it."""
    execution, request = member.execution, member.request
    assert request is not None
    success = False
    try:
        yield np.empty(0, np.float32)
        for vectors in model.run_in_pieces(member.feeds, name, most):
            yield cast(vectors, request.dtype)
        execution.passed()
        execution.passed()
        execution.batch, success = execution.rows, True
    finally:
        execution.end(success)


def pooled(model: Model, names: tuple[str, ...], member: Member) -> NDArray[np.generic]:
    """Return one vector for each row, (B, width), of which only a few are computed at a time."""
    request, feeds, execution = member.request, member.feeds, member.execution
    assert request is not None
    rows, real = request.input_ids, real_tokens(request, model.manifest)
    length = feeds["input_ids"].shape[1]
    most = max(1, SMALL // model.manifest.widths[request.outputs[0]])
    execution.passed()
    found: list[NDArray[np.float32]] = []
    for first, last in _groups(rows.lengths, most):
        begin, end = int(rows.starts[first]), int(rows.starts[last - 1] + rows.lengths[last - 1])
        part = {name: values[begin // length : end // length] for name, values in feeds.items()}
        if len(feeds["offset"]) == 1:
            part["offset"] = feeds["offset"]
        (vectors,) = model.run(part, names).values()
        some = Rows(rows.values[begin:end], rows.lengths[first:last])
        kept = None if real is None else real[begin:end]
        found.append(pool(vectors.reshape(end - begin, -1), some, kept, request.pooling))
    execution.passed()
    pooled = cast(np.concatenate(found), request.dtype)
    execution.passed()
    execution.batch = execution.rows
    return pooled


def _groups(lengths: Int64, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each group, and the one after its last, which have at most `most` tokens, or one row."""
    first, tokens = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > first and tokens + length > most:
            yield first, row
            first, tokens = row, 0
        tokens += length
    yield first, len(lengths)
