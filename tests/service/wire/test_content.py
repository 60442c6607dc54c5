"""Content in parts. Oracle: Python's base64."""

import base64
import itertools

import numpy as np
import pytest

from incipit.service.wire.content import CHUNK, COPIED, PACKET, Base64, joined, packets, raw_bytes

RANDOM = np.random.default_rng(0).bytes(5 * CHUNK + 7)


def test_raw_bytes_are_the_array_itself() -> None:
    vectors = np.random.default_rng(0).standard_normal((2, 300))
    view = raw_bytes(vectors)
    assert np.shares_memory(np.frombuffer(view, np.uint8), vectors)
    assert bytes(view) == vectors.tobytes()


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (0, 1, 2, 3, 4), (CHUNK - 1, CHUNK + 1, 2 * CHUNK), (7, 3 * CHUNK)])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, CHUNK, CHUNK + 1, len(RANDOM)])
def test_base64_of_parts_is_that_of_the_whole(size: int, cuts: tuple[int, ...]) -> None:
    whole = RANDOM[:size]
    edges = [0, *(min(cut, size) for cut in cuts), size]
    parts = Base64(tuple(memoryview(whole)[start:end] for start, end in itertools.pairwise(edges)))
    assert joined([b"<", parts, b">"]) == b"<" + base64.b64encode(whole) + b">"
    assert len(parts) == len(base64.b64encode(whole))


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("size", [1, 500, CHUNK, PACKET, len(RANDOM)])
def test_packets_are_the_content_in_large_pieces(size: int, encoded: bool) -> None:
    rows = [RANDOM[start : start + size] for start in range(0, min(len(RANDOM), 2000 * size), size)]
    parts = [part for row in rows for part in (b"[", Base64((row,)) if encoded else row, b"]")]
    sent = list(packets(parts))
    assert b"".join(sent) == joined(parts)
    assert max(map(len, sent)) <= PACKET
    assert all(len(one) + len(other) > COPIED for one, other in itertools.pairwise(sent))


@pytest.mark.parametrize("size", [COPIED + 1, CHUNK, len(RANDOM)])
def test_large_values_are_sent_without_a_copy(size: int) -> None:
    values = np.frombuffer(RANDOM[:size], np.uint8)
    header, *sent = packets([b"header", raw_bytes(values)])
    assert header == b"header"
    assert all(np.shares_memory(np.frombuffer(packet, np.uint8), values) for packet in sent if len(packet) > COPIED)
    assert sum(len(packet) > COPIED for packet in sent) == max(1, size // CHUNK)


def test_base64_is_made_when_it_is_asked_for() -> None:
    taken = packets([Base64((RANDOM,)), Base64(("no bytes",))])  # type: ignore[arg-type]
    assert next(taken) == base64.b64encode(RANDOM[:CHUNK])
