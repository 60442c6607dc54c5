"""Wiring: settings become an engine, and the engine an application."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from preblock.service.api.http import errors
from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.routes import bias, decode, embed, health, models, openai, v2
from preblock.service.api.http.schemas.openapi import document
from preblock.service.api.request_cache import TemplateCache
from preblock.service.api.streams import StreamRegistry
from preblock.service.core.auth import Authenticator
from preblock.service.core.errors import Invalid
from preblock.service.core.file_watch import POLL_INTERVAL_SECONDS
from preblock.service.core.limits import Limits
from preblock.service.core.settings import Settings, listed
from preblock.service.core.settings_reload import SettingsReloader
from preblock.service.core.system import usable_cores
from preblock.service.engine.engine import Engine
from preblock.service.engine.scheduler import Scheduler
from preblock.service.engine.sequences import Sequences
from preblock.service.observability.logs import AccessLog
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.collectors import Memory
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.load_progress import Progress
from preblock.service.runtime.model_control import Control
from preblock.service.runtime.providers import choose_provider
from preblock.service.runtime.repository import Repository

if TYPE_CHECKING:
    from preblock.service.observability.tracing import Tracing

LOG = logging.getLogger(__name__)
VERSION = version("preblock")


def create_engine(settings: Settings, shared: Path | None = None, progress: Progress | None = None) -> Engine:
    """Open every model, each run once; several workers agree through the folder `shared`, `progress` is told of it.

    Raises:
        Invalid: the file of keys cannot be read, or is not understood.
        ServerFault: the provider cannot be used, or an artifact is broken.

    """
    if not BUILT:
        LOG.warning("installed without a C compiler: onnxruntime adds positions, which takes longer")
    choice = choose_provider(settings.provider)
    access = Authenticator(settings.api_keys_file, by_address=settings.rate_limit_per_second is not None)
    repository = Repository(
        settings.repository,
        choice.active,
        settings.intra_op_threads,
        settings.cache_dir,
        access,
        choice,
        progress,
        settings.gpu_mem_limit_bytes,
    )
    scheduler = Scheduler(usable_cores(), settings.max_queue_size, settings.queue_timeout_seconds)
    control = Control(repository, settings.model_control, settings.model_poll_interval_seconds, shared)
    limits = Limits(*_most(settings))
    log = AccessLog(settings.access_log_sample_rate, settings.access_log_max_token_ids)
    metrics = Metrics(Memory(repository))
    metrics.provider(choice.requested, choice.active, choice.probed)
    return Engine(repository, scheduler, metrics, settings.max_request_tokens, control, limits, log)


def _most(settings: Settings) -> tuple[int, float | None, int, int]:
    """Return what `Limits` takes."""
    return (
        settings.max_concurrent_requests,
        settings.rate_limit_per_second,
        settings.max_request_rows,
        settings.max_buffered_response_bytes,
    )


def create_tracing(settings: Settings) -> "Tracing | None":
    """Return what traces requests, if they are to be traced.

    Raises:
        Invalid: the packages that it takes are missing, or it cannot be set up as the environment says.

    """
    if settings.tracing == "none":
        return None
    try:
        # Only who traces pays for importing it.
        from preblock.service.observability.tracing import Tracing
    except ImportError as error:
        packages = "none, or otlp after pip install 'preblock[tracing]'"
        raise Invalid("tracing", f"{settings.tracing} without its packages", packages) from error
    return Tracing(VERSION)


def create_app(settings: Settings, engine: Engine | None = None) -> Dispatcher:
    """Build the application of an engine that was made with the same settings; default: one that is made now.

    Raises:
        Invalid, ServerFault: as `create_engine` and `create_tracing`.

    """
    tracing = create_tracing(settings)
    trace = None if tracing is None else tracing.trace
    engine = engine or create_engine(settings)
    streams = StreamRegistry(
        engine.metrics,
        settings.stream_idle_seconds,
        settings.stream_max_lifetime_seconds,
        settings.max_concurrent_streams,
    )
    rows = settings.max_sequence_rows, settings.max_stream_sequence_rows
    sequences = Sequences(engine, settings.stream_idle_seconds, *rows, settings.workers)

    templates = TemplateCache(engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        following = [
            asyncio.create_task(engine.control.run()),
            asyncio.create_task(streams.follow(engine.repository.access)),
            asyncio.create_task(_follow(settings, engine, streams, sequences, dispatcher)),
        ]
        # What the server's connections know of the application.
        state = {"streams": streams}
        if settings.grpc_port is None:
            yield state
        else:
            # Only who serves gRPC pays for importing it.
            from preblock.service.api.grpc.server import running

            async with running(engine, streams, sequences, templates, VERSION, settings, trace):
                yield state
        engine.metrics.flush()
        for task in following:
            task.cancel()
        engine.scheduler.close()
        if tracing is not None:
            tracing.close()

    app: FastAPI = FastAPIOffline(
        title="Preblock",
        version=VERSION,
        summary="Token ids in, the vectors that enter block 0 out.",
        lifespan=lifespan,
        redoc_url=None,
        static_url="/docs/static",
    )
    app.openapi = partial(document, app.openapi)  # type: ignore[method-assign]
    errors.install(app)
    embedding = embed.handler(engine, settings.max_body_bytes)
    inference = v2.handler(engine, sequences.loose, settings.max_body_bytes)
    app.include_router(embed.router(embedding))
    app.include_router(bias.router(engine, settings.max_body_bytes))
    app.include_router(models.router(engine))
    app.include_router(decode.router(engine, streams, settings.max_body_bytes))
    app.include_router(v2.router(engine, inference, VERSION, settings.max_body_bytes))
    app.include_router(openai.router(engine, settings.max_body_bytes))
    app.include_router(health.router(engine))
    dispatcher = Dispatcher(
        app,
        {("/models/", "embed"): embedding, ("/v2/models/", "infer"): inference},
        engine.repository.access,
        listed(settings.cors_origins),
        templates,
        engine.metrics.count_bytes,
        trace,
    )
    return dispatcher


async def _follow(
    settings: Settings, engine: Engine, streams: StreamRegistry, sequences: Sequences, dispatcher: Dispatcher
) -> None:
    """Do as the file of settings says, whenever it changes, until cancelled."""
    following = SettingsReloader(settings, told=settings.workers == 1)  # of several, their parent tells
    while settings.config_file is not None:
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
        if following.changed():
            _adopt(following.settings, engine, streams, sequences, dispatcher)


def _adopt(
    settings: Settings, engine: Engine, streams: StreamRegistry, sequences: Sequences, dispatcher: Dispatcher
) -> None:
    """Let the settings hold that need no restart, for what comes from now on."""
    log = engine.admission.log
    log.share, log.token_ids = settings.access_log_sample_rate, settings.access_log_max_token_ids
    engine.max_tokens = settings.max_request_tokens
    engine.limits.allow(*_most(settings))
    engine.scheduler.allow(settings.max_queue_size, settings.queue_timeout_seconds)
    engine.repository.access.tell_apart(by_address=settings.rate_limit_per_second is not None)
    streams.allow(settings.stream_max_lifetime_seconds, settings.max_concurrent_streams)
    sequences.allow(settings.max_sequence_rows, settings.max_stream_sequence_rows)
    dispatcher.allow_origins(listed(settings.cors_origins))
    if dispatcher.templates is not None:
        dispatcher.templates.clear()  # the limits before allowed these requests
