"""The serving path in an environment of its own, installed from a wheel, without torch."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments import ENVIRONMENT, install
from tests.support.paths import ROOT
from tests.support.servers import free_port


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with `preblock[cpu]`, its requirements, and nothing else."""
    return install(tmp_path_factory.mktemp("cpu"), "cpu")


@pytest.fixture(scope="module")
def address(python: Path, model_repository: Path) -> Iterator[str]:
    """Serve from that environment, and return the address."""
    options = ["--repository", str(model_repository), "--port", "0", "--grpc-port", str(free_port())]
    arguments = [str(python.parent / "preblock"), "serve", *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=python.parent, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[3]
        process.terminate()
    assert process.returncode == 0


def run(python: Path, script: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [python, "-c", script]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=python.parent, env=ENVIRONMENT)


def test_environment_lacks_torch(python: Path) -> None:
    script = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'onnx', 'safetensors')])"
    done = run(python, script)
    assert done.stdout.strip() == "[None, None, None]"


def test_wheel_contains_every_package(python: Path) -> None:
    script = "import preblock.service as s; print(s.__file__)"
    done = run(python, script)
    package = Path(done.stdout.strip()).parent.parent
    assert package.is_relative_to(python.parent.parent)
    assert (package / "py.typed").is_file()
    suffixes = {".py", ".html", ".css", ".js", ".svg"}  # with the page of the inspector
    installed = {str(file.relative_to(package)) for file in package.rglob("*") if file.suffix in suffixes}
    assert installed == {
        str(file.relative_to(ROOT / "preblock"))
        for folder in ("", "models", "export", "service")
        for file in (ROOT / "preblock" / folder).rglob("*")
        if file.suffix in suffixes
    }


def test_server_without_torch_returns_embeddings(address: str) -> None:
    request = urllib.request.Request(
        f"{address}/models/minilm/embed",
        json.dumps({"input_ids": [[101, 102]]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["shape"] == [1, 2, 384]


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (("export", "gpt2-small", "--name", "x"), "onnx", "export"),
        (("verify", "x"), "onnx", "export"),
        (("convert", "x", "--layout", "openvino", "--output", "o"), "onnx", "export"),
        (("families",), "onnx", "export"),
        (("serve", "gpt2-small"), "onnx", "export"),
        (("plot", "x", "heatmap", "-o", "x.svg"), "matplotlib", "plot"),
    ],
)
def test_command_without_extra_names_missing_one(
    python: Path, arguments: tuple[str, ...], module: str, extra: str
) -> None:
    done = subprocess.run(
        [python.parent / "preblock", *arguments],
        capture_output=True,
        text=True,
        cwd=python.parent,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"preblock: this command needs {module}: pip install 'preblock[{extra}]'\n"


def test_plot_of_preset_without_torch_names_its_extra(tmp_path: Path) -> None:
    preblock = install(tmp_path, "cpu", "plot").with_name("preblock")
    arguments: list[str | Path] = [preblock, "plot", "gpt2-small", "parameters", "-o", "x.svg"]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.stderr == "preblock: this command needs torch: pip install 'preblock[torch]'\n"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_tracing_without_opentelemetry_names_missing_package(
    python: Path, model_repository: Path, workers: str
) -> None:
    options = ["--repository", str(model_repository), "--port", "0", "--workers", workers, "--tracing", "otlp"]
    done = subprocess.run(
        [python.parent / "preblock", "serve", *options],
        capture_output=True,
        text=True,
        cwd=python.parent,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stdout) == (1, "")
    missing = "tracing: got otlp without its packages, expected none, or otlp after pip install 'preblock[tracing]'"
    assert done.stderr == f"preblock: {missing}\n"


def test_serving_imports_neither_torch_nor_opentelemetry(model_repository: Path) -> None:
    script = (
        "import sys; from preblock.service.app import create_app; from preblock.service.core.settings import Settings; "
        f"create_app(Settings(repository={str(model_repository)!r}, grpc_port=1)); "
        "rooms = [f'preblock.{room}' for room in ('models', 'export', 'service.tracing')]; "
        "print([name for name in ('torch', 'onnx', 'opentelemetry.sdk', *rooms) if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
