"""Virtual environments of the measured servers, below `.venv/peers`."""

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENTS = Path(".venv/peers")
RUNTIME = f"onnxruntime=={importlib.metadata.version('onnxruntime')}"


class CannotRun(Exception):
    """The server cannot be installed or started on this machine."""


def install(name: str, requirements: Sequence[str], version: str) -> Path:
    """Return the Python of a virtual environment, made again if the installed versions differ.

    Args:
        name: name of the server.
        requirements: packages of the environment, beside onnxruntime.
        version: version of its Python, such as 3.11.2; empty for the version in use.

    Raises:
        CannotRun: there is no such Python, or a package cannot be installed.

    """
    folder = (ENVIRONMENTS / name).absolute()
    packages, stamp = [*requirements, RUNTIME], folder / "installed"
    if stamp.exists() and stamp.read_text().split() == packages:
        return folder / "bin" / "python"
    print(f"{name}: installing {', '.join(packages)}", file=sys.stderr)
    python = interpreter(version)
    try:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True, capture_output=True)
        pip = (folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check")
        subprocess.run([*pip, *packages], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).strip().splitlines()
        raise CannotRun(f"cannot be installed: {said[-1] if said else error}") from error
    stamp.write_text("\n".join(packages))
    return folder / "bin" / "python"


def interpreter(version: str) -> Path:
    """Return a Python of exactly this version; the current one for an empty version.

    Raises:
        CannotRun: there is none.

    """
    if not version:
        return Path(sys.executable)
    minor = version.rpartition(".")[0]
    for found in (shutil.which(f"python{minor}"), f"/usr/bin/python{minor}", f"/usr/local/bin/python{minor}"):
        if found and Path(found).exists():
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
            if said.split()[-1:] == [version]:
                return Path(found)
    raise CannotRun(f"it needs CPython {version}")
