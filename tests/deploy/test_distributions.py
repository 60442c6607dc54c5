"""The wheel and the source distribution, each installed into an empty environment. Needs a package index."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers import Server, read_banner

CLIENT = """
import sys
import preblock
with preblock.connect(sys.argv[1]) as client:
    print(client.embed([[1, 2]], model="gpt").vectors.tolist())
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both: the wheel from the files of the source distribution."""
    folder = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_installed_distribution_runs_client_and_server(
    pattern: str, distributions: Path, tiny_repository: Path, tiny_server: Server, tmp_path: Path
) -> None:
    (file,) = distributions.glob(pattern)
    venv.create(tmp_path / "environment", with_pip=True)
    programs = tmp_path / "environment/bin"
    python = programs / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    run(*install, file)
    expected = run(python, "-c", CLIENT, tiny_server.address, cwd=tmp_path)  # the base install is the client
    run(*install, f"{file}[cpu]")
    command: list[str | Path] = [programs / "preblock", "serve", "--repository", tiny_repository, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path, env=ENVIRONMENT
    ) as process:
        try:
            assert run(python, "-c", CLIENT, read_banner(process)[1], cwd=tmp_path) == expected
        finally:
            process.terminate()
        assert process.wait(60) == 0
