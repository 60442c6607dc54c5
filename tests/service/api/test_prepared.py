"""The cache of prepared requests, behind a real server."""

import gc
import weakref
from pathlib import Path

import httpx
import numpy as np

from preblock.service.app import create_app, create_engine
from preblock.service.core.settings import Settings
from preblock.service.server.run import configure
from tests.service.api.http.native_requests import BYTES, post
from tests.support.servers import live_server


def test_unloaded_model_is_freed(tiny_repository: Path) -> None:
    settings = Settings(repository=tiny_repository)
    engine = create_engine(settings)
    ids = np.array([1, 2]).tobytes()
    with (
        live_server(configure(settings, create_app(settings, engine))) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        assert [post(http, "gpt", BYTES, ids, BYTES).status_code for _ in range(2)] == [200, 200]
        model = weakref.ref(engine.repository.find("gpt"))
        engine.repository.refresh({"bert"})
        assert post(http, "gpt", BYTES, ids, BYTES).status_code == 404
        gc.collect()
        assert model() is None
