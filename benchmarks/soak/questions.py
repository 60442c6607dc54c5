"""A question and its answer, whatever the protocol."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.soak.batches import Batch, draw
from benchmarks.soak.shared import Soak, expect

Array = NDArray[Any]
BAD, SEQUENCES = 0.05, 0.2
"""How many questions have a bad one before them, and how many of those that may be are asked as a sequence."""


class Refusal(Exception):
    """The server says that it is the question that is wrong."""


@dataclass(frozen=True)
class Question:
    """What is sent, and what must come.

    Args:
        body: of the request; over gRPC the message.
        expected: returns the right answer, if there is one.
        read: makes such an array of an answer.
        path: over HTTP.
        headers: over HTTP; over gRPC metadata.

    """

    body: bytes
    expected: Callable[[], Array]
    read: Callable[[Any], Array]
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class Endpoint(Protocol):
    """Where questions are asked.

    Attributes:
        name: of the protocol.
        fields: whether it has any beside ids.
        rectangular: whether all rows must have one length; it knows sequences then.

    """

    name: str
    fields: bool
    rectangular: bool

    def write(self, batch: Batch, random: np.random.Generator) -> Question:
        """Return how a batch is asked for, in one of the forms that the protocol has."""

    async def ask(self, question: Question) -> Any:
        """Return the answer.

        Raises:
            Refusal: the server refuses to.
            SoakFailure: it answers with any other error.

        """

    async def leave(self) -> None:
        """Close the connections."""


class Asker:
    """Asks at one protocol, one question after another.

    Args:
        soak: what all clients share.
        protocol: where.
        random: draws.

    """

    def __init__(self, soak: Soak, protocol: Endpoint, random: np.random.Generator) -> None:
        self.soak, self.protocol, self.random = soak, protocol, random

    async def play(self) -> None:
        """Ask until it is enough."""
        try:
            while self.soak.done < 1:
                batch = draw(self.soak, self.protocol.fields, self.protocol.rectangular, self.random)
                # One that is large at a time, so that the peak of memory is not up to how many meet.
                async with self.soak.large if batch.large else nullcontext():
                    await self.batch(batch)
        finally:
            await self.protocol.leave()

    async def batch(self, batch: Batch) -> None:
        """Ask for a batch, at once or in parts, until one breaks: nobody knows then how far the sequence is."""
        may = self.protocol.rectangular and len(batch.ids[0]) > 1 and batch.fields.keys() <= {"offset"}
        sequence = may and self.random.random() < SEQUENCES
        parts = [*batch.in_sequence(next(self.soak.sequences), self.random)] if sequence else [batch]
        for part in parts:
            if self.random.random() < BAD and not await self.bad(part):
                return
            if not await self.good(part):
                return
            self.soak.counts["large"] += part.large
        self.soak.counts["sequences"] += sequence

    async def good(self, batch: Batch) -> bool:
        """Ask for a batch, and compare the answer with the truth; return whether one came."""
        question = self.protocol.write(batch, self.random)
        answer = await self.answer(question)
        if answer is None:
            return False
        what = f"{self.protocol.name}, {len(batch.ids)} rows of {batch.size} tokens, {question.path} {question.headers}"
        expect(not isinstance(answer, Refusal), what, answer)
        found, expected = question.read(answer), question.expected()
        right = (found.dtype, found.shape) == (expected.dtype, expected.shape) and found.tobytes() == expected.tobytes()
        expect(right, what, f"{found.dtype} {found.shape} is not the truth, {expected.dtype} {expected.shape}")
        self.soak.right[self.protocol.name] += 1
        return True

    async def bad(self, batch: Batch) -> bool:
        """Ask for what is not allowed, or say only half of it; return whether an answer came."""
        if self.random.random() < 0.3:
            question = self.protocol.write(batch, self.random)
            question = replace(question, body=question.body[: self.random.integers(len(question.body))])
        else:
            question = self.protocol.write(batch.spoiled(self.soak, self.protocol.fields, self.random), self.random)
        answer = await self.answer(question)
        if answer is not None:
            what = f"{self.protocol.name}, {question.path} {question.headers} {question.body[:200]!r}"
            expect(isinstance(answer, Refusal), what, "a bad request was answered")
            self.soak.refused[self.protocol.name] += 1
        return answer is not None

    async def answer(self, question: Question) -> Any:
        """Return the answer, or why there is none; None where the connection broke."""

        async def ask() -> Any:
            try:
                return await self.protocol.ask(question)
            except Refusal as refused:
                return refused

        return await self.soak.attempt(self.protocol.name, ask)
