"""The command line, as a user runs it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import preblock
from preblock.export import export_module
from preblock.service.runtime.providers import cuda_unavailable_reason
from tests.cli.command_line import failing, run, run_installed
from tests.export.test_module import Sum
from tests.support.artifacts import copy_artifact


@pytest.fixture
def copy(tiny_repository: Path, tmp_path: Path) -> Path:
    """The tiny repository, to break."""
    return shutil.copytree(tiny_repository, tmp_path / "repository")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


def test_export_adds_version_and_prints_parity(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    config = {"model_type": "gpt2", "vocab_size": 7, "n_embd": 4, "n_positions": 6}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": torch.randn(7, 4), "wpe.weight": torch.randn(6, 4)}, tmp_path / "source/model.safetensors")
    done = run_installed("export", tmp_path / "source", "--name", "tiny", "--repository", tmp_path / "made" / "here")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "made" / "here" / "tiny" / "1"
    made, limits, parity, serve_it, command = done.stdout.splitlines()
    assert made == f"exported tiny version 1: {folder}"
    assert re.fullmatch(r"  gpt2, ids 0 to 6, max_len 6, width 4, [\d.]+ kB", limits)
    assert re.fullmatch(r"  embeddings: \d+ cases bit for bit equal; .*\(CPUExecutionProvider\)", parity)
    assert (serve_it, command) == ("Serve it:", f"  preblock serve --repository {tmp_path / 'made' / 'here'}")
    assert done.stderr.splitlines() == [
        f"tiny: reading {tmp_path / 'source'}",
        "tiny: writing the graph",
        "tiny: proving it equal",
    ]
    assert (folder / "manifest.json").is_file()


def test_export_as_int8_reports_error_and_bytes_saved(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    config = {"model_type": "gpt2", "vocab_size": 7, "n_embd": 4, "n_positions": 6}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": torch.eye(7, 4), "wpe.weight": torch.eye(6, 4)}, tmp_path / "source/model.safetensors")
    options = ("--dtype", "int8", "--scale", "tensor")
    done = run("export", tmp_path / "source", "--name", "tiny", "--repository", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    # 1 is a step of a scale: nothing is lost. Each table has a scale of four bytes.
    summary = (
        "stored as int8 with a scale for each tensor: 2 tables, error at most 0, worst cosine 1.00000000, "
        "60 bytes, 148 saved"
    )
    assert done.stdout.splitlines()[3] == f"  {summary}"
    proven = run("verify", "tiny", "--repository", tmp_path).stdout.splitlines()
    of_the_export = summary.partition(": ")[2] + ", as the export found: the tables in float32 are not in it"
    assert proven[1] == f"{tmp_path / 'tiny' / '1'}: {of_the_export}"
    shown = [" ".join(line.split()) for line in run("inspect", "tiny", "--repository", tmp_path).stdout.splitlines()]
    assert f"tables {summary.replace(':', '', 1)}" in shown
    assert "tokens.weight 7 x 4, error at most 0, mean 0, worst cosine 1.00000000, 32 bytes, 80 saved" in shown


def test_verify_without_version_checks_newest(tmp_path: Path) -> None:
    _, folder = copy_artifact("bert", tmp_path), copy_artifact("bert-again", tmp_path, "bert")
    done = run("verify", "bert", "--repository", tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{folder}: hashes agree, embeddings: \d+ cases .*\(CPUExecutionProvider\)\n", done.stdout)
    assert done.stderr.splitlines() == ["bert: checking the hashes", "bert: proving it equal"]


def test_check_runs_every_version(tiny_repository: Path) -> None:
    done = run_installed("check", "--repository", tiny_repository, "--provider", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "bert 1: runs on CPUExecutionProvider, bert, ids 0 to 10, token_type_ids 0 to 1, max_len 8, width 4",
        "bert 2: runs on CPUExecutionProvider, bert, ids 0 to 10, token_type_ids 0 to 1, max_len 8, width 4",
        "gpt 1: runs on CPUExecutionProvider, gpt2, ids 0 to 6, max_len 6, width 4",
    ]


def test_repository_is_read_from_environment_variable(tiny_repository: Path) -> None:
    done = run("check", PREBLOCK_REPOSITORY=str(tiny_repository))
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 3


def test_option_overrides_environment_variable(tiny_repository: Path, empty: Path) -> None:
    assert run("check", "--repository", tiny_repository, PREBLOCK_REPOSITORY=str(empty)).returncode == 0


def test_help_lists_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("export", "verify", "inspect", "convert", "check", "serve", "bench"):
        assert f"  {command} " in done.stdout


def test_missing_command_prints_help_and_exits_2() -> None:
    done = run_installed()
    assert done.returncode == 2
    assert done.stdout == run("--help").stdout


def test_version_option_prints_package_version() -> None:
    assert run_installed("--version").stdout.split()[-1] == preblock.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'."),
        (["--nope"], "No such option"),
        (["export"], "Missing argument 'SOURCE'"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["check", "--provider", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["serve", "--port", "x"], "--port: got x, expected a whole number"),
        (["serve", "--port", "65536"], "--port: got 65536, expected at most 65535"),
        (["serve", "--grpc-port", "-1"], "--grpc-port: got -1, expected at least 0"),
        (["serve", "--workers", "0"], "--workers: got 0, expected at least 1"),
        (["check", "--repository", __file__], "is a file"),
        (["key", ""], "NAME is empty; give the name of the caller, such as alice"),
        (["key", " "], "NAME is empty"),
        (["inspect", "gpt@"], "gpt@: the version after the @ is '', not a whole number from 1 on"),
        (["remove", "gpt@0"], "gpt@0: the version after the @ is '0', not a whole number from 1 on"),
    ],
)
def test_usage_error_exits_2_with_one_line(arguments: list[str], message: str) -> None:
    assert message in failing(*arguments, code=2)


def test_export_with_invalid_model_name_fails(tmp_path: Path) -> None:
    message = failing("export", "gpt2-small", "--name", "../x", "--repository", tmp_path / "r", code=2)
    assert message.startswith("--name: got '../x', expected 1 to 128 letters")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_unknown_model_name_fails_and_lists_known_names(tiny_repository: Path, command: str) -> None:
    message = failing(command, "nope", "--repository", tiny_repository, code=1)
    assert message == f"the repository {tiny_repository} has no model 'nope'; it has bert, gpt"


COMMANDS = pytest.mark.parametrize("command", [["inspect", "m"], ["check"], ["serve", "--port", "0"]])


@COMMANDS
def test_missing_repository_fails(command: list[str], tmp_path: Path) -> None:
    message = failing(*command, "--repository", tmp_path / "none", code=1)
    assert message == f"the repository {tmp_path / 'none'} does not exist; `preblock export` makes one"


def test_file_in_place_of_repository_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file/repository"):
        message = failing("serve", "--repository", place, code=1, PREBLOCK_PORT="0")
        assert message == f"the repository {place} is no folder: {tmp_path / 'file'} is a file"


@pytest.mark.parametrize("command", [["inspect", "m"], ["check"]])
def test_empty_repository_fails(command: list[str], empty: Path) -> None:
    message = failing(*command, "--repository", empty, code=1)
    assert message == f"the repository {empty} holds no model; `preblock export` adds one"


@pytest.mark.parametrize("name", ["manifest.json", "parity.json", "model.onnx"])
def test_check_of_broken_artifact_names_file(copy: Path, name: str) -> None:
    (copy / "bert" / "1" / name).write_text("garbage")
    assert failing("check", "--repository", copy, code=1).startswith(f"bert/1/{name}")


@pytest.mark.parametrize("name", ["manifest.json", "parity.json", "model.onnx", "model.onnx.data"])
def test_check_of_incomplete_artifact_names_missing_file(copy: Path, name: str) -> None:
    (copy / "bert" / "1" / name).unlink()
    message = failing("check", "--repository", copy, code=1)
    assert message.startswith(f"bert/1/{name}")
    assert "is missing" in message or "o such file" in message


def test_check_with_manifest_of_other_graph_fails(copy: Path) -> None:
    shutil.copyfile(copy / "gpt" / "1" / "manifest.json", copy / "bert" / "1" / "manifest.json")
    message = failing("check", "--repository", copy, code=1)
    assert message.startswith("bert/1/model.onnx: got sha256 ")


def test_verify_of_custom_module_has_its_own_exit_code(copy: Path) -> None:
    export_module(Sum(6, 6), "sum", copy, vocab_size=13, max_len=512)
    done = run("verify", "sum", "--repository", copy)
    assert (done.returncode, "preblock:" in done.stderr) == (3, False)
    assert "hashes agree; the proof cannot be repeated" in done.stdout
    everything = run("verify", "--all", "--repository", copy)
    assert everything.returncode == 0, everything.stderr
    assert everything.stdout.count("hashes agree") == 4
    (copy / "bert/1/model.onnx").unlink()
    (copy / "bert/2/model.onnx").write_bytes(b"")
    failed = run("verify", "--all", "--repository", copy)
    assert (failed.returncode, failed.stdout.count("hashes agree")) == (1, 2)
    assert "preblock: bert@1: model.onnx is missing" in failed.stderr
    assert "preblock: bert@2: model.onnx: got " in failed.stderr
    for arguments, got in ((("gpt", "--all"), "both"), ((), "neither")):
        assert f"NAME and --all: got {got}" in failing("verify", *arguments, code=2)


def test_verify_of_changed_file_names_it(copy: Path) -> None:
    with (copy / "bert" / "2" / "model.onnx").open("ab") as file:
        file.write(b"\0")
    done = run("verify", "bert", "--repository", copy)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("preblock: model.onnx: got sha256 ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"), [("PREBLOCK_PORT", "abc"), ("PREBLOCK_PORT", "70000"), ("PREBLOCK_PROVIDER", "tpu")]
)
def test_invalid_environment_variable_fails_with_its_name(tiny_repository: Path, variable: str, value: str) -> None:
    message = failing("serve", "--repository", tiny_repository, code=1, **{variable: value})
    assert message.startswith(f"{variable}: got {value}, expected ")


def test_settings_command_prints_values_and_origins(tmp_path: Path) -> None:
    file = tmp_path / "preblock.toml"
    file.write_text("workers = 3\n")
    done = run("settings", "--config-file", file, "--intra-op-threads", "2", PREBLOCK_GRPC_PORT="7")
    assert (done.returncode, done.stderr) == (0, "")
    told = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert told["workers"] == ["3", str(file)]
    assert told["intra_op_threads"] == ["2", "--intra-op-threads"]
    assert told["grpc_port"] == ["7", "PREBLOCK_GRPC_PORT"]
    assert told["port"] == ["8000", "default"]


@pytest.mark.skipif(cuda_unavailable_reason() is None, reason="CUDA works here")
def test_verify_without_cuda_fails_with_reason(tiny_repository: Path) -> None:
    done = run("verify", "gpt", "--repository", tiny_repository, "--provider", "cuda")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"preblock: provider cuda cannot be used: {cuda_unavailable_reason()}\n"


def test_debug_option_shows_traceback(empty: Path) -> None:
    done = run_installed("--debug", "check", "--repository", empty)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "find_artifacts" in done.stderr
