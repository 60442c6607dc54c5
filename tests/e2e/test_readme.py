"""Every command of the README, run; its addresses are those of a real server of the same models."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families.tiny_models import save_whole
from tests.support.paths import ROOT
from tests.support.servers import Server, free_port

DOCUMENTS = (
    "README.md",
    "docs/client.md",
    "docs/bench.md",
    "docs/http.md",
    "docs/open-inference.md",
    "docs/decode.md",
    "docs/front-ends.md",
    "docs/use-anywhere.md",
)
BLOCKS = [
    (f"{name}-{index}", language, code)
    for name in DOCUMENTS
    for index, (language, code) in enumerate(
        re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
]
# Run elsewhere: this is `make test`, `make serve` and `preblock serve` are below, and `make smoke` runs the containers.
ELSEWHERE = ("make test\n", "make serve\n", "preblock serve", "docker compose up\n")
SHELL = [(name, code) for name, language, code in BLOCKS if language == "sh" and not code.startswith(ELSEWHERE)]
PYTHON = [(name, code) for name, language, code in BLOCKS if language == "python"]


def run(arguments: list[str], cwd: Path) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kind_of_block_is_run() -> None:
    assert {language for _, language, _ in BLOCKS} == {"sh", "python"}
    assert len(SHELL) + len(PYTHON) + len(ELSEWHERE) == len(BLOCKS)


@pytest.fixture
def folder(tmp_path: Path, repository: Path) -> Path:
    """Return a folder with a writable `model_repository`."""
    for version in repository.glob("*/[1-9]*"):
        model = tmp_path / "model_repository" / version.parent.name
        model.mkdir(parents=True, exist_ok=True)
        (model / version.name).symlink_to(version)
    return tmp_path


@pytest.mark.parametrize("code", [code for _, code in SHELL], ids=[name for name, _ in SHELL])
def test_shell(code: str, server: Server, folder: Path) -> None:
    local = code.replace("http://127.0.0.1:8000", server.address).replace("curl ", "curl -sS --fail-with-body ")
    if "export FOLDER" in code:
        save_whole("helium", folder / "FOLDER")  # a model type without a row in the family table
    output = run(["bash", "-euo", "pipefail", "-c", local], folder)
    if "/neighbours" in code:
        assert '"cosine":' in output
    elif "curl" in code:
        assert '"embeddings":' in output
    elif "preblock bench" in code:
        assert "requests" in output
    elif "preblock export" in code:
        assert "bit for bit equal" in output
    else:
        assert (folder / output.strip()).is_file()


@pytest.mark.parametrize("code", [code for _, code in PYTHON], ids=[name for name, _ in PYTHON])
def test_python(code: str, server: Server, folder: Path) -> None:
    local = code.replace("127.0.0.1:8000", server.address.removeprefix("http://"))
    local = local.replace("127.0.0.1:8001", server.grpc)
    assert run([sys.executable, "-W", "error", "-c", local], folder).strip()


@pytest.mark.parametrize(
    "command",
    [
        "make serve",
        next(line for _, _, code in BLOCKS for line in code.splitlines() if line.startswith("preblock serve")),
    ],
)
def test_serve(command: str, tmp_path: Path) -> None:
    port = str(free_port())
    if command == "make serve":
        # The second time: the first installs and exports missing and outdated files.
        subprocess.run(["make", "models"], cwd=ROOT, check=True, capture_output=True)
        command += f" ARGS='--port {port}'"
    command = command.replace("8000", port).replace("8001", str(free_port()))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    log = tmp_path / "errors"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            f"exec {command}",
            shell=True,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            printed = []
            for line in process.stdout:
                printed.append(line)
                if "curl" in line:
                    break
            text = "".join(printed)
            assert f"http://127.0.0.1:{port}" in text, log.read_text()
            for limits in ("minilm: bert, ids 0 to 30521", "max_len 1024, width 768", "max_len 4096, width 512"):
                assert limits in text
            # Nothing was installed or exported again.
            assert "pip" not in text
            assert "proving" not in log.read_text()
            answered = run(["bash", "-c", printed[-1].replace("curl ", "curl -sS --fail-with-body ")], tmp_path)
            assert '"embeddings":' in answered
        finally:
            os.killpg(process.pid, 15)
