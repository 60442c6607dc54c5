"""The use of each output, in words: the wrong output gives wrong results without an error."""

from preblock.service.artifacts.manifest import Manifest, StemManifest, TokenEmbeddings
from preblock.service.artifacts.names import (
    EMBEDDINGS,
    LOOKUPS,
    NGRAM_ROW_IDS,
    NGRAM_SCALES,
    NGRAMS,
    PER_LAYER,
    PER_LAYER_TOKENS,
    POSITION_EMBEDDINGS,
    TOKEN_EMBEDDINGS,
    UNSCALED,
)

BLOCK_0 = "input of block 0"
LAYERS = "inputs of all layers"
NGRAM_USES = {
    NGRAMS: "n-gram embeddings of some layers",
    NGRAM_ROW_IDS: "rows of the n-gram tables of some layers",
    NGRAM_SCALES: "scales of stored n-gram embeddings",
}
ATTENTION = "positions in attention"
POSITIONS = "vectors added to the token vectors"


def use_of(output: str, lookup_use: str) -> str:
    """Return the use of an output, for the metadata of answers; `lookup_use` is that of the model's own lookup."""
    if output in LOOKUPS:
        return lookup_use
    if output == POSITION_EMBEDDINGS:
        return POSITIONS
    if output in (PER_LAYER, PER_LAYER_TOKENS):
        return LAYERS
    if output in NGRAM_USES:
        return NGRAM_USES[output]
    return BLOCK_0 if output == EMBEDDINGS else ATTENTION


def describe_scale(lookup: TokenEmbeddings) -> str:
    """Return a sentence on `token_embeddings` and the embedding scale."""
    if lookup.embedding_scale == 1:
        return "The model has no embedding scale."
    factor = f"embedding scale, {lookup.embedding_scale:g}"
    return f"They include the {factor}." if lookup.scaled else f"They do not include the {factor}."


def describe_uses(manifest: Manifest | StemManifest) -> dict[str, str]:
    """Return a description of every output of a model, by name."""
    if isinstance(manifest, StemManifest):
        return {EMBEDDINGS: "Vectors of the input that enter block 0, over the Open Inference Protocol."}
    uses = {EMBEDDINGS: _describe_embeddings(manifest)}
    lookup = manifest.token_embeddings
    if lookup is not None:
        uses[TOKEN_EMBEDDINGS] = (
            f"Vectors of the model's own lookup. Pass them as {lookup.use}. The model adds positions and norm itself. "
            f"{describe_scale(lookup)}"
        )
    if lookup is not None and lookup.scaled and UNSCALED in manifest.widths:
        uses[UNSCALED] = (
            f"Rows of the token table, without the embedding scale. Pass them as {lookup.use} that scales them itself; "
            "the manifest lists such consumers in token_embeddings.consumers."
        )
    if PER_LAYER in manifest.widths:
        uses[PER_LAYER_TOKENS] = (
            "Token part of the inputs of all layers. Pass it as per_layer_inputs of transformers, beside "
            "inputs_embeds: the model adds the rest."
        )
        uses[PER_LAYER] = (
            "Inputs of all layers, side by side. Feed each layer its own columns, beside its hidden states."
        )
    if NGRAMS in manifest.widths:
        uses[NGRAMS] = (
            "N-gram embeddings of the layers in front_end.ngrams.layers, rows of their tables side by side. Feed each "
            "layer its own part. They depend on the ids before a row: send these as context."
        )
    if NGRAM_ROW_IDS in manifest.widths:
        uses[NGRAM_ROW_IDS] = (
            "Numbers of these rows in the tables of the same layers, one for each head, int64. An engine that has the "
            "tables gathers the rows itself."
        )
    if NGRAM_SCALES in manifest.widths:
        uses[NGRAM_SCALES] = (
            "Scales of these rows, side by side. Multiply ngram_embeddings of the dtype stored by them."
        )
    for rotary in manifest.rotary:
        functions = {rotary.cos: "Cosines", rotary.sin: "Sines"}
        if rotary.form == "fused":
            functions[rotary.cos] = "Cosines, and then sines,"
        for name, function in functions.items():
            uses[name] = f"{function} of the rotation of queries and keys. Pass them to your own attention."
    if manifest.bias is not None:
        uses[manifest.bias.name] = (
            "Attention by distance, for your own attention. Request it with /bias, without tokens."
        )
    return uses


def _describe_embeddings(manifest: Manifest) -> str:
    text = "Vectors that enter block 0, with positions, scale and norm of the family. Feed them to block 0 directly."
    front_end = manifest.front_end or {}
    streams, copies = front_end.get("streams", 1), front_end.get("copies", 1)
    if streams != 1:
        text = (
            f"The first of {streams} streams that enter block 0. Project the others from it with the model's matrices."
        )
    if copies != 1:
        text = f"Each of the {copies} equal streams that enter block 0. Repeat each vector {copies} times for block 0."
    if manifest.token_embeddings is not None and manifest.token_embeddings.needs_ids:
        text += " The blocks take the token ids too."
    if manifest.token_embeddings is not None and manifest.token_embeddings.output == EMBEDDINGS:
        return f"{text} They equal token_embeddings: {manifest.token_embeddings.use}."
    return f"{text} Do not pass them as inputs_embeds or prompt_embeds: the model would add these parts again."
