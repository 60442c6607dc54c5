"""The output of an artifact for a consumer of `inputs_embeds`."""

import click

from preblock.cli.options import table
from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.names import TOKEN_EMBEDDINGS

ONE_TENSOR = ("vllm", "sglang", "llama.cpp")
"""Consumers that take one tensor in place of ids."""


def write_consumer(manifest: Manifest | StemManifest, engine: str) -> str:
    """Return the output for `inputs_embeds` of `engine`, one line for each range of its versions.

    Raises:
        click.ClickException: the model has no token embeddings, the engine takes less than the model needs, or its
            expectation is unknown.

    """
    lookup = manifest.token_embeddings if isinstance(manifest, Manifest) else None
    if lookup is None:
        raise click.ClickException(f"the model, of family {manifest.family}, has no token embeddings")
    if lookup.needs_ids:
        reason = "its blocks need the token ids too"
        raise click.ClickException(f"{engine} takes no inputs_embeds of a {manifest.family}: {reason}")
    if lookup.beside and engine in ONE_TENSOR:
        raise click.ClickException(
            f"{engine} takes one tensor, but a {manifest.family} needs {lookup.arguments} beside {TOKEN_EMBEDDINGS}"
        )
    beside = f", with {lookup.arguments}" if lookup.beside else ""
    if lookup.embedding_scale == 1:
        return f"every version: {TOKEN_EMBEDDINGS}{beside}; the model has no embedding scale"
    found = [consumer for consumer in lookup.consumers if consumer.engine == engine]
    if not found:
        raise click.ClickException(
            f"it is unknown whether {engine} scales the inputs_embeds of a {manifest.family}, by "
            f"{lookup.embedding_scale:g}; token_embeddings {'include' if lookup.scaled else 'exclude'} that scale"
        )
    forms = {"applied": "with the embedding scale", "none": f"without the embedding scale: {engine} applies it"}
    return table(
        [
            (
                f"{engine} {consumer.versions}",
                f"{consumer.output}{beside}" if consumer.output else "no output of this artifact",
                forms[consumer.scale],
                f"read in {consumer.source}",
            )
            for consumer in found
        ]
    )
