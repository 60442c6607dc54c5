"""Log records of servers in this process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def logged_errors() -> Iterator[list[logging.LogRecord]]:
    """Collect the errors logged in the block. Begin it after `configure`, which replaces all handlers."""
    collector = _Collector()
    logging.getLogger().addHandler(collector)
    try:
        yield collector.records
    finally:
        logging.getLogger().removeHandler(collector)
