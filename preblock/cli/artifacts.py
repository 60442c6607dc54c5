"""Commands on existing artifacts: `inspect` and `check`."""

from pathlib import Path
from typing import Any

import click

from preblock.cli.options import (
    PROVIDER,
    REPOSITORY,
    describe_limits,
    describe_storage,
    find_newest,
    read_settings,
    require,
)


@click.command()
@click.argument("name")
@REPOSITORY
def inspect(name: str, repository: Path | None) -> None:
    """Show the manifest, the identity and the parity report of the model NAME."""
    from preblock.service.artifacts.io import read, read_with_identity
    from preblock.service.artifacts.manifest import PARITY
    from preblock.service.artifacts.parity import ParityReport

    folder = find_newest(repository, name)
    (manifest, identity), report = read_with_identity(folder), read(ParityReport, folder / PARITY)
    click.echo(f"{folder}: {describe_limits(manifest)}")
    click.echo(f"identity: {identity}")
    for provider, parity in report.providers.items():
        for output, compared in parity.outputs.items():
            click.echo(f"parity on {provider}, {output}: {compared.summary()}")
    if report.storage:
        click.echo(describe_storage(manifest, report))
    for table, stored in report.storage.items():
        click.echo(f"  {table}: {stored.summary()}")
    click.echo(manifest.model_dump_json(indent=2))


@click.command()
@REPOSITORY
@PROVIDER
def check(**options: Any) -> None:
    """Load every model, run each once, and exit."""
    require("onnxruntime", "cpu")
    from preblock.service.app import create_engine
    from preblock.service.core.auth import SERVICE

    models = create_engine(read_settings(**options)).repository.all(SERVICE)
    for model in models:
        click.echo(f"{model.name} {model.version}: runs on {model.provider}, {describe_limits(model.manifest)}")
