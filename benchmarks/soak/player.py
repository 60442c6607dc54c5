"""Random operations on a decode stream, for any protocol."""

from contextlib import suppress
from typing import Any

import numpy as np

from benchmarks.soak.common import BROKEN, Soak, Vectors, expect
from benchmarks.soak.streams import ClientStreams, Message, StepAnswer

MOST_ROWS, LONGEST = 5, 4


class Player:
    """Sends random messages to one stream, and checks the answers.

    Args:
        soak: state shared by all clients.
        protocol: connection of the stream.
        random: random generator.

    """

    def __init__(self, soak: Soak, protocol: Any, random: np.random.Generator) -> None:
        self.soak, self.protocol, self.random = soak, protocol, random
        self.offset = self.draw(int(random.integers(1, MOST_ROWS)), soak.limit)

    def draw(self, size: int, limit: int) -> list[int]:
        """Return random integers from 0 to `limit` - 1."""
        return [int(value) for value in self.random.integers(0, limit, size)]

    async def play(self) -> None:
        """Send messages until the test is over, and close the stream."""
        try:
            await self.open()
            while self.soak.done < 1:
                chance = self.random.random()
                if chance < 0.003:
                    await self.open()
                    self.soak.counts["left"] += 1
                elif chance < 0.04:
                    await self.refused()
                elif chance < 0.16 or not self.offset:
                    await self.move()
                else:
                    await self.step()
        finally:
            with suppress(*BROKEN):
                await self.protocol.leave()

    async def open(self) -> None:
        """Open the stream at the offsets of its rows, with a new connection after each failure."""

        async def opened() -> bool:
            await self.protocol.open(self.offset)
            return True

        while not await self.soak.attempt(self.protocol.name, opened):
            pass

    async def tell(self, message: Message, number: int = 0) -> StepAnswer:
        """Send a message until it is answered. A message without an answer has no effect on the next connection."""
        while (
            answer := await self.soak.attempt(self.protocol.name, lambda: self.protocol.ask(message, number))
        ) is None:
            await self.open()
        told: StepAnswer = answer
        return told

    async def refused(self) -> None:
        """Send an invalid message, and expect an error."""
        beyond = max([self.soak.limit, *self.offset])
        row = len(self.offset)
        choices: list[Message] = [
            *self.protocol.garbage,
            {"input_ids": [[0]] * (row + 1)},
            {"input_ids": [[self.soak.vocabulary]] + [[0]] * (row - 1)},
            {"input_ids": [[-1]] + [[0]] * (row - 1)},
            {"input_ids": [[0] * (self.soak.limit + 1)] + [[]] * (row - 1)},
            {"reorder": [row]},
            {"append": [self.soak.limit + 1]},
            {"drop": [-1]},
        ]
        if row:  # a rewind needs a row
            choices.append({"rewind": [beyond + 1]})
        if row and not isinstance(self.protocol, ClientStreams):
            choices.append({"input_ids": [[0]] * row, "offset": [at + 1 for at in self.offset]})
        message = choices[int(self.random.integers(len(choices)))]
        answer = await self.tell(message)
        expect(answer.refused, f"{message!r:.200} at {self.offset}", answer)
        self.soak.refused[self.protocol.name] += 1

    async def move(self) -> None:
        """Rewind, reorder, append or drop rows, or ping."""
        name = str(self.random.choice(["rewind", "rewind", "reorder", "append", "drop", "ping"]))
        rows, after = len(self.offset), list(self.offset)
        value: Any = True
        if name == "append" or not rows:
            name, value = "append", self.draw(1 + (rows == 0), self.soak.limit)
            if rows >= MOST_ROWS:
                name, value = "drop", self.draw(1, rows)
            after = self.offset + value
        if name == "rewind":
            value = after = [int(self.random.integers(0, at + 1)) for at in self.offset]
        elif name == "reorder":
            value = self.draw(int(self.random.integers(1, MOST_ROWS + 1)), rows)
            after = [self.offset[row] for row in value]
        elif name == "drop":
            value = self.draw(1, rows) if value is True else value
            after = [at for row, at in enumerate(self.offset) if row not in value]
        answer = await self.tell({name: value})
        expect(not answer.refused and answer.offset == after, f"{name} {value} at {self.offset}", answer)
        self.offset = after
        self.soak.counts[name] += 1

    async def step(self) -> None:
        """Feed tokens, sometimes with explicit positions, sometimes with a repeated message."""
        random, rows = self.random, len(self.offset)
        lengths = [1] * rows if random.random() < 0.7 else [int(n) for n in random.integers(0, LONGEST + 1, rows)]
        if not any(lengths):
            lengths[0] = 1
        ids = [self.draw(length, self.soak.vocabulary) for length in lengths]
        message: dict[str, Any] = {"input_ids": ids}
        after = [at + length for at, length in zip(self.offset, lengths, strict=True)]
        places = [list(range(at, end)) for at, end in zip(self.offset, after, strict=True)]
        if random.random() < 0.05:
            message["position_ids"] = places = [self.draw(length, self.soak.limit) for length in lengths]
            after = [max(row) + 1 if row else at for row, at in zip(places, self.offset, strict=True)]
        elif random.random() < 0.3:
            message["offset"] = self.offset
        twice = random.random() < 0.05 and not isinstance(self.protocol, ClientStreams)
        number = self.protocol.number + 1 if twice else 0
        answer = await self.tell(message, number)
        if "position_ids" not in message and max(after) > self.soak.limit:
            expect(answer.refused, f"{message!r} at {self.offset}", answer)
            await self.rewind_all()
            return
        expected = self.soak.truth.vectors(ids, places)
        self.check(message, answer, after, expected)
        self.offset = after
        if twice:
            # After a broken connection the server cannot recognize the repeated message.
            again = await self.soak.attempt(self.protocol.name, lambda: self.protocol.ask(message, number))
            if again is None:
                await self.open()
            else:
                self.check(message, again, after, expected)
                self.soak.counts["repeated"] += 1

    def check(self, message: Message, answer: StepAnswer, after: list[int], expected: Vectors) -> None:
        """Compare the answer to a step with the expected vectors and offsets."""
        right = answer.vectors is not None and answer.vectors.tobytes() == expected.tobytes()
        expect(right and answer.offset == after, f"{message!r} to {after} by {self.protocol.name}", answer)
        self.soak.right[self.protocol.name] += 1

    async def rewind_all(self) -> None:
        """Halve the offsets after a row reached max_len."""
        self.soak.counts["full"] += 1
        after = [at // 2 for at in self.offset]
        answer = await self.tell({"rewind": after})
        expect(answer.offset == after, f"rewind at {self.offset}", answer)
        self.offset = after
