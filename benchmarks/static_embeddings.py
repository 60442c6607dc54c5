"""Requests per second of a static embedding model: Preblock beside wordllama behind a plain FastAPI handler.

    python -m benchmarks.static_embeddings [--rounds N] [--seconds S]

The model is `wordllama` of `make serve`, a table (32000, 256). Both servers run on one core, and take turns in
each round. `wrk` sends the same JSON to both over 4 connections from another core: 1 or 256
sentences of 8 to 24 words. First, their vectors are compared. Prints the medians and the ratio of each round, and
`Server-Timing` of Preblock: how long each phase of a request takes. Run it on an idle machine.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.streams import SERVER_CORE, running
from benchmarks.tensors import CONNECTIONS, Protocol, rate, script

MODEL, PATH = "wordllama", "/v1/embeddings"
SOURCE = Path(sys.prefix) / "checkpoints" / MODEL
FLOORS = {1: 2.0, 256: 1.2}
"""Sentences of a request -> the least ratio of the requests per second."""
PEER = Path(__file__).parent / "peers" / "with_wordllama.py"


def main() -> None:
    """Serve the model twice, measure, and print the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    options = parser.parse_args()
    preblock = Path(sys.executable).parent / "preblock"
    pinned = ("taskset", "-c", SERVER_CORE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = read_words()
        requests = {count: request_of(words, count) for count in FLOORS}
        serve = (preblock, "serve", "--repository", "model_repository", "--port", 0)
        with (
            running(*pinned, *serve) as (_, port),
            running(*pinned, sys.executable, PEER, SOURCE) as (_, peer_port),
        ):
            for protocol in requests.values():
                np.testing.assert_allclose(ask(port, protocol)[0], ask(peer_port, protocol)[0], rtol=1e-4, atol=1e-6)
            found: dict[int, list[tuple[float, float]]] = {count: [] for count in requests}
            for _ in range(options.rounds):
                for count, protocol in requests.items():
                    lua = script(folder, str(count), protocol)
                    theirs = rate(peer_port, PATH, lua, options.seconds, CONNECTIONS)
                    found[count].append((rate(port, PATH, lua, options.seconds, CONNECTIONS), theirs))
            timings = {count: ask(port, protocol)[1] for count, protocol in requests.items()}
    print(f"{CONNECTIONS} connections, load {os.getloadavg()[0]:.1f}")
    missed = False
    for count, rounds in found.items():
        ours, theirs = (statistics.median(rates) for rates in zip(*rounds, strict=True))
        ratios = [one / other for one, other in rounds]
        ratio, floor = statistics.median(ratios), FLOORS[count]
        missed |= ratio < floor
        print(
            f"sentences {count}: {ours:.0f}/s beside {theirs:.0f}/s, ratio {ratio:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}), {'missed' if ratio < floor else 'held'}: at least {floor}"
        )
        print(f"  Server-Timing: {timings[count]}")
    sys.exit(missed)


def read_words() -> list[str]:
    """Return the whole words of the vocabulary."""
    document = json.loads((SOURCE / "tokenizers/l2_supercat_tokenizer_config.json").read_bytes())
    words = (token[1:] for token in document["model"]["vocab"] if token.startswith("▁"))
    return sorted(word for word in words if word.isascii() and word.isalpha())


def request_of(words: list[str], count: int) -> Protocol:
    """Return a request for the vectors of so many sentences."""
    draw = random.Random(count)
    sentences = [" ".join(draw.choices(words, k=draw.randint(8, 24))) for _ in range(count)]
    body = json.dumps({"model": MODEL, "input": sentences}).encode()
    return Protocol(PATH, body, {"Content-Type": "application/json"})


def ask(port: int, protocol: Protocol) -> tuple[NDArray[np.float32], Any]:
    """Return the vectors of an answer, float32 (B, D), and its `Server-Timing`."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{PATH}", protocol.body, dict(protocol.headers))
    with urllib.request.urlopen(request) as response:
        document = json.load(response)
    vectors = np.array([item["embedding"] for item in document["data"]], np.float32)
    return vectors, response.headers["Server-Timing"]


if __name__ == "__main__":
    main()
