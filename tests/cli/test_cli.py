"""The command line, as a user runs it, and the pages that it writes for the documentation."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import preblock
from preblock.export import export_module
from tests.cli.command_line import failing, printed, run, run_installed
from tests.export.test_module import Sum
from tests.support.checkpoints import write_gpt2
from tools.reference import FOLDER, PAGES


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


def test_export_as_int8_reports_error_and_bytes_saved(tmp_path: Path) -> None:
    source = write_gpt2(tmp_path / "source", np.eye(7, 4, dtype=np.float32), np.eye(6, 4, dtype=np.float32))
    done = run("export", source, "--name", "tiny", "--repository", tmp_path, "--dtype", "int8", "--scale", "tensor")
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


def test_check_runs_every_version(tiny_repository: Path) -> None:
    done = run_installed("check", "--repository", tiny_repository, "--provider", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "bert 1: runs on CPUExecutionProvider, bert, ids 0 to 10, token_type_ids 0 to 1, max_len 8, width 4",
        "bert 2: runs on CPUExecutionProvider, bert, ids 0 to 10, token_type_ids 0 to 1, max_len 8, width 4",
        "gpt 1: runs on CPUExecutionProvider, gpt2, ids 0 to 6, max_len 6, width 4",
    ]


def test_missing_command_prints_help_and_exits_2() -> None:
    done = run_installed()
    assert (done.returncode, done.stdout) == (2, printed("--help"))
    assert run_installed("--version").stdout.split()[-1] == preblock.__version__


def test_usage_error_exits_2_with_one_line() -> None:
    for arguments, message in (
        (["nope"], "No such command 'nope'."),
        (["--nope"], "No such option"),
        (["export"], "Missing argument 'SOURCE'"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["check", "--provider", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["serve", "--port", "x"], "--port: got x, expected a whole number"),
        (["settings", "--port", "65536"], "--port: got 65536, expected at most 65535"),
        (["serve", "--grpc-port", "-1"], "--grpc-port: got -1, expected at least 0"),
        (["check", "--repository", __file__], "is a file"),
        (["key", ""], "NAME is empty; give the name of the caller, such as alice"),
        (["key", " "], "NAME is empty"),
        (["inspect", "gpt@"], "gpt@: the version after the @ is '', not a whole number from 1 on"),
        (["remove", "gpt@0"], "gpt@0: the version after the @ is '0', not a whole number from 1 on"),
    ):
        assert message in failing(*arguments, code=2)


def test_unusable_repository_is_named(tmp_path: Path, empty: Path) -> None:
    (tmp_path / "file").touch()
    missing, beyond = tmp_path / "none", tmp_path / "file/repository"
    inspect, check, serve = ["inspect", "m"], ["check"], ["serve", "--port", "0"]
    for repository, reason, commands in (
        (missing, "does not exist; `preblock export` makes one", (inspect, check, serve)),
        (empty, "holds no model; `preblock export` adds one", (inspect, check)),
        (tmp_path / "file", f"is no folder: {tmp_path}/file is a file", (serve,)),
        (beyond, f"is no folder: {tmp_path}/file is a file", (serve,)),
    ):
        for command in commands:
            message = failing(*command, code=1, PREBLOCK_REPOSITORY=str(repository))
            assert message == f"the repository {repository} {reason}", command


def test_check_of_broken_artifact_names_file(copy: Path, tiny_repository: Path) -> None:
    folder = copy / "bert/1"
    for name in ("manifest.json", "parity.json", "model.onnx", "model.onnx.data"):
        (folder / name).unlink()
        message = failing("check", "--repository", copy, code=1)
        assert re.match(rf"bert/1/{name}.*(is missing|o such file)", message)
        (folder / name).write_text("garbage")
        assert failing("check", "--repository", copy, code=1).startswith(f"bert/1/{name}")
        shutil.copy(tiny_repository / "bert/1" / name, folder)
    shutil.copy(copy / "gpt/1/manifest.json", folder)
    assert failing("check", "--repository", copy, code=1).startswith("bert/1/model.onnx: got sha256 ")


def test_verify_of_custom_module_has_its_own_exit_code(copy: Path) -> None:
    export_module(Sum(6, 6), "sum", copy, vocab_size=13, max_len=512)
    done = run("verify", "sum", "--repository", copy)
    assert (done.returncode, "preblock:" in done.stderr) == (3, False)
    assert "hashes agree; the proof cannot be repeated" in done.stdout
    everything = run("verify", "--all", "--repository", copy)
    assert everything.returncode == 0, everything.stderr
    assert everything.stdout.count("hashes agree") == 4
    (copy / "bert/1/model.onnx").unlink()
    with (copy / "bert/2/model.onnx").open("ab") as file:
        file.write(b"\0")
    failed = run("verify", "--all", "--repository", copy)
    assert (failed.returncode, failed.stdout.count("hashes agree")) == (1, 2)
    assert "preblock: bert@1: model.onnx is missing" in failed.stderr
    assert "preblock: bert@2: model.onnx: got sha256 " in failed.stderr
    for arguments, got in ((("gpt", "--all"), "both"), ((), "neither")):
        assert f"NAME and --all: got {got}" in failing("verify", *arguments, code=2)


def test_invalid_environment_variable_fails_with_its_name(tiny_repository: Path) -> None:
    for variable, value in (("PREBLOCK_PORT", "abc"), ("PREBLOCK_PORT", "70000"), ("PREBLOCK_PROVIDER", "tpu")):
        message = failing("serve", "--repository", tiny_repository, code=1, **{variable: value})
        assert message.startswith(f"{variable}: got {value}, expected ")


def test_debug_option_shows_traceback(empty: Path) -> None:
    done = run_installed("--debug", "check", "--repository", empty)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "find_artifacts" in done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run `make reference`"
