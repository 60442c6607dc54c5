"""How the service logs: one line per event on standard error, as text or as JSON, and one for some of the requests."""

import json
import logging
import random
from datetime import UTC, datetime
from typing import Any, Literal

from preblock.service.core.settings_reload import LiveSettings
from preblock.service.core.types import TokenRows
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext
from preblock.service.observability.record import RequestRecord

REQUESTS = logging.getLogger("preblock.requests")


class AccessLog:
    """Writes lines about requests: which, for which model, how it ended and how long it took.

    The settings say for which share of the requests, and how many token ids a line holds.
    """

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings

    @property
    def share(self) -> float:
        """Share of the requests that have a line: 0 for none, 1 for each."""
        return self._settings.current.access_log_sample_rate

    @property
    def max_token_ids(self) -> int:
        """Most ids of a request that its line holds; 0 where no request has a line."""
        return self._settings.current.access_log_max_token_ids if self.share else 0

    def note_ids(self, record: RequestRecord, rows: TokenRows) -> None:
        """Keep the first token ids of a request for its line, if lines hold ids."""
        if most := self.max_token_ids:
            record.ids, begin = [], 0
            for length in rows.lengths[:most].tolist():
                if begin < most:
                    record.ids.append(rows.values[begin : min(begin + length, most)].tolist())
                    begin += length

    def write(self, record: RequestRecord) -> None:
        """Write the line of a request that has ended, if it is in the share of those that have one."""
        if random.random() >= self.share:
            return
        fields: dict[str, Any] = {
            "protocol": record.protocol,
            "model": record.model,
            "outcome": record.outcome,
            "seconds": round(record.seconds, 6),
        }
        asked = ""
        if record.ids is not None and self.max_token_ids:
            fields["input_ids"], asked = record.ids, f" {json.dumps(record.ids)}"
        told = "%s %s %s %.3f ms", record.protocol, record.model or "-", record.outcome, 1000 * record.seconds
        REQUESTS.info(*told, extra={"fields": fields, "asked": asked, **_names(record.context)})


def _names(visit: RequestContext | None) -> dict[str, str]:
    """Return what a line says of the request that it is about: its id, and that of its trace where it has one."""
    if visit is None:
        return {"request_id": "", "trace_id": ""}
    return {"request_id": visit.text, "trace_id": "" if visit.trace is None else visit.trace.id}


class RequestIdFilter(logging.Filter):
    """Lets a line say for which request it is."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Name the request that is answered now, if one is and the line names no other."""
        for name, value in _names(CURRENT_REQUEST.get()).items():
            vars(record).setdefault(name, value)
        request: str = vars(record)["request_id"]
        record.of = f" [{request}]" if request else ""
        vars(record).setdefault("asked", "")
        return True


REFUSALS = (
    "without completing handshake",
    "Invalid HTTP request",
    "Unsupported upgrade request",
    "Invalid UTF-8 sequence",
    "ExecuteBatchError raised in core",
)
"""What uvicorn says of clients that it refuses, and gRPC of those who leave while they are answered: a client could
fill a disk so.
"""


UNREADABLE = "opentelemetry.trace"
"""What warns of headers that name no trace: a client could fill a disk so, too."""


class ExpectedFailureFilter(logging.Filter):
    """Drops what libraries say of each request that is refused, or that nobody waits for."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep `record`."""
        return not any(refusal in record.getMessage() for refusal in REFUSALS)


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
        for name in ("request_id", "trace_id"):
            if value := getattr(record, name, ""):
                document[name] = value
        document |= getattr(record, "fields", {})
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)


def configuration(form: Literal["text", "json"], level: str) -> dict[str, Any]:
    """Return what `logging.config.dictConfig` takes, for lines of at least such a level; those of requests come too."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "text": {"format": "%(asctime)s %(levelname)s %(name)s%(of)s: %(message)s%(asked)s"},
            "json": {"()": "preblock.service.observability.logs.JsonFormatter"},
        },
        "filters": {
            "refused": {"()": "preblock.service.observability.logs.ExpectedFailureFilter"},
            "request": {"()": "preblock.service.observability.logs.RequestIdFilter"},
        },
        "handlers": {
            "stderr": {
                "filters": ["refused", "request"],
                "class": "logging.StreamHandler",
                "formatter": form,
                "stream": "ext://sys.stderr",
            }
        },
        "root": {"handlers": ["stderr"], "level": level.upper()},
        "loggers": {REQUESTS.name: {"level": "INFO"}, UNREADABLE: {"level": "ERROR"}},
    }
