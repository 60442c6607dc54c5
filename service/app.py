"""Composition: creates the engine from the settings, and the application from the engine."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from preblock.service.api.http import errors
from preblock.service.api.http.dispatcher import STATIC_DOCUMENTS, Dispatcher, Services
from preblock.service.api.http.origins import AllowedHosts
from preblock.service.api.http.routes import (
    bias,
    decode,
    embed,
    health,
    index,
    models,
    openai,
    pages,
    tables,
    tei,
    v2,
)
from preblock.service.api.http.schemas.openapi import document
from preblock.service.api.prepared import PreparedRequests
from preblock.service.api.streams import StreamRegistry
from preblock.service.codecs.openai import split_identifier
from preblock.service.core.auth import Authenticator
from preblock.service.core.errors import Invalid
from preblock.service.core.settings import LiveSettings, Settings, read_aliases, split_list
from preblock.service.core.system import bound_free_memory, usable_cores, use_single_arena
from preblock.service.core.tasks import start_task
from preblock.service.engine.engine import Engine
from preblock.service.engine.scheduler import Scheduler
from preblock.service.engine.sequences import Sequences
from preblock.service.observability.metrics import Metrics
from preblock.service.observability.process_metrics import ProcessCollector
from preblock.service.runtime.collectors import ModelCollector
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.loader import ModelLoader
from preblock.service.runtime.model_control import ModelControl, loading_hint
from preblock.service.runtime.providers import choose_provider
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.table_memory import TableMemory
from preblock.service.runtime.table_warm_up import read_token_ids
from preblock.service.runtime.worker_states import FIRST_STATE, DesiredState, read_desired

if TYPE_CHECKING:
    from preblock.service.observability.tracing import Tracing

LOG = logging.getLogger(__name__)
VERSION = version("preblock")


def create_engine(settings: Settings, shared: Path | None = None) -> Engine:
    """Open the models, and run each once. Several workers agree on changes through the folder `shared`.

    Raises:
        Invalid: the key file or the file of token ids cannot be read or parsed, or the name of a model is wrong.
        ServerFault: the provider cannot be used, or an artifact is broken.

    """
    use_single_arena()
    if not BUILT:
        LOG.warning("installed without a C compiler; positions are added by onnxruntime, which is slower")
    choice = choose_provider(settings.provider)
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    access, live = Authenticator(settings.api_keys_file, key), LiveSettings(settings)
    aliases, names = read_aliases(settings.aliases), split_list(settings.load_models)
    desired = FIRST_STATE if shared is None else read_desired(shared)
    if shared is None and settings.model_control == "explicit" and names != ["*"]:
        desired = DesiredState(loaded=frozenset(aliases.get(name, name) for name in names))
    memory = TableMemory(settings.table_memory_budget_bytes, read_token_ids(settings.table_warm_up_file))
    loader = ModelLoader(
        choice=choice,
        memory=memory,
        threads=settings.intra_op_threads,
        gpu_mem_limit_bytes=settings.gpu_mem_limit_bytes,
        reference_roots=settings.reference_folders,
        open_timeout_seconds=settings.model_open_timeout_seconds,
    )
    repository = Repository(
        settings.repository,
        loader,
        cache=settings.cache_dir,
        access=access,
        aliases=aliases,
        loaded=desired.loaded,
        versions=desired.versions,
        loading_hint=loading_hint(settings.model_control, settings.model_poll_interval_seconds),
    )
    if shared is None:  # a worker also starts after a folder has come or gone
        repository.check_aliases()
        repository.check_models("load_models", desired.loaded or ())
        if settings.tei is not None and repository.states():
            name, _ = split_identifier(settings.tei)
            repository.check_models("tei", [aliases.get(name, name)])
    control = ModelControl(repository, settings.model_control, settings.model_poll_interval_seconds, shared, desired)
    metrics = Metrics(ModelCollector(repository), ProcessCollector())
    metrics.take_table_use = memory.take_use
    metrics.provider(choice.requested, choice.active, choice.probed)
    return Engine(repository, Scheduler(usable_cores(), live), metrics, live, control)


def create_tracing(settings: Settings) -> "Tracing | None":
    """Return the tracing of requests, or None if the settings disable it.

    Raises:
        Invalid: its packages are missing, or its environment variables are invalid.

    """
    if settings.tracing == "none":
        return None
    try:
        # Only a service with tracing pays for this import.
        from preblock.service.observability.tracing import Tracing
    except ImportError as error:
        packages = "none, or otlp after pip install 'preblock[tracing]'"
        raise Invalid("tracing", f"{settings.tracing} without its packages", packages) from error
    return Tracing(VERSION)


def create_app(settings: Settings, engine: Engine | None = None, hosts: AllowedHosts | None = None) -> Dispatcher:
    """Create the application of `engine`, which has the same settings; default: a new engine.

    `hosts` are the hosts that requests may address; default: those of the setting, for a listener of another server.

    Raises:
        Invalid, ServerFault: as `create_engine` and `create_tracing`.

    """
    tracing = create_tracing(settings)
    engine = engine or create_engine(settings)
    streams, sequences = StreamRegistry(engine.metrics, engine.settings), Sequences(engine)
    app = _create_api(lambda: _run(settings, engine, streams, sequences, tracing))
    describe = partial(document, app.openapi, engine.repository.access.needs_key)
    embedding = embed.handler(engine)
    inference = v2.handler(engine, sequences.shared_store)
    embeddings = openai.handler(engine)
    for router in (
        embed.router(embedding),
        bias.router(engine),
        models.router(engine),
        tables.router(engine),
        decode.router(engine, streams),
        v2.router(engine, inference, VERSION),
        openai.router(engine, embeddings),
        tei.router(engine, VERSION),
        health.router(engine),
        index.router(VERSION, settings, engine.repository.access),
        pages.router("Preblock API", describe, STATIC_DOCUMENTS, settings.has_inspector),
    ):
        app.include_router(router)
    return Dispatcher(
        app,
        {("/models/", "embed"): embedding, ("/v2/models/", "infer"): inference, ("/v1", "embeddings"): embeddings},
        access=engine.repository.access,
        services=Services(engine.settings, engine.limits, streams),
        prepared=PreparedRequests(engine.repository),
        count_bytes=engine.metrics.count_bytes,
        trace=None if tracing is None else tracing.trace,
        hosts=hosts or AllowedHosts(split_list(settings.allowed_hosts) or None),
    )


def _create_api(run: Callable[[], AbstractAsyncContextManager[None]]) -> FastAPI:
    """Create the application of FastAPI without routes; `run` runs its background work."""
    app: FastAPI = FastAPIOffline(
        title="Preblock",
        version=VERSION,
        summary="Token ids in, the vectors that enter block 0 out.",
        lifespan=lambda _: run(),
        docs_url=None,  # `pages` serves it with a Content-Security-Policy
        redoc_url=None,
        generate_unique_id_function=attrgetter("name"),
        static_url=STATIC_DOCUMENTS,
    )
    # `pages` serves the document from bytes; the route of FastAPI writes it for each request.
    app.router.routes = [route for route in app.routes if getattr(route, "path", "") != app.openapi_url]
    errors.install(app)
    return app


@asynccontextmanager
async def _run(
    settings: Settings,
    engine: Engine,
    streams: StreamRegistry,
    sequences: Sequences,
    tracing: "Tracing | None",
) -> AsyncIterator[None]:
    """Run the background work and gRPC for the time of the block."""
    background = (
        engine.control.run,
        engine.control.watch_references,
        partial(streams.watch_keys, engine.repository.access),
        engine.settings.watch,
        bound_free_memory,
    )
    await engine.control.join()
    tasks = [start_task(work) for work in background]
    if not settings.has_grpc:
        yield
    else:
        # Only a service with gRPC pays for this import.
        from preblock.service.api.grpc.server import running

        trace = None if tracing is None else tracing.trace
        async with running(engine, streams, sequences, VERSION, settings, trace):
            yield
    engine.metrics.flush()
    for task in tasks:
        task.cancel()
    engine.scheduler.close()
    if tracing is not None:
        tracing.close()
