"""Requests that are alike: a client sends the same one again and again, but for its numbers.

What such requests are for, and what their answers are but for the vectors, is read and written once.

Letters: B batch, L length.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from incipit.service.api.reply import Reply, lines_of
from incipit.service.api.target import Target
from incipit.service.engine import Engine
from incipit.service.errors import IncipitError
from incipit.service.messages import Int64, Request
from incipit.service.plain import Plain, integers
from incipit.service.wire.content import joined

MOST = 256
"""Forms that are kept for a model."""


@dataclass(eq=False, slots=True)
class Form:
    """Requests of one address, with the same headers, whose bodies begin with the same bytes and have one length.

    Args:
        door: by which they come.
        plain: what answers them.
        head: the bytes that their bodies begin with.
        shape: of the ids, (B, L).
        ids_at: where the ids begin in a body.
        offset: int64 (1,) or (B,), the offset of all of them, or of the first one, where it stands in the body.
        offset_at: where the offset begins in a body; None where that holds none.
        headers: of an answer, as lines of HTTP/1.1.
        prefix: what stands before the vectors in the body of an answer.
        path: of the address.

    """

    door: str
    plain: Plain
    head: bytes
    shape: tuple[int, int]
    ids_at: int
    offset: Int64
    offset_at: int | None
    headers: bytes
    prefix: bytes
    path: str = ""

    def read(self, body: bytes) -> tuple[Int64, Int64]:
        """Return the ids (B, L) and the offset of a request."""
        batch, length = self.shape
        ids = integers(body, batch * length, self.ids_at).reshape(self.shape)
        if self.offset_at is None:
            return ids, self.offset
        return ids, integers(body, len(self.offset), self.offset_at)


def form_of(
    door: str, plain: Plain, request: Request, reply: Reply, head: bytes, ids_at: int, offset_at: int | None = None
) -> Form:
    """Return the form of a request that was answered with `reply`, whose last part are the vectors.

    The other arguments are those of `Form`.
    """
    rows = request.input_ids
    assert rows.length is not None
    offset = np.zeros(1, np.int64) if request.offset is None else request.offset
    *prefix, _ = reply.parts
    shape = len(rows.lengths), rows.length
    return Form(door, plain, head, shape, ids_at, offset, offset_at, lines_of(reply.raw_headers), joined(prefix))


class Forms:
    """The forms of requests that were answered; each is forgotten with its model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(self, target: Target, key: Hashable) -> Form | None:
        """Return the form of requests for `target` that have the same `key`, if one was answered."""
        try:
            model = self._engine.repository.find(target.name, target.version)
        except IncipitError:
            return None
        form: Form | None = model.kept.get(key)
        return form

    def keep(self, key: Hashable, form: Form) -> None:
        """Answer requests of the same `key` by `form` from now on, unless limits that hold by now forbid it."""
        batch, length = form.shape
        if batch * length > self._engine.max_tokens or batch > self._engine.limits.rows:
            return
        kept = form.plain.model.kept
        if len(kept) >= MOST:
            kept.clear()
        kept[key] = form
