"""How the service logs: one line per event on standard error."""

import logging
from typing import Any


class NoRefusals(logging.Filter):
    """Drops what uvicorn says of every WebSocket that is refused with an HTTP answer: that it was not accepted."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep `record`."""
        return "without completing handshake" not in record.getMessage()


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
