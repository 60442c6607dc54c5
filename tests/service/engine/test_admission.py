"""Limits of requests: how many at once, and how many a second."""

import time
from contextvars import copy_context

import pytest

from preblock.service.core.auth import Authenticator
from preblock.service.core.errors import RateLimited, Unavailable
from preblock.service.engine.admission import Limits
from tests.support.engines import live_settings


def test_rejected_request_does_not_count_for_rate() -> None:
    limits = Limits(live_settings(max_concurrent_requests=1, rate_limit_per_second=10))
    limits.enter()
    for _ in range(50):
        with pytest.raises(Unavailable):
            limits.enter()
    limits.leave()
    for _ in range(9):
        limits.enter()
        limits.leave()


def test_ended_request_makes_room_for_one() -> None:
    limits = Limits(live_settings(max_concurrent_requests=2))
    for _ in range(3):
        limits.enter()
        with limits.extend():
            limits.leave()
    limits.enter()
    limits.enter()
    with pytest.raises(Unavailable, match="the limit of 2 requests at a time"):
        limits.enter()


def times(per_second: float, moments: list[float]) -> list[int | None]:
    """Return `retry_after` for requests at these moments, None for an accepted one."""
    limits, found = Limits(live_settings()), list[int | None]()
    for moment in moments:
        try:
            limits._count("one", per_second, 1000 + moment)
            found.append(None)
        except RateLimited as error:
            found.append(error.retry_after)
    return found


def test_rate_limit_allows_its_number_per_second() -> None:
    cases: list[tuple[float, list[float], list[int | None]]] = [
        (1, [0, 0, 0.9, 1, 1.5, 5, 5], [None, 1, 1, None, 1, None, 1]),
        (10, [*[0.0] * 10, 0.1, 0.1, 0.2], [*[None] * 11, 1, None]),
        (0.5, [0, 0, 1.5, 2], [None, 2, 1, None]),
        (1.5, [0, 0, 0.4, 0.7], [None, 1, None, 1]),
    ]
    for per_second, moments, told in cases:
        assert times(per_second, moments) == told, per_second


def test_raised_rate_limit_shortens_wait() -> None:
    settings = live_settings(rate_limit_per_second=0.001)
    limits = Limits(settings)
    limits.enter()
    with pytest.raises(RateLimited):
        limits.enter()
    settings.use(live_settings(rate_limit_per_second=1000).current)
    with pytest.raises(RateLimited) as refused:
        limits.enter()
    assert refused.value.retry_after == 1
    time.sleep(0.01)
    limits.enter()


def test_rate_limiter_counts_per_caller_and_forgets_old_ones() -> None:
    limits, access = Limits(live_settings(rate_limit_per_second=1)), Authenticator()

    def ask(address: str) -> None:
        access.identify(address)
        limits.enter()
        limits.leave()

    for number in range(1000):
        copy_context().run(ask, f"10.0.0.{number}")  # a context of its own, as each request has one
    with pytest.raises(RateLimited):
        copy_context().run(ask, "10.0.0.999")
    limits._count("late", 1, time.monotonic() + 60)
    assert list(limits._arrivals) == ["late"]
