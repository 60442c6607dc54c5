"""`preblock export`: arguments are checked first, and the end says what was made."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.command_line import failing, run
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
    folder = tmp_path / "my model"
    folder.mkdir()
    config = {"model_type": "gpt2", "vocab_size": 7, "n_embd": 4, "n_positions": 6}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": torch.randn(7, 4), "wpe.weight": torch.randn(6, 4)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2"], "SOURCE: 'gpt2' is neither a folder nor a preset; did you mean gpt2-small?"),
        (["owner/name"], "prefix it with hf:, as in hf:owner/name"),
        (["./none"], "SOURCE: no folder ./none exists"),
        (["gpt2-small", "--name", "a/b"], "--name: got 'a/b', expected 1 to 128 letters"),
        (["gpt2-small", "--name", ""], "--name: got '', expected 1 to 128 letters"),
        (["gpt2-small", "--scale", "row"], "--scale is only for --dtype int8; the dtype is float32"),
        (["gpt2-small", "--resize", "truncate"], "--resize needs --max-len"),
        (["gpt2-small", "--side", "encoder"], "--side is only for published checkpoints; gpt2-small is none"),
        (["empty"], "empty: the folder holds neither config.json nor frontend.toml"),
    ],
)
def test_export_with_wrong_arguments_fails_before_torch_import(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-c", MODULES, "export", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert message in line
    assert done.stdout == "2\n"
    assert not (tmp_path / "model_repository").exists()


def test_families_command_does_not_import_torch(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MODULES, "families"], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == b"0"


def test_export_without_name_uses_folder_name(source: Path, tmp_path: Path) -> None:
    done = run("export", source, PREBLOCK_REPOSITORY=str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    made, *_, command = done.stdout.splitlines()
    assert made == f"exported my-model version 1: {tmp_path / 'r' / 'my-model' / '1'}"
    assert command == "  preblock serve"  # the variable still names the repository


def test_export_prints_serve_command_with_quoted_repository(source: Path, tmp_path: Path) -> None:
    done = run("export", source, "--repository", tmp_path / "a b")
    assert done.stdout.splitlines()[-1] == f"  preblock serve --repository '{tmp_path / 'a b'}'"


def test_export_progress_in_pipe_writes_each_line_once(source: Path, tmp_path: Path) -> None:
    done = run("export", source, "--name", "m", "--repository", tmp_path / "r", "--dtype", "int4")
    lines = done.stderr.splitlines()
    assert len(lines) == len(set(lines))
    assert all(line.isprintable() for line in lines)
    page = run("inspect", "m", "--repository", tmp_path / "r").stdout
    assert re.search(r"^  parameters +52$", page, re.MULTILINE)  # without the padding of int4


def test_export_of_broken_checkpoint_fails_with_file_name(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").write_bytes(b"")
    done = run("export", source, "--repository", tmp_path / "r")
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr.splitlines()[-1]


def test_export_of_exported_artifact_is_rejected(tiny_repository: Path) -> None:
    message = failing("export", tiny_repository / "gpt" / "1", code=2)
    assert message.endswith("it is an exported artifact already, ready for `preblock serve`")


def test_export_with_tokenizer_conflict_needs_option(source: Path, tmp_path: Path) -> None:
    files = {"tokenizer.json": gpt2(), "tokenizer_config.json": {"add_prefix_space": True, "image_token": "<new>"}}
    write_folder(source, files)
    size = len(files["tokenizer.json"]["model"]["vocab"])
    config = {"model_type": "gpt2", "vocab_size": size, "n_embd": 4, "n_positions": 6}
    (source / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": torch.randn(size, 4), "wpe.weight": torch.randn(6, 4)}, source / "model.safetensors")
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
