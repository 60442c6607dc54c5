"""The cache of prepared requests, behind a real server."""

import gc
import weakref
from pathlib import Path

import httpx
import numpy as np

from preblock.service.app import create_app, create_engine
from preblock.service.core.auth import new_key
from preblock.service.core.settings import Settings
from preblock.service.server.run import configure
from tests.support.prepared import CountedRequests
from tests.support.servers import live_server

BINARY = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
BODY = np.array([[1, 2]]).tobytes()


def embed(port: int, key: str | None = None) -> int:
    """Ask over a connection of its own."""
    headers = BINARY if key is None else BINARY | {"Authorization": f"Bearer {key}"}
    address = f"http://127.0.0.1:{port}/models/gpt/embed?shape=1,2"
    return httpx.post(address, content=BODY, headers=headers).status_code


def test_callers_with_different_keys_share_a_prepared_one(tiny_repository: Path, tmp_path: Path) -> None:
    """The key of a prepared request holds no credential, and each caller is authorized anew."""
    allowed, other = (new_key(name, ("gpt",), admin=False) for name in ("a", "b"))
    narrow = new_key("c", ("bert",), admin=False)
    (tmp_path / "keys.toml").write_text(allowed[1] + other[1] + narrow[1])
    settings = Settings(repository=tiny_repository, api_keys_file=tmp_path / "keys.toml")
    engine = create_engine(settings)
    app = create_app(settings, engine)
    prepared = CountedRequests(engine, app)
    with live_server(configure(settings, app)) as port:
        assert embed(port, allowed[0]) == 200
        assert prepared.hits == 0
        assert embed(port, other[0]) == 200
        assert prepared.hits == 1
        assert embed(port, "wrong") == 401
        assert embed(port, narrow[0]) == 403
        assert prepared.hits == 1


def test_unloaded_model_is_freed(tiny_repository: Path) -> None:
    settings = Settings(repository=tiny_repository)
    engine = create_engine(settings)
    app = create_app(settings, engine)
    with live_server(configure(settings, app)) as port:
        assert [embed(port), embed(port)] == [200, 200]
        model = weakref.ref(engine.repository.find("gpt"))
        engine.repository.refresh({"bert"})
        assert embed(port) == 404
        gc.collect()
        assert model() is None
