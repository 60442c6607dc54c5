"""Pieces that are computed before they are asked for."""

import threading
import time

import pytest

from preblock.service.runtime.prefetch import AHEAD, ahead


def test_results_come_in_order() -> None:
    def run(piece: int) -> int:
        time.sleep(0.001 * (piece % 3))
        return piece**2

    assert list(ahead(run, range(20))) == [piece**2 for piece in range(20)]
    assert list(ahead(run, [])) == []


def test_the_next_run_while_one_is_used() -> None:
    """Two that wait for each other end only if both run at once, and none of them is asked for yet."""
    meeting, met = threading.Barrier(2, timeout=20), threading.Event()

    def run(piece: int) -> int:
        if piece:
            meeting.wait()
            met.set()
        return piece

    results = ahead(run, range(AHEAD + 1))
    assert next(results) == 0
    assert met.wait(20)
    assert list(results) == [1, 2]


def test_no_more_are_begun_than_are_taken_soon() -> None:
    begun: list[int] = []
    results = ahead(begun.append, range(100))
    for taken in range(1, 5):
        next(results)
        assert len(begun) <= taken + AHEAD
    del results
    assert list(ahead(abs, [-7])) == [7]  # behind whatever had begun
    assert len(begun) <= 4 + AHEAD


def test_an_error_comes_in_the_place_of_its_piece_and_ends_the_rest() -> None:
    begun: list[int] = []

    def run(piece: int) -> int:
        begun.append(piece)
        if piece == 2:
            raise ValueError("the third")
        return piece

    results = ahead(run, range(100))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(results)
    assert len(begun) <= 3 + AHEAD


def test_who_leaves_waits_for_nothing_and_many_who_wait_hold_no_more_threads() -> None:
    held = threading.Event()

    def run(piece: int) -> int:
        if piece:
            assert held.wait(20)
        return piece

    before = threading.active_count()
    waiting = [ahead(abs, range(9)) for _ in range(20)]
    assert [next(results) for results in waiting] == [0] * 20
    assert threading.active_count() <= before + AHEAD
    slow = ahead(run, range(9))
    assert next(slow) == 0
    begin = time.perf_counter()
    del slow, waiting
    assert time.perf_counter() - begin < 10  # what runs is held until after this
    held.set()
