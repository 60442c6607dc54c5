"""`preblock export`: arguments are checked first, the progress is shown, and the end says what was made."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from preblock.cli.progress import ProgressLine
from tests.cli.command_line import run
from tests.support.checkpoints import random_gpt2
from tests.support.published_tokenizers import gpt2, write_folder

MODULES = """
import sys
from preblock.cli import main
sys.argv = ["preblock", *sys.argv[1:]]
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
print(code, *sorted({"torch", "onnx", "onnxruntime", "huggingface_hub"} & set(sys.modules)))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny checkpoint in a folder named `my model`."""
    return random_gpt2(tmp_path / "my model")


def test_wrong_export_arguments_and_families_import_no_torch(tmp_path: Path) -> None:
    """Each message has one line; the last line of the output has the exit code and the heavy modules."""
    (tmp_path / "empty").mkdir()
    gpt2 = ["export", "gpt2-small"]
    for arguments, code, message in (
        (["families"], 0, ""),
        (["export", "gpt2"], 2, "SOURCE: 'gpt2' is neither a folder nor a preset; did you mean gpt2-small?"),
        (["export", "owner/name"], 2, "prefix it with hf:, as in hf:owner/name"),
        (["export", "./none"], 2, "SOURCE: no folder ./none exists"),
        ([*gpt2, "--name", "../x"], 2, "--name: got '../x', expected 1 to 128 letters"),
        ([*gpt2, "--name", ""], 2, "--name: got '', expected 1 to 128 letters"),
        ([*gpt2, "--scale", "row"], 2, "--scale is only for --dtype int8; the dtype is float32"),
        ([*gpt2, "--resize", "truncate"], 2, "--resize needs --max-len"),
        ([*gpt2, "--side", "encoder"], 2, "--side is only for published checkpoints; gpt2-small is none"),
        (["export", "empty"], 2, "empty: the folder holds neither config.json nor frontend.toml"),
    ):
        command = [sys.executable, "-c", MODULES, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert message in done.stderr, arguments
        assert (len(done.stderr.splitlines()), done.stdout.splitlines()[-1]) == (code // 2, str(code)), arguments
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty"]


def test_export_without_name_prints_what_it_made(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "a b"
    done = run("export", source, PREBLOCK_REPOSITORY=str(root))
    made, limits, parity, *serve = done.stdout.splitlines()
    assert made == f"exported my-model version 1: {root / 'my-model' / '1'}"
    assert re.fullmatch(r"  gpt2, ids 0 to 6, max_len 6, width 4, [\d.]+ kB", limits)
    assert re.fullmatch(r"  embeddings: \d+ cases bit for bit equal; .*\(CPUExecutionProvider\)", parity)
    assert serve == ["Serve it:", "  preblock serve"]  # the variable still names the repository
    steps = f"reading {source}", "writing the graph", "proving it equal"
    assert done.stderr.splitlines() == [f"my-model: {step}" for step in steps]
    again = run("export", source, "--repository", root)
    assert again.stdout.splitlines()[-1] == f"  preblock serve --repository '{root}'"


def test_export_progress_in_pipe_writes_each_line_once(source: Path, tmp_path: Path) -> None:
    done = run("export", source, "--name", "m", "--repository", tmp_path / "r", "--dtype", "int4")
    lines = done.stderr.splitlines()
    assert len(lines) == len(set(lines))
    assert all(line.isprintable() for line in lines)
    page = run("inspect", "m", "--repository", tmp_path / "r").stdout
    assert re.search(r"^  parameters +52$", page, re.MULTILINE)  # without the padding of int4


def test_export_with_tokenizer_conflict_needs_option(source: Path, tmp_path: Path) -> None:
    files = {"tokenizer.json": gpt2(), "tokenizer_config.json": {"add_prefix_space": True, "image_token": "<new>"}}
    write_folder(source, files)
    random_gpt2(source, len(files["tokenizer.json"]["model"]["vocab"]))
    command = ("export", source, "--name", "m", "--repository", tmp_path / "models")
    failed = run(*command)
    message = failed.stderr.strip()
    assert failed.returncode == 1
    assert "add_prefix_space: tokenizer_config.json has true; GPT2Tokenizer of transformers 5 applies it" in message
    assert "the text 'a' has ids 65 here, and 262 there" in message
    assert message.endswith("or keep the ids of tokenizer.json with `preblock export --tokenizer ignore-conflicts`")
    done = run(*command, "--tokenizer", "ignore-conflicts")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("m: warning: tokenizer: ")]
    assert [re.split(": ", line)[3] for line in warnings] == ["add_prefix_space", "image_token"]
    report = json.loads((tmp_path / "models/m/1/parity.json").read_text())
    assert [conflict["ordinary"] for conflict in report["tokenizer"]] == [True, False]
    page = run("inspect", "m", "--repository", tmp_path / "models").stdout
    assert "Conflicts of the tokenizer\n  add_prefix_space  tokenizer_config.json has true" in page


SCRIPT = """
import time
from preblock.cli.progress import ProgressLine
with ProgressLine("m") as progress:
    progress("proving")
    time.sleep(2.5)
"""


def test_progress_in_pipe_has_a_line_each_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 101.0, 109.0, 111.0, 112.0])
    monkeypatch.setattr("preblock.cli.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with ProgressLine("m") as progress:
        for step in ("reading", "writing", "writing: 8 GB, 1 GB/s", "writing: 9 GB, 1 GB/s", "proving"):
            progress(step)
    assert capsys.readouterr().err == "m: reading\nm: writing\nm: writing: 9 GB, 1 GB/s\nm: proving\n"


def test_progress_on_terminal_shows_seconds_of_silent_step() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", SCRIPT], stderr=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 65536).decode().split("\r\x1b[K")
    os.close(ours)
    assert shown[-1] == ""
    assert re.fullmatch(r"m: proving \([1-9] s\)", shown[-2])  # more than 1 s on a busy machine
