"""The command on sources: `families`."""

import click

from preblock.cli.options import require, table
from preblock.extras import EXTRAS


@click.command()
def families() -> None:
    """List the presets (random weights) and model types.

    One line for each model type: its side for the option --side, the steps of its front-end with the library's default
    values, and the outputs for its attention.

    \b
    Example:
      preblock families
    """
    require(*EXTRAS["families"])
    from preblock.models.checkpoints.family_lookup import default_kinds
    from preblock.models.families import FAMILIES, STEMS
    from preblock.models.families.static import STATICS
    from preblock.models.presets import PRESETS

    click.echo(f"Presets with random weights, to try without a checkpoint: {', '.join(PRESETS)}\n")
    rows = []
    for name, family in FAMILIES.items():
        model_type, _, side = name.partition("/")
        outputs = [kind for kind in ("rotary", "bias") if getattr(family, kind)]
        optional = ["(--segments)"] if family.segments else []
        rows.append((model_type, side, " ".join([*default_kinds(family), *optional]), ", ".join(outputs)))
    rows += [(name, "", "tokens weights (sentence embeddings)", "") for name in STATICS]
    for name in STEMS:
        model_type, _, side = name.partition("/")
        rows.append((model_type, side, "(an encoder of images or spectrograms)", ""))
    click.echo(table([("MODEL TYPE", "SIDE", "STEPS", "ATTENTION"), *sorted(rows)]))
