"""Settings: defaults, environment, ranges."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from incipit.service.settings import Settings
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"INCIPIT_{name.upper()}", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_defaults_are_those_of_the_documentation() -> None:
    table = (ROOT / "docs" / "http.md").read_text().partition("## Settings")[2]
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in table.splitlines() if "`INCIPIT_" in line]
    documented = {name.removeprefix("INCIPIT_").lower(): default for _, name, _, default, *_ in rows}
    assert documented == {name: str(value).lower() for name, value in Settings().model_dump().items()}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("repository", "/models", Path("/models")),
        ("cache", "/var/cache/incipit", Path("/var/cache/incipit")),
        ("host", "0.0.0.0", "0.0.0.0"),
        ("port", "0", 0),
        ("port", "65535", 65535),
        ("grpc_port", "9001", 9001),
        ("provider", "cuda", "cuda"),
        ("workers", "4", 4),
        ("threads", "2", 2),
        ("max_body_bytes", "1", 1),
        ("max_tokens", "1", 1),
        ("max_waiting", "1", 1),
        ("stream_idle_seconds", "1", 1),
        ("stream_seconds", "1", 1),
    ],
)
def test_every_setting_is_an_environment_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(f"INCIPIT_{name.upper()}", text)
    assert getattr(Settings(), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "-1"),
        ("port", "65536"),
        ("port", "x"),
        ("grpc_port", "0"),
        ("grpc_port", "65536"),
        ("provider", "gpu"),
        ("provider", "CUDA"),
        ("workers", "0"),
        ("threads", "0"),
        ("max_body_bytes", "0"),
        ("max_tokens", "0"),
        ("max_tokens", "1.5"),
        ("max_waiting", "0"),
        ("stream_idle_seconds", "0"),
        ("stream_seconds", "0"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(f"INCIPIT_{name.upper()}", text)
    with pytest.raises(ValidationError) as refused:
        Settings()
    assert [(error["loc"], error["input"]) for error in refused.value.errors()] == [((name,), text)]


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INCIPIT_PORT", "1")
    assert Settings(port=2).port == 2


@pytest.mark.parametrize(
    ("folder", "cache"),
    [("/home/me/cache", "/home/me/cache/incipit"), ("", "~/.cache/incipit"), ("relative", "~/.cache/incipit")],
)
def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, folder: str, cache: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    assert Settings().cache == Path(cache)


def test_settings_are_frozen() -> None:
    settings: Any = Settings()
    with pytest.raises(ValidationError):
        settings.port = 1
