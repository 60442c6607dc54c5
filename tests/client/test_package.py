"""The public names, the signatures and the imports of the client."""

import inspect
import re
import subprocess
import sys

import pytest

from preblock.client import Client, errors
from tests.support.paths import ROOT
from tools.generate_sync import FILES, FOLDER, generate

HEAVY = ("torch", "onnxruntime", "fastapi", "starlette", "orjson", "tokenizers", "ml_dtypes", "websockets")
STEPS = ("step", "rewind", "reorder", "append", "drop", "ping")
CALLS = ("embed", "text", "prompt_embeds", "bias", "models", "model", "ready", "load", "unload", "decode")


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("used", "unwanted"),
    [
        ("preblock", "n in ('numpy', 'httpx', 'preblock.client')"),
        ("preblock.connect", f"n.split('.')[0] in {HEAVY} or n[:9] == 'preblock.' and n[:15] != 'preblock.client'"),
    ],
)
def test_import_loads_only_what_is_used(used: str, unwanted: str) -> None:
    done = run(f"import sys, preblock; {used}; print([n for n in sys.modules if {unwanted}])")
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


def test_client_docs_name_every_method_error_and_option() -> None:
    document = (ROOT / "docs/client.md").read_text(encoding="utf-8")
    assert [name for name in (*CALLS, *STEPS) if f"`{name}" not in document] == []
    classes = {
        name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", document.partition("## Errors")[2], re.MULTILINE)
    assert rows == [(name, kind.__base__.__name__) for name, kind in classes.items() if kind.__base__ is not None]
    assert [name for name in inspect.signature(Client).parameters if f"| `{name}` |" not in document] == []
