"""The direction between rooms, read from every import; `docs/architecture.md` describes it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

SERVICE = {
    "errors": set[str](),
    "messages": set(),
    "settings": {"errors"},
    "visit": set(),
    "progress": set(),
    "log": {"messages", "visit"},
    "tracing": {"visit", "errors"},
    "loop": set(),
    "cores": set(),
    "copying": set(),
    "heap": set(),
    "bounds": set(),
    "gathered": {"wire"},
    "access": {"watch", "errors"},
    "limits": {"access", "errors"},
    "files": {"errors"},
    "watch": {"files"},
    "following": {"watch", "settings", "errors"},
    "certificates": {"watch", "settings", "errors"},
    "manifest": {"files", "errors"},
    "checksums": {"manifest", "files", "errors"},
    "graphs": {"manifest", "files", "errors"},
    "pinned": set(),
    "bound": {"pinned", "manifest"},
    "runtime": {"bound", "pinned", "batching", "manifest", "messages", "errors"},
    "ahead": set(),
    "operations": {"messages", "errors"},
    "wire": {"operations", "history", "observation", "manifest", "messages", "errors"},
    "positions": {"manifest", "messages"},
    "truncation": {"positions", "manifest", "messages"},
    "pooling": {"messages"},
    "validation": {"truncation", "pooling", "positions", "manifest", "messages", "errors"},
    "tokenizer": {"manifest", "messages", "files", "errors"},
    "batching": {"errors"},
    "control": {"repository", "errors"},
    "tiles": {"manifest", "messages"},
    "positioned": {"manifest", "errors"},
    "lookup": {"_lookup", "graphs", "manifest"},  # the first is its part in C
    "ready": {"lookup", "positioned", "runtime", "manifest"},
    "repository": {
        "access",
        "progress",
        "runtime",
        "ahead",
        "messages",
        "tiles",
        "positioned",
        "lookup",
        "ready",
        "graphs",
        "checksums",
        "tokenizer",
        "manifest",
        "files",
        "errors",
    },
    "observation": {"visit", "errors"},
    "instruments": set(),
    "history": {"instruments"},
    "sums": {"instruments", "observation"},
    "metrics": {"history", "instruments", "observation", "sums", "visit", "errors"},
    "memory": {"access", "progress", "manifest", "metrics", "repository"},
    "rounding": {"messages", "errors"},
    "calls": {"validation", "positions", "batching", "tiles", "repository", "observation", "manifest", "messages"},
    "large": {
        "calls",
        "rounding",
        "pooling",
        "positions",
        "batching",
        "tiles",
        "repository",
        "observation",
        "manifest",
        "messages",
    },
    "engine": {
        "limits",
        "log",
        "visit",
        "large",
        "calls",
        "rounding",
        "validation",
        "truncation",
        "pooling",
        "positions",
        "batching",
        "repository",
        "control",
        "metrics",
        "observation",
        "manifest",
        "messages",
        "errors",
    },
    "plain": {"visit", "engine", "calls", "batching", "observation", "tiles", "repository", "messages"},
    "decode": {"engine", "operations", "validation", "positions", "repository", "messages", "errors"},
    "streams": {"access", "watch", "metrics", "errors"},
    "sequences": {"decode", "engine", "operations", "repository", "messages", "errors"},
    "api": {
        "access",
        "decode",
        "sequences",
        "streams",
        "operations",
        "engine",
        "plain",
        "wire",
        "visit",
        "progress",
        "metrics",
        "repository",
        "manifest",
        "messages",
        "errors",
    },
    "rpc": {
        "visit",
        "certificates",
        "access",
        "sequences",
        "streams",
        "engine",
        "plain",
        "repository",
        "settings",
        "wire",
        "messages",
        "errors",
    },
}
ROOMS = {
    "models": set[str](),
    "export": {
        "models",
        "service.manifest",
        "service.graphs",
        "service.runtime",
        "service.tiles",
        "service.positioned",
        "service.ready",
        "service.errors",
    },
    **{f"service.{room}": {f"service.{other}" for other in others} for room, others in SERVICE.items()},
    "service.app": {"service"},
    "service.workers": {"service"},
    "service.preloaded": {"service"},
    "service.connections": {"service"},
    "service.meanwhile": {"service"},
    "cli": {"service.errors"},
    "__main__": {"service.copying", "cli"},
    "client": set(),
    "bench": {"client", "service.wire"},
}
HOMES = {
    "torch": {"models", "export", "client"},
    "safetensors": {"models"},
    "onnx": {"export"},
    "huggingface_hub": {"export"},
    "onnxruntime": {"service.runtime"},
    "tokenizers": {"service.tokenizer"},
    "fastapi": {"service.api", "service.app", "service.connections", "service.preloaded"},
    "fastapi_offline": {"service.app"},
    "starlette": {"service.api"},
    "uvicorn": {"service.workers", "service.meanwhile", "service.connections", "service.bounds", "service.gathered"},
    "uvloop": {"service.preloaded", "bench"},
    "httptools": {"service.bounds", "bench"},
    "grpc": {"service.rpc", "bench"},
    "grpc_health": {"service.rpc"},
    "grpc_reflection": {"service.rpc"},
    "google": {"service.wire", "service.graphs", "export"},
    "opentelemetry": {"service.tracing"},
    "orjson": {"service.wire", "service.api", "bench"},
    "prometheus_client": {"service.metrics", "service.instruments", "service.history", "service.memory"},
    "pydantic_settings": {"service.settings"},
    "click": {"cli"},
    "httpx": {"client", "bench"},
    "websockets": {"client", "service.connections", "service.bounds", "bench"},
}
WHEN_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "bench": {"grpc": (), "preblock.service": ()},
    "client": {"torch": (), "ml_dtypes": (), "websockets": ("client.streams",), "preblock.client.streams": ()},
}
"""Of a room, what is imported when it is needed, and the modules that are such imports themselves."""
FILES = sorted(
    file
    for folder in ("models", "export", "service", "preblock")
    for file in (ROOT / folder).rglob("*.py")
    if file.name != "__init__.py"
)


def room_of(module: str) -> str:
    """The room of `models.tokens`, `service.api.embed` or `service.errors`."""
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len, default=module)


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removeprefix("preblock.")


def imports_of(file: Path) -> Iterator[tuple[str, bool]]:
    """Every module that `file` imports, and whether it does so when it is imported itself."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            # `from package import module` names the module; `from module import name` is found by its prefix.
            yield from ((f"{node.module}.{alias.name}", node in top) for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_a_room_imports_only_what_it_may(file: Path) -> None:
    room = room_of(module_of(file))
    assert room in ROOMS, f"{file} is in no room"
    allowed = {room, *ROOMS[room]}
    for name, at_once in imports_of(file):
        if not name.startswith("preblock."):
            package = name.partition(".")[0]
            assert room in HOMES.get(package, {room}), f"{file}: {package} belongs to {HOMES[package]}"
            continue
        target = name.removeprefix("preblock.")
        if target == "__version__" or (room == "cli" and not at_once):
            continue
        assert any(f"{target}.".startswith(f"{other}.") for other in allowed), f"{file} imports {name}"


@pytest.mark.parametrize("file", [file for file in FILES if room_of(module_of(file)) in WHEN_NEEDED], ids=module_of)
def test_a_room_imports_some_packages_only_when_they_are_needed(file: Path) -> None:
    late = WHEN_NEEDED[room_of(module_of(file))]
    for name, at_once in imports_of(file):
        package = next((package for package in late if f"{name}.".startswith(f"{package}.")), None)
        assert package is None or not at_once or module_of(file) in late[package], f"{file} imports {name} at once"


def test_the_rule_sees_a_wrong_import(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("from preblock.models import frontend\ndef f() -> None:\n    import torch\n")
    assert list(imports_of(file)) == [("preblock.models.frontend", True), ("torch", False)]
    assert "models" not in ROOMS["service.engine"]
    assert room_of("service.api.embed") == "service.api"


def test_the_document_names_every_room() -> None:
    document = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert [room for room in ROOMS if f"| `{room}` |" not in document] == []


def test_the_documents_name_every_setting_and_kind_of_error() -> None:
    from preblock.service.core import errors
    from preblock.service.core.settings import Settings

    document = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    settings = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    kinds = [kind.__name__ for parent in (errors.ClientFault, errors.ServerFault) for kind in parent.__subclasses__()]
    assert [name for name in Settings.model_fields if f"`PREBLOCK_{name.upper()}`" not in settings] == []
    assert [kind for kind in kinds if f"| `{kind}` |" not in document] == []


def test_the_document_names_every_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    document = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8").lower()
    extras = project["optional-dependencies"]
    names = [
        requirement.split(">")[0].split("[")[0]
        for requirements in (project["dependencies"], *extras.values())
        for requirement in requirements
    ]
    assert [name for name in names if name not in document] == []
