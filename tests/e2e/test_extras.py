"""Installs with few extras, in environments of their own: what works, and what names the extra that it needs."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from preblock.extras import EXTRAS
from tests.support.environments import ENVIRONMENT, find_requirements, install
from tests.support.servers import Server

SERVICE = ("click", "fastapi", "grpc", "onnxruntime", "orjson", "pydantic", "tokenizers", "torch", "uvicorn")
EXPORT = ("torch", "onnx", "safetensors")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with `preblock`, its requirements, and nothing else."""
    return install(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with `preblock[cpu,plot]`, its requirements, and nothing else."""
    return install(tmp_path_factory.mktemp("cpu"), "cpu", "plot")


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, cwd=python.parent, env=ENVIRONMENT, check=False
    )


def test_install_holds_the_packages_of_its_extras(base: Path, serving: Path) -> None:
    for python, missing in ((base, SERVICE), (serving, EXPORT)):
        script = f"from importlib.util import find_spec as f; print([n for n in {missing} if f(n)])"
        assert run(python, "-c", script).stdout.strip() == "[]"
    (packages,) = base.parents[1].glob("lib/*/site-packages")
    (preblock,) = importlib.metadata.distributions(name="preblock", path=[str(packages)])
    names = {distribution.name.lower() for distribution in find_requirements(preblock, set())}
    # Those after numpy are requirements of httpx.
    known = {"httpx", "websockets", "numpy", "anyio", "certifi", "h11", "httpcore", "idna", "typing_extensions"}
    assert {"httpx", "websockets", "numpy"} <= names <= known


def test_client_of_base_install_calls_server(base: Path, tiny_server: Server) -> None:
    script = f"""
import asyncio, preblock
from preblock.client.errors import RequestError

async def step():
    async with preblock.connect_async({tiny_server.address!r}) as client:
        async with client.decode("gpt") as stream:
            return (await stream.step([1, 2])).tolist()

with preblock.connect({tiny_server.address!r}) as client:
    assert client.text("a b", model="bert").vectors.shape == (1, 4, 4)
    assert client.model("gpt").width == 4 and client.ready()
    with client.decode("gpt") as stream:
        assert stream.step([1, 2]).tolist() == client.embed([1, 2], model="gpt").vectors.tolist() == asyncio.run(step())
    try:
        client.embed([9], model="gpt")
    except RequestError as error:
        print(error.field)
    try:
        client.embed([1], model="gpt", dtype="bfloat16")
    except ModuleNotFoundError as error:
        print(error)
"""
    done = run(base, "-W", "error", "-c", script)
    missing = "bfloat16 in NumPy needs the package ml_dtypes: pip install ml_dtypes"
    assert (done.stderr, done.stdout) == ("", f"input_ids[0]\n{missing}\n")


def test_command_of_base_install_names_its_extra(base: Path) -> None:
    for command, extras in EXTRAS.items():
        done = run(base, "-m", "preblock", "--debug", command, "--help")
        gpu = " (gpu instead of cpu for an NVIDIA GPU)" if "cpu" in extras else ""
        expected = (
            f"preblock: only the Python client is installed. `preblock {command}` needs more: "
            f"pip install 'preblock[{','.join(extras)}]'{gpu}\n"
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)
    for arguments in ((), ("--help",)):
        done = run(base, "-m", "preblock", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        for extra in ("preblock[cpu]", "preblock[cpu,export]", "preblock[cpu,plot]"):
            assert f"pip install '{extra}'" in done.stderr


def test_command_without_its_packages_names_the_extra(serving: Path, model_repository: Path) -> None:
    traced = ("serve", "--repository", str(model_repository), "--port", "0", "--tracing", "otlp", "--workers")
    tracing = "tracing: got otlp without its packages, expected none, or otlp after pip install 'preblock[tracing]'"
    needs_onnx = "this command needs onnx: pip install 'preblock[export]'"
    for arguments, message in (
        (("export", "gpt2-small", "--name", "x"), needs_onnx),
        (("verify", "x"), needs_onnx),
        (("convert", "x", "--layout", "openvino", "--output", "o"), needs_onnx),
        (("families",), needs_onnx),
        (("serve", "gpt2-small"), needs_onnx),
        (
            ("plot", "gpt2-small", "parameters", "-o", "x.svg"),
            "this command needs torch: pip install 'preblock[torch]'",
        ),
        ((*traced, "1"), tracing),
        ((*traced, "2"), tracing),
    ):
        done = run(serving, "-m", "preblock", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"preblock: {message}\n"), arguments


def test_plot_without_matplotlib_names_the_extra(tmp_path: Path) -> None:
    done = run(install(tmp_path, "cpu"), "-m", "preblock", "plot", "x", "heatmap", "-o", "x.svg")
    assert done.stderr == "preblock: this command needs matplotlib: pip install 'preblock[plot]'\n"
