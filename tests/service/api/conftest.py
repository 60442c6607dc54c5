"""Servers and models for the tests of routes and of gRPC."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from preblock.service.core.auth import new_key
from tests.support.artifacts import make_repository
from tests.support.protocols import Clients, connect
from tests.support.servers import Server
from tests.support.shared import Shared
from tests.support.static_models import save_bag, save_mapped, save_plain

KINDS = ("alibi", "bert", "counts-ids", "gemma", "gpt", "levels", "llama", "ngrams", "projected", "rotary", "segments")
CATALOGUE = {name: name for name in (*KINDS, "sinusoid", "t5", "vit")}
CATALOGUE |= {"wide": "gpt-50x768x700", "long": "gpt-300x64x5000", "long-bert": "bert-300x64x5000"}
"""One model of each kind by name; `long` and `long-bert` are V 300, D 64, M 5000, and `wide` is V 50, D 768, M 700."""
MAX_SHARED_BYTES = 2**20


@pytest.fixture(scope="session")
def catalogue_repository(shared: Shared) -> Path:
    return shared.make("catalogue", lambda root: make_repository(root, **CATALOGUE))


@pytest.fixture(scope="session")
def catalogue_server(catalogue_repository: Path, shared: Shared) -> Server:
    """Serve one model of each kind, for all workers."""
    return shared.server("catalogue", catalogue_repository, "--max-shared-memory-bytes", str(MAX_SHARED_BYTES))


@pytest.fixture(scope="session")
def catalogue_clients(catalogue_server: Server) -> Iterator[Clients]:
    with connect(catalogue_server) as connected:
        yield connected


@pytest.fixture(scope="session")
def catalogue_http(catalogue_clients: Clients) -> httpx.Client:
    return catalogue_clients.http


@pytest.fixture(scope="session")
def static_sources(shared: Shared) -> Path:
    """Return a folder of the static models `mapped`, `plain` (not normalized) and `bag`."""

    def fill(root: Path) -> None:
        save_mapped(root / "mapped")
        save_plain(root / "plain", normalize=False)
        save_bag(root / "bag")

    return shared.make("static sources", fill)


@pytest.fixture(scope="session")
def static_repository(static_sources: Path, model_repository: Path, shared: Shared) -> Path:
    """Return artifacts of these models, `wordllama` and `bert`."""

    def fill(root: Path) -> None:
        from preblock.export.exporter import export

        for name in ("mapped", "plain", "bag"):
            export(str(static_sources / name), name, root)
        make_repository(root, bert="bert")
        (root / "wordllama").mkdir()
        (root / "wordllama/1").symlink_to(model_repository / "wordllama/1")

    return shared.make("static", fill)


@dataclass(frozen=True)
class Keyed:
    """A server with one key, for the model `gpt`.

    Args:
        address: of the server.
        headers: with the key.

    """

    address: str
    headers: dict[str, str]


@pytest.fixture(scope="session")
def keyed(tiny_repository: Path, shared: Shared) -> Keyed:
    """Serve the tiny models with a key, for all workers."""
    secret, entry = shared.value("keyed secret", lambda: new_key("alice", ("gpt",), admin=False))
    keys = shared.make("keyed", lambda root: (root / "keys.toml").write_text(entry)) / "keys.toml"
    server = shared.server("keyed", tiny_repository, "--api-keys-file", str(keys))
    return Keyed(server.address, {"Authorization": f"Bearer {secret}"})
