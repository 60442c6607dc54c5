"""Logs: one line per event on standard error, as text or as JSON, and an access log of sampled requests.

A thread writes the lines, so that a slow reader of standard error delays no request.
"""

import json
import logging
import os
import random
import select
import time
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from threading import Condition, Thread
from typing import Any, Literal
from urllib.parse import quote

from preblock.service.core.settings import LiveSettings
from preblock.service.core.types import Int64, TokenRows
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext, RequestRecord

MAX_WAITING_BYTES = 2**20
"""Size of the queue of the thread; a pipe without a reader takes 64 KiB more."""
CLOSE_TIMEOUT_SECONDS = 1.0
"""Time to write the last lines at the end of the process."""
STANDARD_ERROR = 2
MAX_PATH_CHARS = 256
"""Length of a path in a line; clients could fill a disk with longer ones."""
REQUESTS = logging.getLogger("preblock.requests")


class DroppedLines:
    """Number of dropped lines of this process, for the metrics."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, count: int) -> None:
        """Count dropped lines."""
        self._count += count

    def take(self) -> int:
        """Return the number since the last call."""
        count, self._count = self._count, 0
        return count


DROPPED_LINES = DroppedLines()


class LogWriter(logging.Handler):
    """Writes lines to standard error from a thread: a full pipe stops only the thread.

    Args:
        descriptor: file descriptor to write to; default: standard error.

    """

    def __init__(self, descriptor: int = STANDARD_ERROR) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._waiting = self._dropped = 0
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line for the thread, or drop it if too many lines wait."""
        line = self._encode(record)
        with self._changed:
            if self._waiting + len(line) > MAX_WAITING_BYTES:
                self._drop(1)
                return
            self._lines.append(line)
            self._waiting += len(line)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _encode(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # a library's arguments do not fit its message
            text = f"{record.levelname} {record.name}: {record.msg!r} (not formatted: {error})"
        return f"{text}\n".encode(errors="backslashreplace")

    def _drop(self, count: int) -> None:
        self._dropped += count
        DROPPED_LINES.add(count)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                lines = [*self._lines]
                self._lines.clear()
            written = self._write(b"".join(lines))
            dropped = 0
            with self._changed:
                self._waiting -= sum(map(len, lines))
                if written:
                    dropped, self._dropped = self._dropped, 0
                else:
                    self._drop(len(lines))
                self._changed.notify_all()
            if dropped:
                text = "%d log lines were dropped, because standard error accepted no more"
                self.handle(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (dropped,), None))

    def _write(self, content: bytes) -> bool:
        """Write lines, and return whether anybody can read them."""
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the pipe non-blocking
                select.select((), (self._descriptor,), ())
            except OSError:
                return False
        return True

    def flush(self) -> None:
        """Wait until the lines are written, for at most CLOSE_TIMEOUT_SECONDS."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the thread after the queued lines."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()


class AccessLog:
    """Writes a line for each sampled request to a model, and for each step of a stream.

    Args:
        settings: set the sample rate, and the maximum number of token ids in a line.

    """

    def __init__(self, settings: LiveSettings) -> None:
        self.settings = settings

    def write(self, record: RequestRecord) -> None:
        """Write the line of an ended request, if it is sampled, as soon as its status is known."""
        if random.random() >= self.settings.current.access_log_sample_rate:
            return
        context, ids = record.context, _first_ids(record.ids, self._max_token_ids)
        if context is None or context.target is None or context.status is not None:
            self._write(record, context, ids)
        else:
            context.on_status += (partial(self._write, record, context, ids),)

    @property
    def _max_token_ids(self) -> int:
        """Maximum token ids in a line; 0 for none."""
        return self.settings.current.access_log_max_token_ids

    def _write(self, record: RequestRecord, context: RequestContext | None, ids: list[list[int]] | None) -> None:
        method, path, client = ("", "", "") if context is None or context.target is None else context.target
        path = quote(path)[:MAX_PATH_CHARS]  # a decoded path may hold a line break
        fields: dict[str, Any] = {
            "protocol": record.protocol,
            "model": record.model,
            "outcome": record.outcome,
            "method": method,
            "path": path,
            "status": None if context is None else context.status,
            "tokens": record.tokens,
            "client": client,
            "seconds": round(record.seconds, 6),
        }
        names = "protocol", "model", "outcome", "method", "path", "status"
        text = " ".join(str(fields[name] or "-") for name in names)
        text += f" {record.tokens} tokens {client or '-'} {1000 * record.seconds:.3f} ms"
        suffix = ""
        if ids is not None and self._max_token_ids:
            fields["input_ids"], suffix = ids, f" {json.dumps(ids)}"
        REQUESTS.info("%s", text, extra={"fields": fields, "ids": suffix, **_ids_of(context)})


def _first_ids(ids: TokenRows | Int64 | None, most: int) -> list[list[int]] | None:
    """Return the first token ids of a request by row, at most so many; None without ids."""
    if ids is None or not most:
        return None
    rows, begin, found = ids if isinstance(ids, TokenRows) else TokenRows.of_array(ids), 0, []
    for length in rows.lengths[:most].tolist():
        if begin < most:
            found.append(rows.values[begin : min(begin + length, most)].tolist())
            begin += length
    return found


def _ids_of(context: RequestContext | None) -> dict[str, str]:
    """Return the request id and the trace id of a log line; empty where there is none."""
    if context is None:
        return {"request_id": "", "trace_id": ""}
    return {"request_id": context.text, "trace_id": "" if context.trace is None else context.trace.id}


class RequestIdFilter(logging.Filter):
    """Adds the id of the request in progress to a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ids to `record`, unless it has some, and keep it."""
        fields = vars(record)
        for name, value in {**_ids_of(CURRENT_REQUEST.get()), "ids": ""}.items():
            fields.setdefault(name, value)
        fields["of"] = f" [{fields['request_id']}]" if fields["request_id"] else ""
        return True


CLIENT_FAILURES = (
    "without completing handshake",
    "Invalid HTTP request",
    "Unsupported upgrade request",
    "Invalid UTF-8 sequence",
    "ExecuteBatchError raised in core",
)
"""Messages of uvicorn and gRPC about bad requests and disconnects. Clients could fill a disk with them."""
CHATTY_LOGGERS = "uvicorn.error", "asyncio"
"""Loggers with lines at level INFO about each start and connection."""
TRACE_HEADER_LOGGER = "opentelemetry.trace"
"""Logger of warnings about invalid trace headers. Clients could fill a disk with them."""


class ExpectedFailureFilter(logging.Filter):
    """Drops messages of libraries about rejected requests and disconnects."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep `record`."""
        message = ""
        with suppress(Exception):  # wrong arguments: `LogWriter` writes the line with the reason
            message = record.getMessage()
        return not any(failure in message for failure in CLIENT_FAILURES)


