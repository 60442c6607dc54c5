"""Wiring: settings become an engine."""

import shutil
from pathlib import Path

import pytest

from preblock.service.app import VERSION, create_engine
from preblock.service.artifacts.manifest import MANIFEST
from preblock.service.core.errors import ArtifactError, ProviderError
from preblock.service.core.settings import Settings
from preblock.service.runtime.providers import CPU, cuda_unavailable_reason


def test_engine_opens_every_model_on_provider(tiny_repository: Path) -> None:
    engine = create_engine(Settings(repository=tiny_repository, provider="cpu", max_request_tokens=7))
    assert engine.max_tokens == 7
    assert [(model.name, model.version, model.provider) for model in engine.repository.all()] == [
        ("bert", 1, CPU),
        ("bert", 2, CPU),
        ("gpt", 1, CPU),
    ]
    engine.scheduler.close()


@pytest.mark.skipif(cuda_unavailable_reason() is None, reason="CUDA works here")
def test_unavailable_cuda_prevents_engine_creation(tiny_repository: Path) -> None:
    with pytest.raises(ProviderError, match="provider cuda cannot be used: "):
        create_engine(Settings(repository=tiny_repository, provider="cuda"))


def test_broken_artifact_prevents_engine_creation(tiny_repository: Path, tmp_path: Path) -> None:
    root = shutil.copytree(tiny_repository, tmp_path / "root")
    (root / "bert" / "1" / MANIFEST).write_text("{}")
    with pytest.raises(ArtifactError, match=r"^bert/1/manifest\.json family: got nothing, expected a value$"):
        create_engine(Settings(repository=root, provider="cpu"))


def test_version_equals_pyproject() -> None:
    assert f'version = "{VERSION}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
