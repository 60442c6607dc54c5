"""Questions and their expected answers, for any protocol."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.soak.batches import Batch, draw
from benchmarks.soak.common import Soak, expect

Array = NDArray[Any]
BAD, SEQUENCES = 0.05, 0.2
"""Probability of an invalid question before a valid one, and of a sequence for a suitable batch."""


class Refusal(Exception):
    """The server rejected the question as invalid."""


@dataclass(frozen=True)
class Question:
    """A request with its expected answer.

    Args:
        body: body of the request; over gRPC the message.
        expected: returns the correct vectors of a valid request.
        read: reads the vectors of an answer.
        path: HTTP path.
        headers: HTTP headers; over gRPC the metadata.
        required: bytes of the body before its optional end; alone they are a valid request. None without such an end.

    """

    body: bytes
    expected: Callable[[], Array]
    read: Callable[[Any], Array]
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    required: int | None = None

    def cut(self, random: np.random.Generator) -> "Question":
        """Return the question with a part of its body that is no valid request."""
        size = int(random.integers(len(self.body)))
        return replace(self, body=self.body[: size - (size == self.required)])


class Endpoint(Protocol):
    """A protocol with one answer per question.

    Attributes:
        name: name of the protocol.
        fields: whether it has fields beside ids.
        rectangular: whether all rows must have one length; such a protocol has sequences.

    """

    name: str
    fields: bool
    rectangular: bool

    def write(self, batch: Batch, random: np.random.Generator) -> Question:
        """Return a question for a batch, in a random format of the protocol."""

    async def ask(self, question: Question) -> Any:
        """Send a question, and return the answer.

        Raises:
            Refusal: the server rejected the question.
            SoakFailure: the server answered with another error.

        """

    async def leave(self) -> None:
        """Close the connections."""


class Asker:
    """Sends one question after another over one protocol.

    Args:
        soak: state shared by all clients.
        protocol: protocol of the questions.
        random: random generator.

    """

    def __init__(self, soak: Soak, protocol: Endpoint, random: np.random.Generator) -> None:
        self.soak, self.protocol, self.random = soak, protocol, random

    async def play(self) -> None:
        """Send questions until the test is over."""
        try:
            while self.soak.done < 1:
                batch = draw(self.soak, self.protocol.fields, self.protocol.rectangular, self.random)
                # One large batch at a time keeps the peak of memory independent of chance.
                async with self.soak.large if batch.large else nullcontext():
                    await self.batch(batch)
        finally:
            await self.protocol.leave()

    async def batch(self, batch: Batch) -> None:
        """Send a batch, whole or as a sequence; a broken connection ends the sequence, its state being unknown."""
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
        """Send a valid question, and compare the answer with the expected vectors; return whether one came."""
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
        """Send an invalid or truncated question, and expect an error; return whether an answer came."""
        if self.random.random() < 0.3:
            question = self.protocol.write(batch, self.random).cut(self.random)
        else:
            question = self.protocol.write(batch.spoiled(self.soak, self.protocol.fields, self.random), self.random)
        answer = await self.answer(question)
        if answer is not None:
            what = f"{self.protocol.name}, {question.path} {question.headers} {question.body[:200]!r}"
            expect(isinstance(answer, Refusal), what, "a bad request was answered")
            self.soak.refused[self.protocol.name] += 1
        return answer is not None

    async def answer(self, question: Question) -> Any:
        """Return the answer or the `Refusal`; None if the connection broke."""

        async def ask() -> Any:
            try:
                return await self.protocol.ask(question)
            except Refusal as refused:
                return refused

        return await self.soak.attempt(self.protocol.name, ask)
