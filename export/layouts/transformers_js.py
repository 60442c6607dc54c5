"""Layout of transformers.js: `embed_tokens` in the folder `onnx`, beside the decoder and the encoders of a model."""

from pathlib import Path

from preblock.export.errors import ExportError
from preblock.export.layouts.token_lookup import TokenLookup, write_lookup
from preblock.service.artifacts.names import PER_LAYER

SUFFIXES = {"float32": "", "float16": "_fp16", "int8": "_quantized", "int4": "_q4"}
"""Suffix of the file for the stored dtype of the tables. The vectors are float32 in each."""


def write_transformers_js(lookup: TokenLookup, folder: Path) -> None:
    """Write `onnx/embed_tokens*.onnx` and its data file into `folder`.

    A model with per-layer inputs also has the output `per_layer_inputs`: the token part, since the decoder adds the
    projection of `inputs_embeds` itself.

    Raises:
        ExportError: transformers.js has no name for the dtype of the tables.

    """
    dtype = lookup.manifest.dtype
    if dtype not in SUFFIXES:
        allowed = ", ".join(SUFFIXES)
        raise ExportError(f"transformers.js has no name for tables in {dtype}; export the model in {allowed}")
    file = folder / "onnx" / f"embed_tokens{SUFFIXES[dtype]}.onnx"
    file.parent.mkdir()
    write_lookup(lookup, file, f"{file.name}_data", per_layer=PER_LAYER)
