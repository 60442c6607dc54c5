"""The public names, the signatures and the imports of the client."""

import inspect
import pydoc
import re
import subprocess
import sys

import pytest

import preblock
from preblock import client
from preblock.client import AsyncClient, Client, errors
from preblock.client.async_stream import AsyncDecodeStream
from preblock.client.sync_stream import DecodeStream
from tests.support.paths import ROOT
from tools.generate_sync import FILES, FOLDER, generate

HEAVY = ("torch", "onnxruntime", "fastapi", "starlette", "orjson", "tokenizers", "ml_dtypes", "websockets")
STEPS = ("step", "rewind", "reorder", "append", "drop", "ping")
CALLS = ("embed", "text", "prompt_embeds", "bias", "models", "model", "ready", "load", "unload")


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)


def test_package_exports_only_public_names() -> None:
    assert client.__all__ == ["AsyncClient", "Client", "Embeddings", "Model", "connect", "connect_async"]
    assert (preblock.connect, preblock.connect_async) == (Client, AsyncClient)
    assert {"connect", "connect_async", "__version__"} <= set(dir(preblock))
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = preblock.conect  # type: ignore[attr-defined]


def test_preblock_import_loads_no_dependencies() -> None:
    done = run("import sys, preblock; print([n for n in ('numpy', 'httpx', 'preblock.client') if n in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_client_import_loads_only_its_dependencies() -> None:
    script = "import sys, preblock; preblock.connect; print([n for n in sys.modules if n.split('.')[0] in {!r}"
    done = run(script.format(HEAVY) + " or n.startswith('preblock.') and not n.startswith('preblock.client')])")
    assert done.stdout.strip() == "[]", done.stderr


def test_bfloat16_without_ml_dtypes_fails_with_install_hint() -> None:
    script = "import sys; sys.modules['ml_dtypes'] = None; from preblock.client.results import array_of"
    done = run(f"{script}; array_of(bytearray(2), 'bfloat16', [1])")
    assert done.returncode == 1
    message = "bfloat16 in NumPy needs the package ml_dtypes: pip install ml_dtypes"
    assert f"ModuleNotFoundError: {message}" in done.stderr


@pytest.mark.parametrize("name", FILES)
def test_sync_client_files_match_generator(name: str) -> None:
    assert (FOLDER / f"sync_{name}.py").read_text(encoding="utf-8") == generate(name)


@pytest.mark.parametrize(
    ("kind", "asynchronous", "names"),
    [(Client, AsyncClient, (*CALLS, "decode")), (DecodeStream, AsyncDecodeStream, STEPS)],
)
def test_sync_methods_match_async_signatures_and_have_docs(
    kind: type, asynchronous: type, names: tuple[str, ...]
) -> None:
    assert {name for name in dir(kind) if not name.startswith("_")} >= {*names, "close"} - {"decode"}
    for name in names:
        method, other = getattr(kind, name), getattr(asynchronous, name)
        assert [*inspect.signature(method).parameters] == [*inspect.signature(other).parameters]
        assert method.__doc__
        assert method.__qualname__ == f"{kind.__name__}.{name}"
        assert inspect.iscoroutinefunction(other) == (name != "decode")
        assert not inspect.iscoroutinefunction(method)
        assert "Async" not in str(method.__doc__)
        assert "await" not in str(method.__doc__)
        # Since Python 3.13, pydoc writes each parameter of a long signature into a line of its own.
        assert re.search(rf"^{name}\(\s*self\b", pydoc.plain(pydoc.render_doc(method)), re.MULTILINE)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_help_shows_names_of_types_and_values_of_options(kind: type[Client | AsyncClient]) -> None:
    page = pydoc.plain(pydoc.render_doc(kind))
    assert "position_ids: 'Rows | Sequence[Rows] | None' = None" in page
    assert 'dtype: "float32", "float16", "bfloat16" (with the package ml_dtypes), or "stored"' in page
    assert "collections.abc" not in page


def test_client_docs_name_every_method_error_and_option() -> None:
    document = (ROOT / "docs/client.md").read_text(encoding="utf-8")
    assert [name for name in (*CALLS, "decode", *STEPS) if f"`{name}" not in document] == []
    classes = {
        name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", document.partition("## Errors")[2], re.MULTILINE)
    assert rows == [(name, kind.__base__.__name__) for name, kind in classes.items() if kind.__base__ is not None]
    for kind in (Client, AsyncClient):
        options = [*inspect.signature(kind).parameters]
        assert [name for name in options if f"| `{name}` |" not in document] == []


def test_package_has_py_typed() -> None:
    assert (ROOT / "preblock/py.typed").is_file()
