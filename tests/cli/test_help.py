"""The help of every command, with only the packages of the base install."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from preblock.cli import app
from preblock.cli.options import SPELLINGS
from preblock.cli.serve import GROUPS
from preblock.service.core.settings import Settings, option
from tests.support.paths import PREBLOCK

OPTIONAL = (
    "torch",
    "onnx",
    "onnxruntime",
    "safetensors",
    "huggingface_hub",
    "transformers",
    "matplotlib",
    "httpx",
    "opentelemetry.sdk",
)
SCRIPT = """
import json, sys
from click.testing import CliRunner
from preblock.cli import app
calls = [[], *([name] for name in app.commands)]
results = {" ".join(call): CliRunner().invoke(app, [*call, "--help"], prog_name="preblock") for call in calls}
print(json.dumps([{name: [result.exit_code, result.output] for name, result in results.items()}, list(sys.modules)]))
"""


def test_help_imports_no_optional_package() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    results, modules = json.loads(done.stdout)
    assert results.keys() == {
        *("", "export", "verify", "convert", "families", "list", "inspect", "plot", "check", "remove"),
        *("key", "settings", "serve", "bench"),
    }
    for name, (code, output) in results.items():
        assert code == 0
        assert output.startswith(f"Usage: preblock {name} ".replace("  ", " "))
    assert set(OPTIONAL).isdisjoint(modules)


def test_command_help_has_uncut_line_and_example() -> None:
    lines = CliRunner().invoke(app, ["--help"], terminal_width=80).output.splitlines()
    for name, command in app.commands.items():
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert command.help is not None
        assert line.split(maxsplit=1)[1] == command.help.partition("\n")[0]  # not cut
        output = CliRunner().invoke(app, [name, "--help"], terminal_width=80).output
        assert re.search(rf"^  Examples?:\n    preblock {name}\b", output, re.MULTILINE), name


def test_spellings_of_other_servers_set_settings() -> None:
    values = {"repository": "/srv/models", "model_control": "poll", "aliases": "a/b=gpt"}
    assert values.keys() == SPELLINGS.keys()
    arguments = [part for name, value in values.items() for part in (SPELLINGS[name], value)]
    lines = [line.split() for line in CliRunner().invoke(app, ["settings", *arguments]).output.splitlines()]
    assert {name: value for name, value, origin in lines if origin == option(name)} == values
    assert CliRunner().invoke(app, ["list", "--model-repository", "/nope"]).exit_code == 1


def test_serve_help_has_groups_types_and_defaults() -> None:
    output = CliRunner().invoke(app, ["serve", "--help"], terminal_width=120).output
    assert re.findall(r"^(\w.*):$", output, re.MULTILINE) == [*GROUPS, "Options"]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(Settings.model_fields)
    for text in ("rate-limit-per-second NUMBER", "repository, --model-repository PATH", "log-format [text|json]"):
        assert f"--{text}" in output
    assert re.search(r"--port INTEGER +Port of HTTP and WebSocket; 0 picks a free port. \[default: 8000\]", output)


def complete(words: str, **environment: str) -> list[str]:
    """Return the completions of the last word, as click tells them to bash."""
    variables = {"_PREBLOCK_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environment = os.environ | variables | environment
    done = subprocess.run([PREBLOCK], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_completion_offers_models_presets_and_options(tiny_repository: Path) -> None:
    for repository, words, completions in (
        (tiny_repository, "inspect ", ["plain,bert", "plain,gpt"]),
        (tiny_repository, "remove g", ["plain,gpt"]),
        (tiny_repository, "verify bert@", ["plain,bert@1", "plain,bert@2"]),
        (tiny_repository, "convert x", []),
        (tiny_repository, "export g", ["plain,gpt2-small", "dir,g"]),
        (tiny_repository, "fam", ["plain,families"]),
        (tiny_repository, "serve --log-format j", ["plain,json"]),
        ("/none", f"inspect --repository {tiny_repository} g", ["plain,gpt"]),
        ("/none", "inspect ", []),
    ):
        assert complete(f"preblock {words}", PREBLOCK_REPOSITORY=str(repository)) == completions, words


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion_script_works_in_bash() -> None:
    script = subprocess.check_output([PREBLOCK], env=os.environ | {"_PREBLOCK_COMPLETE": "bash_source"}, text=True)
    done = subprocess.run(["bash", "-c", f"{script}\ncomplete -p preblock"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("-F _preblock_completion preblock")
