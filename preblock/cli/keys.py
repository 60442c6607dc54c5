"""The command to create API keys: `key`."""

import click


@click.command()
@click.argument("name")
@click.option(
    "--model", "models", multiple=True, help="A model the key may use, or a pattern; may be repeated; default all."
)
@click.option("--admin", is_flag=True, help="Allow the key to load and unload models.")
def key(name: str, models: tuple[str, ...], admin: bool) -> None:
    """Print a new key for NAME, and its entry for the file of --api-keys-file. The key cannot be shown again."""
    from preblock.service.core.auth import new_key

    made, entry = new_key(name, models, admin)
    click.echo(f"{made}\n\n{entry}", nl=False)
