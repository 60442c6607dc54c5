"""Calls on the CPU of the graph that is given positions, kept ready: what they read and write stays bound.

Making a call anew takes longer than a small one itself. And what a graph returns has memory of its own in onnxruntime,
so that a sum that comes last reads vectors in one place and writes them in another. Where the graph returns those
vectors too, both can be given the same: less goes through the caches.

Letters: B batch, L length, D output width, P width of the table of positions.
"""

from collections import Counter
from collections.abc import Mapping
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import EMBEDDINGS, POSITION_EMBEDDINGS, SUMMAND
from preblock.service.runtime.fused_embedding import Sums, TokenTable
from preblock.service.runtime.position_table import place
from preblock.service.runtime.session import Prepared, Session

Feeds = Mapping[str, NDArray[Any]]
Float32 = NDArray[np.float32]
Shape = tuple[int, int, int]
"""Of ids, and of how many offsets."""
OFTEN = 16
"""How often a shape comes before a call of it is made ready, which takes longer than a call."""
SHAPES = 256
"""Shapes that are counted, before the count begins anew."""
CALLS = 4
"""Calls of one shape that are ready, so that the vectors of as many may be held at the same time."""
LARGEST, ROOM = 2**21, 2**24
"""Bytes of the vectors of a call that is kept ready, and of all such."""
ROWS = 32
"""Rows of a call that has an offset for each; for more the positions are looked up by the plain graph."""
LINE = 64
"""Bytes of a line of the caches."""


class ReadyCalls:
    """Calls of a graph that is given positions, for one offset, or for rows of one token that have one each.

    `in_place` says whether it returns the `summand` to which it adds positions last, so that it is written there.

    Args:
        session: runs it.
        positions: vectors of all positions, (1, max_len, P).
        tokens: rows to which the graph adds positions, and nothing else; default None, where it does something else.
        often: how often a shape comes before a call of it is made ready; default `OFTEN`.

    """

    def __init__(
        self, session: Session, positions: Float32, tokens: TokenTable | None = None, often: int = OFTEN
    ) -> None:
        self._session, self._positions, self._tokens, self._often = session, positions, tokens, often
        widths = {tensor.name: tensor.shape[-1] for tensor in session.outputs}
        self._width = int(widths[EMBEDDINGS] or 0)
        # Where one is narrower than the sum, it is widened on the way.
        self.in_place = self._width == widths.get(SUMMAND) == positions.shape[2]
        self._ready: dict[Shape, _Ready] = {}
        self._came: Counter[Shape] = Counter()
        self._lock = Lock()

    def run(self, feeds: Feeds) -> Float32 | None:
        """Return `embeddings` (B, L, D); None where this shape came too seldom, or all that is ready for it is held."""
        ready = self._ready.get(_shape(feeds)) or self._often_enough(feeds)
        if ready is None or (call := ready.take() or self._another(ready, feeds)) is None:
            return None
        return call.run(feeds, ready.free)

    def _often_enough(self, feeds: Feeds) -> "_Ready | None":
        """Keep calls of a shape ready from now on, if it comes often and they are not too large."""
        batch, length, offsets = shape = _shape(feeds)
        size = 4 * batch * length * (self._width if offsets == 1 else self._width + self._positions.shape[2])
        if offsets > ROWS or (offsets > 1 and length > 1):
            return None
        with self._lock:
            if size > LARGEST or not self._comes_often(shape):
                return None
            self._make_room(CALLS * size)
            ready = self._ready[shape] = _Ready(CALLS * size)
        return ready

    def _another(self, ready: "_Ready", feeds: Feeds) -> "_Call | None":
        """Make a call ready, if there may be one more."""
        with self._lock:
            if ready.made >= CALLS:
                return None
            ready.made += 1
        return _Call(self._session, self._positions, self._tokens, feeds, self._width, self.in_place)

    def _comes_often(self, shape: Shape) -> bool:
        """Count a shape, and return whether it came often enough."""
        self._came[shape] += 1
        if self._came[shape] > self._often:
            del self._came[shape]
            return True
        if len(self._came) > SHAPES:
            self._came.clear()
        return False

    def _make_room(self, size: int) -> None:
        """Let go of the shapes that are there for longest, until so many bytes are free."""
        while sum(ready.size for ready in self._ready.values()) + size > ROOM:
            del self._ready[next(iter(self._ready))]


class _Ready:
    """Calls of one shape.

    Args:
        size: bytes that they may take.

    """

    def __init__(self, size: int) -> None:
        self.size, self.made = size, 0
        self.free: list[_Call] = []

    def take(self) -> "_Call | None":
        """Return a call that is free."""
        try:
            return self.free.pop()
        except IndexError:
            return None


class _Call:
    """A call of one shape, whose vectors are so wide; they are written into the `summand` where it is `in_place`.

    Where it is rows of `tokens` that positions are added to, the two are added without the session.
    """

    def __init__(
        self,
        session: Session,
        positions: Float32,
        tokens: TokenTable | None,
        feeds: Feeds,
        width: int,
        in_place: bool,
    ) -> None:
        self._positions = positions
        self._values = _aligned((*feeds["input_ids"].shape, width))
        self.interface = self._values.__array_interface__
        batch, _, offsets = _shape(feeds)
        self._looked_up = None if offsets == 1 else _aligned((batch, 1, positions.shape[2]))
        self._offset = int(feeds["offset"][0])
        given = place(feeds, positions) if self._looked_up is None else _placed(feeds, self._looked_up)
        self._prepared: Prepared | Sums
        if tokens is not None:
            self._prepared = Sums(tokens, given[POSITION_EMBEDDINGS], self._values)
        else:
            outputs = {EMBEDDINGS: self._values} | ({SUMMAND: self._values} if in_place else {})
            self._prepared = session.prepare(given, outputs, POSITION_EMBEDDINGS)

    def run(self, feeds: Feeds, free: "list[_Call]") -> Float32:
        """Return the vectors; when nobody holds them any more, this is one of the `free` again."""
        lent = _Lent(self, free)
        if self._looked_up is not None:
            # Every offset was checked. In any other mode they would be looked up elsewhere first, and copied.
            self._positions[0].take(feeds["offset"], 0, self._looked_up[:, 0], "clip")
        elif (offset := feeds["offset"].item()) != self._offset:
            self._prepared.take(place(feeds, self._positions)[POSITION_EMBEDDINGS])
            self._offset = offset
        self._prepared.run(feeds)
        return np.asarray(lent)


class _Lent:
    """The vectors of a call as NumPy is told of them; the call is free when this goes."""

    __slots__ = ("__array_interface__", "_call", "_free")

    def __init__(self, call: _Call, free: list[_Call]) -> None:
        self.__array_interface__ = call.interface
        self._call, self._free = call, free

    def __del__(self) -> None:
        self._free.append(self._call)


def _shape(feeds: Feeds) -> Shape:
    batch, length = feeds["input_ids"].shape
    return batch, length, len(feeds["offset"])


def _placed(feeds: Feeds, positions: Float32) -> Feeds:
    """Return the feeds of the graph that is given positions, which are these."""
    return {name: values for name, values in feeds.items() if name != "offset"} | {POSITION_EMBEDDINGS: positions}


def _aligned(shape: tuple[int, ...]) -> Float32:
    """Return memory that begins with a line of the cache: vectors that lie across two cost a sixth more."""
    room = np.empty(4 * prod(shape) + LINE, np.uint8)
    begin = -room.__array_interface__["data"][0] % LINE
    return room[begin : begin + 4 * prod(shape)].view(np.float32).reshape(shape)
