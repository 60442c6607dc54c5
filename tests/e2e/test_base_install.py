"""The base install in an environment of its own: the client alone, against a real server."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from preblock.extras import EXTRAS
from tests.support.environments import ENVIRONMENT, find_requirements, install
from tests.support.servers import Server

SERVICE = ("click", "fastapi", "grpc", "onnxruntime", "orjson", "pydantic", "tokenizers", "torch", "uvicorn")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with `preblock`, its requirements, and nothing else."""
    return install(tmp_path_factory.mktemp("base"))


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, cwd=python.parent, env=ENVIRONMENT, check=False
    )


def test_base_install_holds_client_only(python: Path) -> None:
    script = f"from importlib.util import find_spec as f; print([n for n in {SERVICE} if f(n)])"
    assert run(python, "-c", script).stdout.strip() == "[]"
    (packages,) = python.parents[1].glob("lib/*/site-packages")
    (preblock,) = importlib.metadata.distributions(name="preblock", path=[str(packages)])
    names = {distribution.name.lower() for distribution in find_requirements(preblock, set())}
    # Those after numpy are requirements of httpx.
    known = {"httpx", "websockets", "numpy", "anyio", "certifi", "h11", "httpcore", "idna", "typing_extensions"}
    assert {"httpx", "websockets", "numpy"} <= names <= known


def test_client_of_base_install_calls_server(python: Path, tiny_server: Server) -> None:
    script = f"""
import asyncio, json, preblock
from preblock.client.errors import RequestError

async def again():
    async with preblock.connect_async({tiny_server.address!r}) as client:
        async with client.decode("gpt") as stream:
            return (await stream.step([1, 2])).tolist()

with preblock.connect({tiny_server.address!r}) as client:
    vectors = client.embed([1, 2], model="gpt").vectors.tolist()
    assert client.text("a b", model="bert").vectors.shape == (1, 4, 4)
    assert client.model("gpt").width == 4 and client.ready()
    with client.decode("gpt") as stream:
        assert stream.step([1, 2]).tolist() == vectors
    assert asyncio.run(again()) == vectors
    try:
        client.embed([9], model="gpt")
    except RequestError as error:
        print(error.field)
    try:
        client.embed([1], model="gpt", dtype="bfloat16")
    except ModuleNotFoundError as error:
        print(error)
"""
    done = run(python, "-W", "error", "-c", script)
    missing = "bfloat16 in NumPy needs the package ml_dtypes: pip install ml_dtypes"
    assert (done.stderr, done.stdout) == ("", f"input_ids[0]\n{missing}\n")


@pytest.mark.parametrize("command", EXTRAS)
def test_command_without_extra_names_it(python: Path, command: str) -> None:
    done = run(python, "-m", "preblock", "--debug", command, "--help")
    gpu = " (gpu instead of cpu for an NVIDIA GPU)" if "cpu" in EXTRAS[command] else ""
    expected = (
        f"preblock: only the Python client is installed. `preblock {command}` needs more: "
        f"pip install 'preblock[{','.join(EXTRAS[command])}]'{gpu}\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_program_without_command_lists_extras(python: Path, arguments: tuple[str, ...]) -> None:
    done = run(python, "-m", "preblock", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    for extra in ("preblock[cpu]", "preblock[cpu,export]", "preblock[cpu,plot]"):
        assert f"pip install '{extra}'" in done.stderr
