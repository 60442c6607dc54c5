"""The logging handler without blocking writes, on pipes."""

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from preblock.service.observability.logs import DROPPED_LINES, LogWriter

LINES = 5000
SECONDS = 60


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:  # a test has closed it
            continue


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("a.library", logging.WARNING, __file__, 1, text, arguments, None)


def test_log_line_with_wrong_arguments_is_written_with_reason(pipe: tuple[int, int]) -> None:
    log = LogWriter(pipe[1])
    log.handle(record("%d tokens", "many"))
    log.flush()
    log.close()
    assert os.read(pipe[0], 4096).decode().startswith("WARNING a.library: '%d tokens' (not formatted: ")


def test_unwritable_log_lines_are_counted_as_dropped(pipe: tuple[int, int]) -> None:
    DROPPED_LINES.take()
    os.close(pipe[0])
    log = LogWriter(pipe[1])
    log.handle(record("lost"))
    log.flush()
    log.close()
    assert DROPPED_LINES.take() == 1


def test_non_blocking_log_pipe_gets_every_line(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    log, received = LogWriter(pipe[1]), bytearray()
    for number in range(LINES):  # more bytes than the pipe holds
        log.handle(record("%d %s", number, "x" * 100))

    def read() -> None:
        while received.count(b"\n") < LINES:
            received.extend(os.read(pipe[0], 2**16))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(SECONDS)
    log.close()
    assert [line.split()[0] for line in received.decode().splitlines()] == [str(number) for number in range(LINES)]
