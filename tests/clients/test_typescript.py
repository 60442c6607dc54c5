"""The OpenAPI document through openapi-typescript with its defaults, the TypeScript compiler, and openapi-fetch."""

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.paths import ROOT
from tests.support.servers import Server

PROJECT = ROOT / "tests/clients/typescript"
MODULES = PROJECT / "node_modules"
FILES = ("package.json", "tsconfig.json", "usage.ts")
pytestmark = pytest.mark.skipif(
    not (MODULES / "openapi-typescript").is_dir() or shutil.which("node") is None,
    reason="no openapi-typescript: npm ci --ignore-scripts in tests/clients/typescript",
)


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_typescript_types_of_openapi_compile_and_work(example_server: Server, tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(PROJECT / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(MODULES)
    (tmp_path / "openapi.json").write_text(httpx.get(f"{example_server.address}/openapi.json").text)
    run(tmp_path, "node_modules/.bin/openapi-typescript", "openapi.json", "--output", "api.ts")
    run(tmp_path, "node_modules/.bin/tsc", "--project", ".")
    assert json.loads(run(tmp_path, "node", "usage.js", example_server.address)) == {
        "ready": ["gpt2-small", "minilm", "potion", "t5-small"],
        "use": "input of block 0",
        "offsets": [3, 1],
        "field": "text",
        "shape": [1, 3, 2, 3],
        "tokens": 3,
        "code": "model_not_found",
        "output": "embeddings",
        "state": "READY",
    }
