"""The wheel, built with and without a C compiler. Oracle: the graph, by onnxruntime."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SERVES = """
import sys
from pathlib import Path
import numpy as np
from preblock.service.app import create_engine
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.core.settings import Settings
model = create_engine(Settings(repository=Path(sys.argv[1]), provider="cpu")).repository.get("gpt")
feeds = {"input_ids": np.arange(80).reshape(2, 40), "offset": np.array([7])}
expected = model.sessions["model.onnx"].run(feeds)["embeddings"].tobytes()
assert all(model.run(feeds, ("embeddings",))["embeddings"].tobytes() == expected for _ in range(20))
print(BUILT, model.tables is not None)
"""


@pytest.mark.parametrize("compiler", ["cc", "/nonexistent"])
def test_wheel_serves_with_and_without_a_compiler(tmp_path: Path, weighty_repository: Path, compiler: str) -> None:
    if shutil.which(compiler) is None and compiler == "cc":
        pytest.skip("there is no compiler")
    tree = tmp_path / "tree"
    for name in ("preblock", "models", "export", "service"):
        ignored = shutil.ignore_patterns("__pycache__", "_kernels.*so")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "hatch_build.py"):
        shutil.copy(ROOT / name, tree)
    build: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    told = subprocess.run(
        build, cwd=tree, env=os.environ | {"CC": compiler}, capture_output=True, text=True, check=True
    ).stderr
    (wheel,) = tmp_path.glob("*.whl")
    works = compiler == "cc"
    assert wheel.name.endswith("-py3-none-any.whl") != works
    assert ("was not built: onnxruntime will do its work" in told) != works
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "there")
    # From a folder without a checkout: Python would import from there first.
    run: list[str | Path] = [sys.executable, "-c", SERVES, weighty_repository]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "there")}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(works), str(works)]
    assert ("installed without a C compiler" in done.stderr) != works
