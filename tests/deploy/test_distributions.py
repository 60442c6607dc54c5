"""The wheel and the source distribution, each installed into empty environments. Needs a package index.

Oracle of a wheel without a C compiler: the graph, by onnxruntime.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from preblock.extras import EXTRAS
from tests.support.checkpoints import write_gpt2
from tests.support.environments import ENVIRONMENT, install
from tests.support.paths import ROOT
from tests.support.servers import Server, read_banner

CLIENT = """
import sys
import preblock
with preblock.connect(sys.argv[1]) as client:
    print(client.embed([[1, 2]], model=sys.argv[2]).vectors.tolist())
"""
IMPORTS = """
import importlib, pkgutil
import preblock
for module in pkgutil.walk_packages(preblock.__path__, "preblock."):
    importlib.import_module(module.name)
"""
COMMANDS: dict[str, tuple[str, ...]] = {
    "export": ("gpt2", "--name", "made"),
    "verify": ("made",),
    "convert": ("made", "--layout", "transformers.js", "--output", "web"),
    "families": (),
    "list": (),
    "inspect": ("made",),
    "plot": ("made", "parameters", "-o", "shares.svg"),
    "check": (),
    "key": ("alice",),
    "settings": (),
    "serve": ("--port", "0"),
    "bench": ("--model", "gpt", "--shape", "1,1", "--connections", "1", "--seconds", "0.2"),
    "remove": ("made", "--yes"),
}
"""Every command, with arguments."""


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    environment = ENVIRONMENT | variables
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_files(distribution: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of every regular file."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
    else:
        with tarfile.open(distribution) as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)):
                    yield member.name.partition("/")[2], file.read()


def documented_extras() -> dict[str, str]:
    """Return the extras of each command in the table of the documents."""
    document = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| \[`([a-z]+)`\].*\| `([a-z,]+)` \|$", document, re.MULTILINE))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the source distribution, a wheel from its files, and two from the tree: one pure."""
    folder = tmp_path_factory.mktemp("distributions")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*build, folder / "sdist", ROOT)
    run(*build, folder / "tree", "--wheel", ROOT)
    run(*build, folder / "pure", "--wheel", ROOT, HATCH_BUILD_NO_HOOKS="1")
    patterns = {"sdist": "sdist/*.gz", "wheel of sdist": "sdist/*.whl", "wheel": "tree/*.whl", "pure": "pure/*.whl"}
    return {kind: next(folder.glob(pattern)) for kind, pattern in patterns.items()}


@pytest.mark.parametrize("kind", ["sdist", "wheel of sdist", "wheel", "pure"])
def test_distribution_holds_every_file_of_packages(kind: str, distributions: dict[str, Path]) -> None:
    folders = ("models/", "export/", "service/")
    listing = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "preblock", *folders)
    files = [name for name in run(*listing, cwd=ROOT).split() if not (ROOT / name).is_symlink()]
    expected = {f"preblock/{name}" if name.startswith(folders) else name: (ROOT / name).read_bytes() for name in files}
    found = {name: content for name, content in read_files(distributions[kind]) if name.startswith("preblock/")}
    built = [found.pop(name) for name in list(found) if name.endswith(".so")]
    assert len(built) == (kind in ("wheel", "wheel of sdist"))
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_pip_installs_working_client(
    kind: str, distributions: dict[str, Path], tiny_server: Server, tmp_path: Path
) -> None:
    venv.create(tmp_path / "environment", with_pip=True)
    python = tmp_path / "environment/bin/python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints, distributions[kind])
    found = run(python, "-c", CLIENT, tiny_server.address, "gpt", cwd=tmp_path)
    assert np.array(json.loads(found)).shape == (1, 2, 4)


def test_commands_and_modules_need_documented_extras_only(
    distributions: dict[str, Path], tiny_server: Server, tmp_path: Path
) -> None:
    """The files of the other distributions are the same."""
    needed = documented_extras()
    assert needed == {name: ",".join(extras) for name, extras in EXTRAS.items()}
    assert needed.keys() == COMMANDS.keys()
    whole = "cpu,torch,plot,tracing"
    pythons = {
        extras: install(tmp_path / extras, *extras.split(","), wheel=distributions["wheel of sdist"])
        for extras in {*needed.values(), whole}
    }
    # The vectors of a GPT-2 of ones are twos.
    write_gpt2(tmp_path / "gpt2", np.ones((7, 4), np.float32), np.ones((6, 4), np.float32))
    run(pythons[whole], "-c", IMPORTS, cwd=tmp_path)
    for name, arguments in COMMANDS.items():
        python = pythons[needed[name]]
        command: list[str | Path] = [python.with_name("preblock"), name, *arguments]
        if name == "serve":
            assert serve_and_embed(python, *command, cwd=tmp_path) == [[[2] * 4] * 2]
        else:
            run(*command, *([tiny_server.address] if name == "bench" else []), cwd=tmp_path)


def serve_and_embed(python: Path, *command: str | Path, cwd: Path) -> object:
    """Start a server, return the vectors of its model, and end it."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=cwd, env=ENVIRONMENT
    ) as process:
        try:
            found = run(python, "-c", CLIENT, read_banner(process)[1], "made", cwd=cwd)
        finally:
            process.terminate()
        assert process.wait(60) == 0
    return json.loads(found)


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


@pytest.mark.parametrize("compiled", [True, False])
def test_wheel_serves_with_and_without_a_compiler(
    distributions: dict[str, Path], weighty_repository: Path, tmp_path: Path, compiled: bool
) -> None:
    wheel = distributions["wheel of sdist"]
    if not compiled:
        shutil.unpack_archive(distributions["sdist"], tmp_path, filter="data")
        (tree,) = tmp_path.iterdir()
        build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
        environment = os.environ | {"CC": "/nonexistent"}
        told = subprocess.run(build, cwd=tree, env=environment, capture_output=True, text=True, check=True).stderr
        assert "was not built: onnxruntime will do its work" in told
        (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") != compiled
    shutil.unpack_archive(wheel, tmp_path / "there", "zip")
    # From a folder without a checkout: Python would import from there first.
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "there")}
    command = (sys.executable, "-c", SERVES, weighty_repository)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(compiled), str(compiled)]
    assert ("installed without a C compiler" in done.stderr) != compiled
