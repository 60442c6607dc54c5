"""Every command and snippet of the documents, run; its addresses are those of a real server of the same models."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.torch import save_file

from preblock.service.core.auth import read_keys
from preblock.service.core.settings import Settings
from tests.families.tiny_models import save_whole
from tests.support.environments import find_requirements
from tests.support.paths import ROOT
from tests.support.servers import Server, free_port
from tests.support.static_models import save_plain
from tools.pictures import IMAGES, record_first_minute

PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
TUTORIAL = ROOT / "docs/tutorial.md"
"""Its blocks need each other, and have a test of their own."""
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(page for page in PAGES if page != "docs/tutorial.md"))
BLOCKS = [
    (f"{name}-{index}", language, code)
    for name in DOCUMENTS
    for index, (language, code) in enumerate(
        re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
]
OUTPUTS = {
    code: output
    for name in DOCUMENTS
    for code, output in re.findall(
        r"^```(?:sh|python)\n((?:(?!```).*\n)*)```\n\n```\n((?:(?!```).*\n)*)```$",
        (ROOT / name).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}
"""Documented output by block."""
ELSEWHERE = {
    "make serve\n": "test_documented_serve_command_starts_server below",
    "preblock serve ./my-bert --port": "test_documented_own_model_is_exported_and_served below",
    "preblock serve ./my-static": "test_documented_own_model_is_exported_and_served below",
    "preblock serve": "test_documented_serve_command_starts_server below",
    "make test": "this is one of its runs",
    ". .venv/bin/activate": "`activated` below runs it, before every other block",
    ".venv/bin/python -m pytest -n0": "a run of these tests",
    "make reliability": "takes hours; its tests run for seconds in tests/reliability",
    "python -m benchmarks": "measures, and takes minutes",
    ".venv/bin/python examples/choose_positions.py": "tests/e2e/test_examples.py",
    "# mine.py": "tests/e2e/test_examples.py",
    "preblock inspect gemma": "tests/cli/test_artifacts.py, on an artifact with an embedding scale",
    "curl http://127.0.0.1:8000/models/mine": "deploy/smoke.sh exports this model",
    "preblock export trained": "test_documented_trained_module_is_exported below",
    'echo \'{"data"': "the package of perf_analyzer holds no program",
    "from langchain_openai": "tests/clients/test_other_clients.py, in an environment of its own",
    "docker compose": "deploy/smoke.sh, which needs a container engine",
    "docker run": "deploy/smoke.sh, which needs a container engine",
    "deploy/roll.sh": "deploy/smoke.sh, which needs a container engine",
    "kubectl": "tests/deploy/test_kubernetes.py checks the manifests; no cluster runs here",
    "cd deploy/ray": "make test-ray, in an environment of its own",
    "python3 -m venv /opt/preblock": "needs root and the network",
    "# On a machine with a network": "downloads packages; tests/deploy/test_distributions.py installs a wheel",
    "pip install pre-commit": "needs a checkout with the network",
}
"""Begin of a block that this file does not run as it stands, and the test or the reason instead."""
COMING = [(name, code) for name, language, code in BLOCKS if name.startswith("docs/coming-from") and language == "sh"]
"""Blocks of a server and requests to it: see test_commands_of_other_servers_work below."""
HERE = [
    (name, language, code)
    for name, language, code in BLOCKS
    if not code.startswith(tuple(ELSEWHERE)) and (name, code) not in COMING
]
SHELL = [(name, code) for name, language, code in HERE if language == "sh"]
PYTHON = [(name, code) for name, language, code in HERE if language == "python"]
TOML = [(name, code) for name, language, code in BLOCKS if language == "toml"]
CUSTOM = [code for name, code in TOML if name.startswith("docs/front-ends.md")]
"""A custom front-end, and a table of rotary outputs to add to it."""


@cache
def activated() -> dict[str, str]:
    """Return the variables of a terminal after the second command of the README, from one without our programs."""
    (command,) = (code for name, _, code in BLOCKS if code.startswith(". .venv/bin/activate"))
    ours = str(Path(sys.executable).parent)
    outside = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    outside["PATH"] = ":".join(part for part in os.environ["PATH"].split(":") if part != ours)
    script = f"{command.strip()} >&2 && env -0"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=outside, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(variable.split("=", 1) for variable in done.stdout.split("\0") if variable)


def run(arguments: list[str], cwd: Path) -> str:
    done = subprocess.run(arguments, cwd=cwd, env=activated(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_output(code: str, output: str) -> None:
    """Compare with the documented output, if any: `…` stands for anything, and floats agree to five digits.

    A comment `# prints …` is a line of the output.
    """

    def normalize(text: str) -> str:
        return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.5f}", "".join(text.split()))

    if code in OUTPUTS:
        pattern = ".*".join(re.escape(normalize(part)) for part in OUTPUTS[code].split("…"))
        assert re.fullmatch(pattern, normalize(output)), output
    for line in re.findall(r"  # prints (.*)$", code, re.MULTILINE):
        assert line in output.splitlines(), output


def test_readme_imports_only_installed_packages() -> None:
    """This environment has more packages than that of a reader."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = re.findall(r"^\t\$\(PIP\) -e '\.(\[cpu,export\])'$", makefile, re.MULTILINE)
    (command,) = (code for name, _, code in BLOCKS if code.startswith(". .venv/bin/activate"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (further,) = re.findall(
        r"`pip install -c constraints\.txt -e '\.(\[torch\])'`", text
    )  # before the examples of modules
    installed = set()
    for text in (f"preblock{made[0]}", f"preblock{further}", *shlex.split(command.partition("constraints.txt ")[2])):
        asked = Requirement(text)
        root = distribution(asked.name)
        installed |= {canonicalize_name(one.name) for one in (root, *find_requirements(root, set(asked.extras)))}
    for name, language, code in BLOCKS:
        if name.startswith("README") and language == "python":
            modules = re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE)
            for module in {*modules} - sys.stdlib_module_names:
                packages = packages_distributions().get(module, ["preblock"])
                assert installed & {canonicalize_name(package) for package in packages}, (name, module)


def test_code_blocks_use_only_tested_languages() -> None:
    assert {language for _, language, _ in BLOCKS} == {"sh", "python", "toml", "yaml", "dockerfile", "ini"}
    for beginning in ELSEWHERE:
        assert any(code.startswith(beginning) for _, _, code in BLOCKS), beginning


def test_every_snippet_is_fenced() -> None:
    for page in (*DOCUMENTS, "docs/tutorial.md"):
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"\n\n    \S.*", text), page


