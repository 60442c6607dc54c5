"""How the service logs: one line per event on standard error."""

import logging
from typing import Any

REFUSALS = (
    "without completing handshake",
    "Invalid HTTP request",
    "Unsupported upgrade request",
    "Invalid UTF-8 sequence",
)
"""What uvicorn says of clients that it refuses: a client could fill a disk so."""


class NoRefusals(logging.Filter):
    """Drops what uvicorn says of each request that is refused."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep `record`."""
        return not any(refusal in record.getMessage() for refusal in REFUSALS)


LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "filters": {"refused": {"()": "incipit.service.log.NoRefusals"}},
    "handlers": {
        "stderr": {
            "filters": ["refused"],
            "class": "logging.StreamHandler",
            "formatter": "line",
            "stream": "ext://sys.stderr",
        }
    },
    "root": {"handlers": ["stderr"], "level": "WARNING"},
}
"""For `logging.config.dictConfig`. Requests are counted by the metrics, not logged."""
