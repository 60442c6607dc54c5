"""Wiring: settings become an engine."""

import shutil
from collections.abc import Collection
from pathlib import Path

from preblock.service.app import VERSION, create_app, create_engine
from preblock.service.core.settings import LiveSettings, Settings
from preblock.service.core.tasks import RESTART_SECONDS
from preblock.service.engine.engine import Engine
from preblock.service.engine.scheduler import Scheduler
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.model_control import ModelControl
from preblock.service.runtime.repository import Repository, VersionState
from preblock.service.server.run import configure
from tests.support.log_lines import logged_errors
from tests.support.references import make_referenced
from tests.support.servers import live_server
from tests.support.waiting import wait_until


def test_artifact_may_refer_to_files_below_any_root(tmp_path: Path) -> None:
    make_referenced(tmp_path / "repository", tmp_path / "checkpoint")
    settings = Settings(repository=tmp_path / "repository", reference_roots=f"/srv, {tmp_path / 'checkpoint'}")
    assert create_engine(settings).repository.get("ngrams").version == 1


def test_version_equals_pyproject() -> None:
    assert f'version = "{VERSION}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


class BrokenRepository(Repository):
    """A repository that fails at its first refresh after the start."""

    is_broken = False

    def refresh(
        self, loaded: Collection[str] | None = None, versions: Collection[tuple[str, int]] | None = None
    ) -> list[VersionState]:
        if self.is_broken:
            self.is_broken = False
            raise RuntimeError("broken")
        return super().refresh(loaded, versions)


def test_failed_background_work_is_logged_and_repeated(tiny_repository: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_repository / "gpt", tmp_path / "gpt")
    settings = Settings(repository=tmp_path)
    repository, live = BrokenRepository(tmp_path), LiveSettings(settings)
    repository.is_broken = True
    control = ModelControl(repository, "poll", 0.05)
    app = create_app(settings, Engine(repository, Scheduler(1, live), Metrics(), live, control))
    with live_server(configure(settings, app)), logged_errors() as lines:
        shutil.copytree(tiny_repository / "bert", tmp_path / "bert")
        wait_until(lambda: "bert" in repository.newest())
    assert [line.getMessage() for line in lines] == [
        f"background work failed; it starts again in {RESTART_SECONDS:g} s"
    ]
