"""The help of every command, with only the packages of the base install."""

import json
import subprocess
import sys

from preblock.cli import app

OPTIONAL = (
    "torch",
    "onnx",
    "onnxruntime",
    "safetensors",
    "huggingface_hub",
    "transformers",
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


def test_help_of_every_command_needs_no_optional_package() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    results, modules = json.loads(done.stdout)
    assert results.keys() == {"", "export", "verify", "triton", "inspect", "check", "key", "settings", "serve", "bench"}
    for name, (code, output) in results.items():
        assert code == 0
        assert output.startswith(f"Usage: preblock {name} ".replace("  ", " "))
    assert set(OPTIONAL).isdisjoint(modules)


def test_group_help_has_a_line_for_every_command() -> None:
    for command in app.commands.values():
        assert command.get_short_help_str(), command.name
