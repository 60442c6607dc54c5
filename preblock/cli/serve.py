"""Commands of the service: `serve` and `settings`."""

import os
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from preblock.cli.options import describe_limits, read_settings, require


class SettingsCommand(click.Command):
    """A command with an option for every setting. Settings are imported when the command runs."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return one option for each setting, then those of the command."""
        from preblock.service.core.settings import Settings, option

        options: list[click.Parameter] = []
        for name, field in Settings.model_fields.items():
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            default = field.get_default(call_default_factory=True)
            suffix = "" if default is None else f" [default: {default}]"
            kind = click.Choice(choices) if choices else str
            options.append(click.Option([option(name)], type=kind, help=f"{field.description}{suffix}"))
        return [*options, *super().get_params(ctx)]


@click.command("settings", cls=SettingsCommand)
def show_settings(**options: Any) -> None:
    """Print every setting, its value, and its origin: an option, a variable, a file, or the default."""
    settings = read_settings(**options)
    rows = [(name, "none" if value is None else str(value), settings.origins[name]) for name, value in settings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@click.command(cls=SettingsCommand)
def serve(**options: Any) -> None:
    """Serve every model of the repository.

    Every option can also be set by a variable, such as PREBLOCK_PORT, or in the file of --config-file, such as port.
    """
    require("onnxruntime", "cpu")
    from preblock.service.server.run import serve as run

    settings = read_settings(**options)

    def announce(address: str, models: list[Any]) -> None:
        lines = [f"Preblock serves on {address} (documentation: {address}/docs)"]
        lines += [f"  {model.name}: {describe_limits(model.manifest)}, {model.provider}" for model in models]
        if settings.grpc_port is not None:
            lines.append(f"gRPC on {settings.host}:{settings.grpc_port}")
        # On this machine, a server on all addresses is reached through the loopback address.
        local = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        takes_tokens = [model.name for model in models if model.manifest.kind == "tokens"]
        lines.append("Try:")
        lines.append(
            f"  curl {local}/models/{takes_tokens[0]}/embed -H 'Content-Type: application/json' "
            """-d '{"input_ids": [[1, 2, 3]], "encoding": "float"}'"""
            if takes_tokens
            else f"  curl {local}/v2/models/{models[0].name}"
        )
        _print_banner("\n".join(lines))

    run(settings, announce)


def _print_banner(text: str) -> None:
    """Print on standard output. A closed pipe, as after `head -1`, does not end the service."""
    try:
        click.echo(text)  # flushes too
    except OSError:
        with Path(os.devnull).open("w") as nowhere:  # else Python fails to flush the rest at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
