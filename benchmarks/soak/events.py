"""Server-sent events: the vectors of a list of ids, chunk by chunk."""

import json
from typing import Any

import httpx
import numpy as np

from benchmarks.soak.common import Rows, Soak, expect
from benchmarks.soak.streams import told


class Events:
    """Requests the events of one list of ids after another.

    Args:
        soak: state shared by all clients.
        address: URL of the server.
        random: random generator.

    """

    name = "events"

    def __init__(self, soak: Soak, address: str, random: np.random.Generator) -> None:
        self.soak, self.address, self.random = soak, address, random

    async def play(self) -> None:
        """Send requests until the test is over."""
        random, soak = self.random, self.soak
        async with httpx.AsyncClient(base_url=self.address, timeout=None) as http:
            while soak.done < 1:
                lengths = random.integers(1, 9, random.integers(1, 4))
                offset = [int(random.integers(0, soak.limit - length + 1)) for length in lengths]
                ids = [random.integers(0, soak.vocabulary, length).tolist() for length in lengths]
                chunk = int(random.integers(1, 5))
                bad = random.random() < 0.1
                if bad:
                    ids[0][-1] = soak.vocabulary
                answer = await self.ask(http, {"input_ids": ids, "offset": offset, "chunk": chunk})
                if answer is not None:
                    self.check(answer, ids, offset, chunk, bad)

    async def ask(self, http: httpx.AsyncClient, fields: dict[str, Any]) -> httpx.Response | None:
        """Return the answer; None if the connection broke."""
        path, kind = f"/models/{self.soak.model}/decode", {"Accept": "text/event-stream"}
        return await self.soak.attempt(self.name, lambda: http.post(path, json=fields, headers=kind))

    def check(self, answer: httpx.Response, ids: Rows, offset: list[int], chunk: int, bad: bool) -> None:
        """Compare each event with the expected vectors."""
        begins = range(0, max(map(len, ids)), chunk)
        last_good = (len(ids[0]) - 1) // chunk if bad else len(begins)
        self.soak.refused[self.name] += bad
        if bad and last_good == 0:
            expect(answer.status_code == 422, "a bad first chunk", answer.text[:200])
            return
        *events, rest = answer.text.split("\n\n")
        expect(answer.status_code == 200 and not rest, "events", answer.text[:200])
        last = events.pop()
        expect(last.startswith("event: error\n" if bad else "event: end\n"), "the last event", last)
        expect(len(events) == min(last_good, len(begins)), "the number of events", len(events))
        for begin, event in zip(begins, events, strict=False):
            part = [row[begin : begin + chunk] for row in ids]
            places = [[at + begin + index for index in range(len(row))] for at, row in zip(offset, part, strict=True)]
            found, expected = told(json.loads(event.partition("\ndata: ")[2])).vectors, self.soak.truth
            right = found is not None and found.tobytes() == expected.vectors(part, places).tobytes()
            expect(right, "events", event)
            self.soak.right[self.name] += 1
