"""The server of the start: it answers on the service's socket while models are opened.

Opening takes the main thread; meanwhile a thread answers. With several workers the parent runs it until the first
worker serves.
"""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Self

from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.startup import StartupApp
from preblock.service.core.auth import Authenticator
from preblock.service.core.settings import Settings
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.collectors import Opening
from preblock.service.runtime.load_progress import Progress
from preblock.service.server.front import Front
from preblock.service.server.uvicorn_adapter import Config, ServerState

GRACE_SECONDS = 1
"""After the service has begun, how long an accepted connection may still take to send its request."""


class Meanwhile:
    """Answers on a listening socket while the block runs, or until `close`.

    The loader writes `progress`, the progress of the models.

    Args:
        settings: of the service.
        configure: returns the server's configuration for an application.
        listener: stays open, with its waiting connections.

    Raises:
        Invalid: the file of keys cannot be used.

    """

    def __init__(
        self,
        settings: Settings,
        configure: Callable[[Settings, Dispatcher], Config],
        listener: socket.socket,
    ) -> None:
        self.progress = Progress()
        live = LiveSettings(settings)
        access, metrics = Authenticator(settings.api_keys_file), Metrics(Opening(self.progress))
        app = StartupApp(access, self.progress, metrics, settings.max_body_bytes)
        self._config = configure(settings, Dispatcher(app, {}, access, live))
        self._config.load()
        self._state = ServerState()
        self._known = {"settings": live}
        self._listener = listener.dup()  # a server closes its socket
        self._closed, self._ended = asyncio.Event(), asyncio.Event()
        self._began: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Self:
        """Begin to answer."""
        self._thread.start()
        self._loop = self._began.result()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread: while Python ends, none may run."""
        self._loop.call_soon_threadsafe(self._closed.set)
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def close(self) -> None:
        """Accept no connection any more. An open one may still send a request, for a moment."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
                runner.run(self._serve())
        except Exception as error:  # such as too few descriptors
            if self._began.done():
                raise
            self._began.set_exception(error)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, sock=self._listener, ssl=self._config.ssl)
        self._began.set_result(loop)
        await self._closed.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), GRACE_SECONDS)
        for waiting in list(self._state.connections):
            waiting.shutdown()
        await self._ended.wait()

    def _connection(self) -> asyncio.Protocol:
        return Front(self._config, self._state, self._known)

    async def _close(self) -> None:
        self._server.close()
        self._closed.set()