@pytest.fixture
def folder(tmp_path: Path, model_repository: Path) -> Path:
    """Return a folder with a writable `model_repository`."""
    for version in model_repository.glob("*/[1-9]*"):
        model = tmp_path / "model_repository" / version.parent.name
        model.mkdir(parents=True, exist_ok=True)
        (model / version.name).symlink_to(version)
    return tmp_path


@pytest.mark.parametrize("code", [code for _, code in SHELL], ids=[name for name, _ in SHELL])
def test_shell_blocks_run(code: str, model_server: Server, folder: Path) -> None:
    local = code.replace("http://127.0.0.1:8000", model_server.address).replace("curl ", "curl -sS --fail-with-body ")
    if "export FOLDER" in code:
        save_whole("helium", folder / "FOLDER")  # a model type without a row in the family table
    output = run(["bash", "-euo", "pipefail", "-c", local], folder)
    check_output(code, output)
    if "/neighbours" in code:
        assert '"cosine":' in output
    elif "curl" in code:
        assert re.search(r'"embeddings":|"embedding":|^\[\[', output)
    elif "preblock bench" in code:
        assert "requests" in output
    elif "preblock export" in code:
        assert "bit for bit equal" in output
    elif "preblock key" in code or "hashlib" in code:
        assert re.search(r"\b[0-9a-f]{64}\b", output)
    else:
        assert output
        assert all((folder / line).is_file() for line in output.splitlines())


@pytest.mark.parametrize("code", [code for _, code in PYTHON], ids=[name for name, _ in PYTHON])
def test_python_blocks_run(code: str, model_server: Server, folder: Path) -> None:
    local = code.replace("127.0.0.1:8000", model_server.address.removeprefix("http://"))
    local = local.replace("127.0.0.1:8001", model_server.grpc)
    output = run(["python", "-W", "error", "-c", local], folder)
    check_output(code, output)
    if "save_frontend" in code:
        assert (folder / "trained/frontend.toml").is_file()
    else:
        assert output.strip()


def test_documented_trained_module_is_exported(folder: Path) -> None:
    (train,) = (code for name, _, code in BLOCKS if "save_frontend" in code and name.startswith("docs/"))
    (serve,) = (code for _, _, code in BLOCKS if code.startswith("preblock export trained"))
    run(["python", "-W", "error", "-c", train], folder)
    assert "bit for bit" in run(["bash", "-euo", "pipefail", "-c", serve], folder)


def save_custom(folder: Path, description: str) -> None:
    """Write a custom front-end and the tensors of the documents' one into a folder."""
    folder.mkdir()
    (folder / "frontend.toml").write_text(description)
    rows = {"embed": 100, "positions": 512, "sentences": 8, "words": 16}
    tables = {f"{name}.weight": torch.randn(count, 8) for name, count in rows.items()}
    save_file(tables | {"norm.weight": torch.ones(8), "norm.bias": torch.zeros(8)}, folder / "model.safetensors")


def test_documented_custom_front_end_is_exported(tmp_path: Path) -> None:
    save_custom(tmp_path / "checkpoint", "".join(CUSTOM))
    run(["preblock", "export", "checkpoint", "--name", "mine"], tmp_path)
    manifest = json.loads((tmp_path / "model_repository/mine/1/manifest.json").read_bytes())
    steps = ["tokens", "scale", "positions", "levels", "norm"]
    assert [step["kind"] for step in manifest["front_end"]["steps"]] == steps
    assert [rotary["name"] for rotary in manifest["front_end"]["rotary"]] == ["local"]


