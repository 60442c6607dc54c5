"""The command to create API keys: `key`."""

import click


@click.command()
@click.argument("name")
@click.option(
    "--model", "models", multiple=True, help="A model the key may use, or a pattern; may be repeated; default all."
)
@click.option("--admin", is_flag=True, help="Allow the key to load and unload models.")
def key(name: str, models: tuple[str, ...], admin: bool) -> None:
    """Print a new API key, and its entry for the key file.

    The entry goes into the file of --api-keys-file. Keep the key: nothing can show it again. NAME stands for the caller
    in logs.

    \b
    Examples:
      preblock key alice --model minilm --model 'gpt2-*'
      preblock key operator --admin
    """
    from preblock.service.core.auth import new_key

    if not name.strip():
        raise click.UsageError("NAME is empty; give the name of the caller, such as alice")
    made, entry = new_key(name, models, admin)
    click.echo(f"{made}\n\n{entry}", nl=False)
