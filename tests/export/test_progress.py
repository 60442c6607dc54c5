"""Progress reports of long steps."""

import pytest

from preblock.export import progress
from preblock.export.progress import StepProgress, format_bytes


class Clock:
    """Stands still, except when it is told to go on."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_bytes_and_rate_are_reported_after_one_second(clock: Clock) -> None:
    """Ten times per second."""
    said: list[str] = []
    step = StepProgress(said.append, "writing", 4 * 10**9)
    for number in range(150):
        assert number >= 50 or said == []
        clock.now += 0.02
        step.add(20 * 10**6)
    assert said[0] == "writing: 1 GB of 4 GB, 1 GB/s"
    assert said[-1].endswith("GB of 4 GB, 1 GB/s")
    assert 18 <= len(said) <= 21


def test_cases_are_reported_at_once_and_bytes_after_one_second(clock: Clock) -> None:
    said: list[str] = []
    step = StepProgress(said.append, "proving")
    for done in (1, 2):
        step.cases(done, 2, 3000)
        clock.now += 1.5
    assert said == ["proving: 1 of 2 cases", "proving: 2 of 2 cases, 6 kB, 4 kB/s"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (2**31, "2.15 GB"), (5e12, "5000 GB")],
)
def test_bytes_are_formatted_with_three_digits_and_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text
