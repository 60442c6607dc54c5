"""The examples, against the server of `make serve`, and the guide to positions."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.support.paths import ROOT
from tests.support.servers import Server, free_port

LOOP = ROOT / "examples/decode_loop.py"
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


def load(program: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(program.stem, program)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    return load(LOOP)


def run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_decode_loop_generates_from_ids(model_server: Server) -> None:
    done = run(LOOP, "--server", model_server.address, "--prompt", "15496,11 995", "--tokens", "7")
    assert (done.returncode, done.stderr) == (0, "")
    line, proof = done.stdout.splitlines()
    prompt, _, tokens = line.partition(" -> ")
    assert prompt == "15496 11 995"
    assert len(tokens.split()) == 7
    assert len(set(tokens.split())) > 1
    assert proof == "One call with the whole sequence gives the same tokens."


def test_decode_loop_generates_from_text(
    model_server: Server, loop: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.main(["--server", model_server.address, "--model", "minilm", "--prompt", "Hello, world!", "--tokens", "3"])
    assert capsys.readouterr().out.startswith("101 7592 1010 2088 999 102 -> ")


def told_at_exit(program: Path, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the program in this process until it exits, and return its message or its code."""
    monkeypatch.setattr(sys, "argv", [program.name, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        load(program).main()
    return str(ended.value.code)


def test_decode_loop_with_invalid_arguments_fails_with_message(
    model_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, nobody = ["--server", model_server.address], f"http://127.0.0.1:{free_port()}"
    for arguments, message in (
        ([*here, "--model", "gpt"], "has no model 'gpt' of token ids. Name one with --model: gpt2-small, minilm, "),
        ([*here, "--prompt", "Hello"], "--prompt: gpt2-small has no tokenizer. Give token ids, such as '15496 11"),
        ([*here, "--prompt", ""], "--prompt: gpt2-small has no tokenizer."),
        ([*here, "--prompt", "99999"], "input_ids[0][0]: got 99999, expected 0 to 50256"),
        ([*here, "--tokens", "1023"], "--tokens: the prompt of 3 and 1023 tokens are too long for gpt2-small, which"),
        (["--server", nobody], f"No server is ready at {nobody}. Start one with `make serve`"),
        (["--server", "127.0.0.1:8000"], "url: got 127.0.0.1:8000, expected http://… or https://…"),
        (["--tokens", "0"], "2"),
    ):
        assert message in told_at_exit(LOOP, *arguments, monkeypatch=monkeypatch)


def test_example_prints_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for program in PROGRAMS:
        assert told_at_exit(program, "--help", monkeypatch=monkeypatch) == "0"
        assert capsys.readouterr().out.startswith(f"usage: {program.name} ")


def test_example_without_packages_names_missing_package(tmp_path: Path) -> None:
    """Without site-packages, as with the Python of the system."""
    for program in PROGRAMS:
        done = run("-S", program, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), program
        assert re.match("This example needs .*pip install", done.stderr)
        # `make serve` installs no extra for pictures.
        assert ("matplotlib" in program.read_text()) == (".venv/bin/python -m pip install matplotlib" in done.stderr)


def test_example_with_wrong_path_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.chdir(tmp_path)
    server = "http://127.0.0.1:1"
    cases = {
        "choose_positions.py": (["-o", "none/a.svg"], "file: got none/a.svg, expected a file in an existing folder"),
        "compare_positions.py": (["--repository", "file"], "--model: file has no model minilm."),
        "generate_with_transformers.py": (["folder"], "source: folder: "),
        "llama_cpp_rows.py": ([server, "gpt", "1", "--gguf", "none"], "--gguf: none is no file"),
        "module_to_vectors.py": (["--repository", "file"], "file/mine: Not a directory"),
    }
    paths = re.compile(r'"(--gguf|--output|--repository|source)"')
    assert cases.keys() == {program.name for program in PROGRAMS if paths.search(program.read_text())}
    for name, (arguments, message) in cases.items():
        line = told_at_exit(ROOT / "examples" / name, *arguments, monkeypatch=monkeypatch)
        assert line.startswith(message)
        assert "\n" not in line


EXAMPLES = ROOT / "examples"
SHORT = """

class Short(nn.Embedding):
    def __init__(self, width):
        super().__init__(20, width)

    def forward(self, x):
        return x + super().forward(torch.arange(x.shape[1]))
"""
"""A module for too few positions."""
GUIDE = (ROOT / "docs/positions.md").read_text(encoding="utf-8")


def test_experiment_compares_encoding_of_the_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = load(EXAMPLES / "choose_positions.py")
    (code,) = re.findall(r"^```python\n(# mine\.py\n.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    (command,) = re.findall(r"^\.venv/bin/python (examples/choose_positions\.py --encoding .*)$", GUIDE, re.MULTILINE)
    assert command.endswith(" mine.py:Ramp")
    picture = tmp_path / "positions.png"
    experiment.main(["--steps", "1", "-o", str(picture), "--encoding", f"{tmp_path}/mine.py:Ramp"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["tokens", *experiment.KINDS, "Ramp"]
    assert lines[2].split()[3:] == ["refused"] * 4
    assert picture.is_file()
    with (tmp_path / "mine.py").open("a") as file:
        file.write(SHORT)
    for option, value, message in (
        ("--steps", "0", "expected 1 or more"),
        ("-o", "a.gif", "a.gif"),
        ("--encoding", "mine.py", "got mine.py, expected FILE:CLASS"),
        ("--encoding", "mine.py:Ramp", "there is no file mine.py"),
        ("--encoding", f"{tmp_path}/mine.py:Slope", "mine.py has no nn.Module Slope"),
        ("--encoding", f"{tmp_path}/mine.py:Short", "Short(32) fails for vectors (2, 24, 32): IndexError"),
    ):
        with pytest.raises(SystemExit) as ended:
            experiment.main([option, value])
        assert message in f"{ended.value.code} {capsys.readouterr().err}"


def test_module_example_artifact_matches_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load(EXAMPLES / "module_to_vectors.py")
    example.main(["--repository", str(tmp_path)])
    example.main(["--repository", str(tmp_path)])
    assert [path.name for path in sorted((tmp_path / "mine").iterdir())] == ["1", "2"]
    assert capsys.readouterr().out.count("The artifact gives the bits of the module.") == 2


def test_position_comparison_matches_numpy_cosines(
    model_repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(EXAMPLES / "compare_positions.py")
    example.main(["--repository", str(model_repository), "-o", str(tmp_path / "both.svg")])
    _, learned, sinusoids, _ = capsys.readouterr().out.splitlines()
    graph = onnx.load(model_repository / "minilm" / "1" / "model.onnx")
    (table,) = (values for values in map(numpy_helper.to_array, graph.graph.initializer) if values.shape == (512, 384))
    angles = np.arange(128)[:, None] / 10000 ** (np.arange(0, 384, 2) / 384)
    for line, rows in ((learned, table[:128]), (sinusoids, np.hstack([np.sin(angles), np.cos(angles)]))):
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        expected = [np.diag(unit @ unit.T, distance).mean() for distance in example.DISTANCES]
        assert np.allclose(list(map(float, line.split()[1:])), expected, atol=1e-3)
    assert (tmp_path / "both.svg").is_file()
    for option, value, message in (("--model", "gpt9", "--model: "), ("-o", "both.gif", "both.gif")):
        with pytest.raises(SystemExit) as ended:
            example.main(["--repository", str(model_repository), option, value])
        assert message in str(ended.value.code)
