"""Interrupts while torch traces a module."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from preblock.export import export_module
from preblock.export.own_modules.tracing import interrupts_deferred

TRACED: list[str] = []
"""The steps of the tracing of `clone`."""


@torch.library.custom_op("preblock_tests::clone", mutates_args=())
def clone(x: Tensor) -> Tensor:
    """Copy `x`. Its tracing gets a SIGINT, and loses its exception like C++ code of torch."""
    return x.clone()


@clone.register_fake
def trace_clone(x: Tensor) -> Tensor:
    TRACED.append("begin")
    try:
        signal.raise_signal(signal.SIGINT)
        TRACED.append("end")
    except KeyboardInterrupt:
        TRACED.append("lost")
    return torch.empty_like(x)


class Interrupted(nn.Module):
    """An embedding whose tracing gets a SIGINT."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 6)

    def forward(self, input_ids: Tensor, _offset: Tensor) -> Tensor:
        vectors: Tensor = clone(self.tokens(input_ids))
        return vectors


def test_interrupt_in_tracing_ends_export(tmp_path: Path) -> None:
    TRACED.clear()
    with pytest.raises(KeyboardInterrupt):
        export_module(Interrupted(), "m", tmp_path, vocab_size=13, max_len=8)
    assert TRACED[:2] == ["begin", "end"]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """Yield a signal, whose handler exits with its number meanwhile."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(number)

    found: signal.Signals = request.param
    before = signal.signal(found, leave)
    yield found
    assert signal.signal(found, before) is leave


def ends_with(number: signal.Signals, function: Callable[[], None]) -> None:
    """Assert that `function` exits with the number of the signal, with deferred interrupts."""
    with pytest.raises(SystemExit) as end, interrupts_deferred():
        function()
    assert end.value.code == number


def test_first_interrupt_waits_for_end(number: signal.Signals) -> None:
    steps = []

    def trace() -> None:
        signal.raise_signal(number)
        steps.append("end")

    ends_with(number, trace)
    assert steps == ["end"]


def test_first_interrupt_replaces_later_error(number: signal.Signals) -> None:
    def trace() -> None:
        signal.raise_signal(number)
        raise RuntimeError

    ends_with(number, trace)


def test_second_interrupt_does_not_wait(number: signal.Signals) -> None:
    steps = []

    def trace() -> None:
        for step in range(3):
            steps.append(step)
            signal.raise_signal(number)

    ends_with(number, trace)
    assert steps == [0, 1]


def test_handlers_in_other_thread_stay() -> None:
    found = []

    def enter() -> None:
        with interrupts_deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
