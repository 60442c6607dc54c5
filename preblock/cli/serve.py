"""Commands of the service: `serve` and `settings`."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import click

from preblock.cli.export import complete_source
from preblock.cli.options import SPELLINGS, read_settings, require, table
from preblock.extras import EXTRAS

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Address": ("host", "port", "grpc_port", "uds", "grpc_uds", "workers"),
    "Models": (
        *("repository", "reference_roots", "cache_dir", "aliases", "tei"),
        *("model_control", "load_models", "model_poll_interval_seconds", "model_open_timeout_seconds"),
    ),
    "Execution": (
        *("provider", "intra_op_threads", "gpu_mem_limit_bytes"),
        *("table_memory_budget_bytes", "table_warm_up_file"),
    ),
    "Request limits": (
        *("max_body_bytes", "max_request_tokens", "max_request_rows", "max_buffered_response_bytes"),
        *("max_concurrent_requests", "rate_limit_per_second", "max_queue_size", "queue_timeout_seconds"),
        *("header_timeout_seconds", "body_timeout_seconds", "shutdown_timeout_seconds"),
    ),
    "Streams and sequences": (
        *("max_concurrent_streams", "stream_idle_timeout_seconds", "stream_max_lifetime_seconds"),
        *("sequence_idle_timeout_seconds", "max_sequence_rows", "max_stream_sequence_rows"),
    ),
    "Shared memory": ("max_shared_memory_bytes", "shared_memory_idle_timeout_seconds"),
    "Security": (
        *("api_key", "api_keys_file", "tls_cert_file", "tls_key", "tls_client_ca"),
        *("allowed_hosts", "cors_origins", "trusted_proxies", "inspector"),
    ),
    "Logs and traces": (*("log_format", "log_level", "access_log_sample_rate", "access_log_max_token_ids", "tracing"),),
    "Further": ("config_file",),
}
"""The settings by the heading of their options in the help."""
METAVARS: Mapping[type, str] = {int: "INTEGER", float: "NUMBER", Path: "PATH"}


class SettingsCommand(click.Command):
    """A command with an option for every setting. Settings are imported when the command runs."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return one option for each setting, then those of the command."""
        from preblock.service.core.settings import REPEATED_OPTIONS, Settings, option

        options: list[click.Parameter] = []
        for name, field in Settings.model_fields.items():
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            default = field.get_default(call_default_factory=True)
            repeated = name in REPEATED_OPTIONS
            suffix = "" if default is None else f" [default: {default}]"
            options.append(
                click.Option(
                    [option(name), *([SPELLINGS[name]] if name in SPELLINGS else []), name],
                    multiple=repeated,
                    callback=_join_items if repeated else None,
                    type=click.Choice(choices) if choices else str,
                    metavar=None if choices else _metavar(name, field.annotation),
                    help=f"{field.description}{suffix}",
                )
            )
        return [*options, *super().get_params(ctx)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group below its heading, then the rest."""
        records = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names])
        with formatter.section("Options"):
            formatter.write_dl(list(records.values()))


def _metavar(name: str, annotation: Any) -> str:
    """Return the placeholder of a setting's value, by its name or its type."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kind: type = next(kind for kind in kinds if kind is not type(None))
    return {"aliases": "NAME=MODEL", "load_models": "NAME"}.get(name) or METAVARS.get(kind, "TEXT")


def _join_items(_: click.Context, __: click.Parameter, items: tuple[str, ...]) -> str | None:
    """Return the items of a repeated option as one setting."""
    return ",".join(items) or None


@click.command("settings", cls=SettingsCommand)
def show_settings(**options: Any) -> None:
    """Print every setting, its value and its origin.

    The origin is an option, a variable, a file, or the default.

    \b
    Examples:
      preblock settings
      preblock settings --config-file preblock.toml
    """
    settings = read_settings(**options)
    values = [(name, "none" if value is None else str(value)) for name, value in settings]
    click.echo(table([(name, value, settings.origins[name]) for name, value in values]))


@click.command(cls=SettingsCommand)
@click.argument("sources", metavar="[SOURCE]...", nargs=-1, shell_complete=complete_source)
@click.option("--name", help="Name of the model, if there is one SOURCE; default: the name of SOURCE.")
def serve(sources: tuple[str, ...], name: str | None, **options: Any) -> None:
    """Serve every model of the repository.

    Each SOURCE is exported first, unless the newest version of its model already is its export. SOURCE is a folder, a
    preset, or hf:owner/name[@revision], as in `preblock export`.

    Each option is also a variable, such as PREBLOCK_PORT, and a key of the file of --config-file, such as port.

    \b
    Examples:
      preblock serve
      preblock serve ./my-bert --name minilm
      preblock serve --repository /srv/models --host 0.0.0.0 --grpc-port 8001
      preblock serve --workers 4 --api-keys-file keys.toml
    """
    if name is not None and len(sources) != 1:
        raise click.UsageError(f"--name: got {name!r} and {len(sources)} sources, expected one SOURCE")
    require(*EXTRAS["export" if sources else "serve"])
    # FastAPI's import fails on a propagator without a package; spans join traces by `traceparent` alone.
    os.environ["OTEL_PROPAGATORS"] = "tracecontext"
    settings = read_settings(**options)
    if settings.api_key is not None:
        _forget_key()
    if sources:
        from preblock.cli.child import run_in_child
        from preblock.cli.sources import export_missing

        # The exporter needs more memory than the service, and its packages would stay in it.
        run_in_child(lambda: export_missing(sources, name, settings))
    from preblock.cli.banner import write_banner
    from preblock.service.server.run import serve as run

    run(settings, lambda *served: _print_banner(write_banner(*served)))


def _forget_key() -> None:
    """Remove the API key from the variables and the arguments of child processes, and from /proc/PID/environ."""
    import ctypes

    from preblock.service.core.settings import variable

    place_of = ctypes.CDLL(None).getenv
    place_of.argtypes, place_of.restype = [ctypes.c_char_p], ctypes.c_void_p
    for name in [name for name in os.environ if name.upper() == variable("api_key")]:
        ctypes.memset(place_of(name.encode()), ord("*"), len(os.fsencode(os.environ[name])))
        del os.environ[name]
    del sys.argv[1:]


def _print_banner(text: str) -> None:
    """Print on standard output. A closed pipe, as after `head -1`, does not end the service."""
    try:
        click.echo(text)  # flushes too
    except OSError:
        with Path(os.devnull).open("w") as nowhere:  # else Python fails to flush the rest at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
