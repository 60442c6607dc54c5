"""Interrupts while torch traces a module."""

import signal
import threading
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("signals", "failing", "done"), [((0,), None, 3), ((0, 1), None, 1), ((0,), 1, 1)])
def test_first_interrupt_waits_for_the_end_or_the_second(
    signals: tuple[int, ...], failing: int | None, done: int, number: signal.Signals
) -> None:
    """Of three steps, some get the signal, one may fail, and some are done before the exit."""
    steps = []

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(number)

    def trace() -> None:
        for step in range(3):
            if step in signals:
                signal.raise_signal(number)
            if step == failing:
                raise RuntimeError
            steps.append(step)

    before = signal.signal(number, leave)
    with pytest.raises(SystemExit) as end, interrupts_deferred():
        trace()
    assert signal.signal(number, before) is leave
    assert (end.value.code, len(steps)) == (number, done)


def test_handlers_in_other_thread_stay() -> None:
    found = []

    def enter() -> None:
        with interrupts_deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
