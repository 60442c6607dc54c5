"""The public names and the imports of the client."""

import inspect
import subprocess
import sys

import pytest

import preblock
from preblock import client
from preblock.client import AsyncClient, Client
from preblock.client.async_client import ModelApi
from preblock.client.async_stream import AsyncDecodeStream, DecodeStream
from tests.support.paths import ROOT

HEAVY = ("torch", "onnxruntime", "fastapi", "starlette", "orjson", "tokenizers", "ml_dtypes", "websockets")
STEPS = ("step", "rewind", "reorder", "append", "drop", "ping")
CALLS = ("embed", "text", "prompt_embeds", "bias", "models", "model")


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)


def test_the_names() -> None:
    assert client.__all__ == ["AsyncClient", "Client", "Embeddings", "Model", "connect", "connect_async"]
    assert (preblock.connect, preblock.connect_async) == (Client, AsyncClient)
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = preblock.conect  # type: ignore[attr-defined]


def test_preblock_alone_imports_nothing() -> None:
    done = run("import sys, preblock; print([n for n in ('numpy', 'httpx', 'preblock.client') if n in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_the_client_imports_no_more_than_it_needs() -> None:
    script = "import sys, preblock; preblock.connect; print([n for n in sys.modules if n.split('.')[0] in {!r}"
    done = run(script.format(HEAVY) + " or n.startswith('preblock.') and not n.startswith('preblock.client')])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("missing", "script", "what"),
    [
        ("httpx", "preblock.connect", "preblock.client"),
        ("websockets", "preblock.connect('http://h').decode('m')", "a decode stream"),
        (
            "ml_dtypes",
            "from preblock.client import results; results.array_of(bytearray(2), 'bfloat16', [1])",
            "bfloat16",
        ),
    ],
)
def test_what_is_missing_is_named(missing: str, script: str, what: str) -> None:
    done = run(f"import sys; sys.modules[{missing!r}] = None; import preblock; {script}")
    assert done.returncode == 1
    assert f"ModuleNotFoundError: {what} needs {missing}: pip install 'preblock[client]'" in done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "source"),
    [
        *((Client, name, ModelApi) for name in (*CALLS, "decode")),
        *((DecodeStream, name, AsyncDecodeStream) for name in STEPS),
    ],
)
def test_synchronous_method_has_doc_and_signature(kind: type, name: str, source: object) -> None:
    method, coroutine_method = getattr(kind, name), getattr(source, name)
    assert (method.__name__, method.__doc__) == (name, coroutine_method.__doc__)
    assert inspect.signature(method) == inspect.signature(coroutine_method)
    assert not inspect.iscoroutinefunction(method)


def test_the_document_names_every_method_and_error() -> None:
    document = (ROOT / "docs/client.md").read_text(encoding="utf-8")
    names = [
        *CALLS,
        "decode",
        *STEPS,
        "RequestError",
        "ServerError",
        "ServiceError",
        "ConnectionFailed",
        "TimedOut",
        "StreamClosed",
    ]
    assert [name for name in names if f"`{name}" not in document] == []


def test_the_package_is_typed() -> None:
    assert (ROOT / "preblock/py.typed").is_file()