def test_toml_blocks_are_valid_settings_and_keys(tmp_path: Path) -> None:
    *settings, keys = (code for _, code in TOML if code not in CUSTOM)
    assert all(set(tomllib.loads(text)) <= set(Settings.model_fields) for text in settings)
    (tmp_path / "keys.toml").write_text(keys)
    assert [key.name for key in read_keys(tmp_path / "keys.toml")] == ["alice"]


@pytest.mark.parametrize(
    "command",
    [
        "make serve",
        next(
            line
            for _, _, code in BLOCKS
            for line in code.splitlines()
            if line.startswith("preblock serve --repository")
        ),
    ],
)
def test_documented_serve_command_starts_server(command: str, tmp_path: Path) -> None:
    port = str(free_port())
    if command == "make serve":
        # The second time: the first installs and exports missing and outdated files.
        subprocess.run(["make", "models"], cwd=ROOT, check=True, capture_output=True)
        command += f" ARGS='--port {port}'"
    command = command.replace("9000", port).replace("9001", str(free_port()))
    log = tmp_path / "errors"
    with started(command, ROOT, log) as printed:
        text = "".join(printed)
        assert f"http://127.0.0.1:{port}" in text, log.read_text()
        for limits in ("minilm: bert, ids 0 to 30521", "max_len 1024, width 768", "max_len 4096, width 512"):
            assert limits in text
        # Nothing was installed or exported again.
        assert "pip" not in text
        assert "proving" not in log.read_text()
        answered = run(["bash", "-c", printed[-1].replace("curl ", "curl -sS --fail-with-body ")], tmp_path)
        assert '"embeddings":' in answered


def save_bert(folder: Path) -> None:
    save_whole("bert", folder)


@pytest.mark.parametrize(("name", "save"), [("my-bert", save_bert), ("my-static", save_plain)])
def test_documented_own_model_is_exported_and_served(name: str, save: Callable[[Path], object], tmp_path: Path) -> None:
    command = next(code for _, _, code in BLOCKS if code.startswith(f"preblock serve ./{name} --port"))
    save(tmp_path / name)
    port = str(free_port())
    with started(command.replace("9000", port), tmp_path, tmp_path / "errors") as printed:
        assert f"http://127.0.0.1:{port}" in "".join(printed), (tmp_path / "errors").read_text()
        answered = run(["bash", "-c", printed[-1].replace("curl ", "curl -sS --fail-with-body ")], tmp_path)
        assert f'"model":"{name}"' in answered


@pytest.mark.parametrize("code", [code for _, code in COMING], ids=[name for name, _ in COMING])
def test_commands_of_other_servers_work(code: str, folder: Path) -> None:
    command, _, requests = code.partition("\n")
    port = str(free_port())
    with started(f"{command} --port {port}", folder, folder / "errors"):
        local = requests.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("curl ", "curl -sS --fail-with-body ")
        assert run(["bash", "-euo", "pipefail", "-c", local], folder).strip()


@contextmanager
def started(command: str, cwd: Path, log: Path) -> Iterator[list[str]]:
    """Run the command of a server until the end of the block; yield the lines of its banner."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            f"exec env {command}",
            shell=True,
            cwd=cwd,
            env=activated(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            printed = []
            for line in process.stdout:
                printed.append(line)
                if "curl" in line:
                    break
            yield printed
        finally:
            os.killpg(process.pid, 15)


def test_tutorial_blocks_print_documented_output(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    languages = [language for language, _ in blocks]
    assert languages == ["sh", *["python"] * 2, "sh", "sh", "python", "", "python", "", "python", ""]
    install, module, export, inspect, start, embed, embedded, decode, decoded, mistake, refused = (
        code for _, code in blocks
    )
    assert install.startswith("pip install")  # a test of the distributions installs them
    (tmp_path / "my_module.py").write_text(module)
    assert run(["python", "-c", export], tmp_path).strip().endswith("mine/1")
    shown = run(["bash", "-c", inspect], tmp_path)
    assert "999" in shown
    assert "128" in shown
    address = f"http://127.0.0.1:{free_port()}"
    with started(f"{start.strip()} --port {address.rpartition(':')[2]}", tmp_path, tmp_path / "errors"):

        def python(code: str) -> str:
            return run(["python", "-W", "error", "-c", code.replace("http://127.0.0.1:8000", address)], tmp_path)

        assert python(embed) == embedded
        assert python(decode) == decoded
        assert python(mistake) == refused


MAX_RECORDING_BYTES = 60_000


def read_lines(content: bytes) -> list[tuple[str, str]]:
    """Return the class and text of each line, up to the first dot: processors round fractions differently."""
    texts = ElementTree.fromstring(content).iter("{http://www.w3.org/2000/svg}text")
    return [(text.attrib["class"], "".join(text.itertext()).partition(".")[0]) for text in texts]


def test_stored_recording_shows_the_same_session() -> None:
    file, content = record_first_minute()
    assert len(content) <= MAX_RECORDING_BYTES
    lines = read_lines(content)
    assert lines == read_lines((IMAGES / file).read_bytes())
    assert [text for kind, text in lines if kind == "command"][::3] == ["$ make serve", "$ preblock verify minilm"]
