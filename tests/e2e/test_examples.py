"""The examples, against the server of `make serve`."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import preblock
from tests.support.paths import ROOT
from tests.support.servers import Server, free_port

LOOP = ROOT / "examples/decode_loop.py"
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
NAMES = [program.name for program in PROGRAMS]


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


def test_decode_loop_without_cache_generates_other_tokens(model_server: Server, loop: ModuleType) -> None:
    """The proof of the loop can fail."""

    class ForgetfulBlocks(loop.Blocks):  # type: ignore[misc, name-defined]
        def forward(self, vectors: object) -> object:
            self.forget()
            return super().forward(vectors)

    with preblock.connect(model_server.address) as client:
        given = (client, "gpt2-small", ForgetfulBlocks(768, 50257), [15496, 11, 995])
        tokens = loop.generate(*given, 9)
        assert loop.predict_at_once(*given, tokens) != tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt"], "has no model 'gpt' of token ids. Name one with --model: gpt2-small, minilm, "),
        (["--prompt", "Hello"], "--prompt: gpt2-small has no tokenizer. Give token ids, such as '15496 11 995'."),
        (["--prompt", ""], "--prompt: gpt2-small has no tokenizer."),
        (["--prompt", "99999"], "input_ids[0][0]: got 99999, expected 0 to 50256"),
        (["--tokens", "1023"], "--tokens: the prompt of 3 and 1023 tokens are too long for gpt2-small, which has 1024"),
    ],
)
def test_decode_loop_with_invalid_arguments_fails_with_message(
    model_server: Server, loop: ModuleType, arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        loop.main(["--server", model_server.address, *arguments])
    assert message in str(ended.value.code)


def test_decode_loop_without_server_fails_with_message(loop: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    for arguments, message in (
        (["--server", address], f"No server is ready at {address}. Start one with `make serve`"),
        (["--server", "127.0.0.1:8000"], "url: got 127.0.0.1:8000, expected http://… or https://…"),
    ):
        with pytest.raises(SystemExit) as ended:
            loop.main(arguments)
        assert str(ended.value.code).startswith(message)
    with pytest.raises(SystemExit):
        loop.main(["--tokens", "0"])
    assert capsys.readouterr().err.endswith("argument --tokens: got '0', expected a number from 1 on\n")


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_example_prints_help(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    with pytest.raises(SystemExit) as ended:
        load(program).main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {program.name} ")


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_example_without_packages_names_missing_package(program: Path, tmp_path: Path) -> None:
    """Without site-packages, as with the Python of the system."""
    done = run("-S", program, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("This example needs ")
    assert "pip install" in done.stderr
    # `make serve` installs no extra for pictures.
    assert ("matplotlib" in program.read_text()) == (".venv/bin/python -m pip install matplotlib" in done.stderr)
    assert done.stderr.count("\n") == 1


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
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            load(ROOT / "examples" / name).main()
        line = str(ended.value.code)
        assert line.startswith(message)
        assert "\n" not in line


def test_generation_with_older_transformers_names_version(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("__version__ = '5.23.0'\n")
    program = ROOT / "examples/generate_with_transformers.py"
    done = run("-c", f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(program)!r})")
    assert done.returncode == 1
    assert done.stderr == (
        "transformers: got version 5.23.0, expected 5.24 or newer: pip install 'transformers>=5.24'\n"
    )
