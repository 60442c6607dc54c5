"""Engines without a server, and requests to them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from preblock.service.core.settings import LiveSettings, Settings
from preblock.service.core.types import EmbedResult, RowsRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.scheduler import Scheduler
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.repository import Repository


def live_settings(**options: Any) -> LiveSettings:
    """Return the settings of a process, with the given options."""
    return LiveSettings(Settings(**options))


@contextmanager
def open_engine(source: Path | Repository, scheduler: Scheduler | None = None, **options: Any) -> Iterator[Engine]:
    """Make an engine on the CPU for a block, from a folder of artifacts or an open repository.

    Args:
        source: the folder, or the repository.
        scheduler: default: one thread, closed at the end of the block.
        options: settings.

    """
    settings = live_settings(**options)
    repository = source if isinstance(source, Repository) else Repository(source)
    own = scheduler or Scheduler(1, settings)
    try:
        yield Engine(repository, own, Metrics(), settings)
    finally:
        if scheduler is None:
            own.close()


async def ask_engine(engine: Engine, model: TokenModel, request: RowsRequest) -> EmbedResult:
    """Return the vectors of an admitted request."""
    with engine.admission.request("native") as record:
        return await engine.embed(model, request, record)


def answer_of(engine: Engine, model: str, request: RowsRequest) -> EmbedResult:
    """Return the vectors of a request to the newest version of a model."""
    return asyncio.run(ask_engine(engine, engine.repository.get(model), request))
