"""The serving path in an environment of its own, installed from a wheel, that has no torch."""

import json
import os
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, free_port


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with `incipit[cpu]` and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    constraints = str(ROOT / "constraints.txt")
    install = [str(python), "-m", "pip", "install", "-q", "-c", constraints, f"{ROOT}[cpu]"]
    subprocess.run(install, check=True, capture_output=True)
    return python


@pytest.fixture(scope="module")
def address(python: Path, repository: Path) -> Iterator[str]:
    """The address of a server that runs there."""
    options = ["--repository", str(repository), "--port", "0", "--grpc-port", str(free_port())]
    arguments = [str(python.parent / "incipit"), "serve", *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=python.parent) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[3]
        process.terminate()
    assert process.returncode == 0


def test_there_is_no_torch(python: Path) -> None:
    script = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'onnx', 'safetensors')])"
    done = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True, cwd=python.parent)
    assert done.stdout.strip() == "[None, None, None]"


def test_the_wheel_holds_the_rooms(python: Path) -> None:
    script = "import incipit.service as s; print(s.__file__)"
    done = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True, cwd=python.parent)
    package = Path(done.stdout.strip()).parent.parent
    assert package.is_relative_to(python.parent.parent)
    assert (package / "py.typed").is_file()
    installed = {str(file.relative_to(package)) for file in package.rglob("*.py")}
    assert installed == {
        str(file.relative_to(ROOT / "incipit"))
        for folder in ("", "models", "export", "service")
        for file in (ROOT / "incipit" / folder).rglob("*.py")
    }


def test_it_serves(address: str) -> None:
    request = urllib.request.Request(
        f"{address}/models/minilm/embed",
        json.dumps({"input_ids": [[101, 102]]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["shape"] == [1, 2, 384]


def test_exporting_says_what_is_missing(python: Path) -> None:
    done = subprocess.run(
        [python.parent / "incipit", "export", "gpt2-small", "--name", "x"],
        capture_output=True,
        text=True,
        cwd=python.parent,
        env=os.environ,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "incipit: this command needs torch: pip install 'incipit[export]'\n"


def test_serving_imports_no_torch_where_there_is_one(repository: Path) -> None:
    script = (
        "import sys; from incipit.service.app import create_app; from incipit.service.settings import Settings; "
        f"create_app(Settings(repository={str(repository)!r}, grpc_port=1)); "
        "print([name for name in ('torch', 'onnx', 'incipit.models', 'incipit.export') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