CONTROLS = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""Characters that end a line or move the cursor, and how a line shows them."""


class TextFormatter(logging.Formatter):
    """Writes a line as text. A name in a broken artifact cannot forge another line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without the traceback."""
        record.message = record.message.translate(CONTROLS)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Writes a line as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        ids = {name: getattr(record, name, "") for name in ("request_id", "trace_id")}
        document |= {name: value for name, value in ids.items() if value} | getattr(record, "fields", {})
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)


def configuration(form: Literal["text", "json"], level: str) -> dict[str, Any]:
    """Return a configuration for `logging.config.dictConfig`, with minimum level `level`.

    The access log ignores the level.
    """
    handler = {
        "class": "preblock.service.observability.logs.LogWriter",
        "filters": ["failures", "request"],
        "formatter": form,
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "text": {"()": TextFormatter, "fmt": "%(asctime)s %(levelname)s %(name)s%(of)s: %(message)s%(ids)s"},
            "json": {"()": JsonFormatter},
        },
        "filters": {"failures": {"()": ExpectedFailureFilter}, "request": {"()": RequestIdFilter}},
        "handlers": {"stderr": handler},
        "root": {"handlers": ["stderr"], "level": level.upper()},
        "loggers": {
            REQUESTS.name: {"level": "INFO"},
            TRACE_HEADER_LOGGER: {"level": "ERROR"},
            # The service logs its start and its end itself.
            **({} if level == "debug" else {name: {"level": "WARNING"} for name in CHATTY_LOGGERS}),
        },
    }
