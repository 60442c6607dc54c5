"""Layout of ONNX Runtime GenAI: `embedding.onnx`, and the entries of `genai_config.json` for it.

Letters: B batch, L length, N image features, D width.
"""

import json
from pathlib import Path
from typing import Any

import onnx

from preblock.export.errors import ExportError
from preblock.export.layouts.token_lookup import INPUT_IDS, INPUTS_EMBEDS, TEXT_EMBEDS, TokenLookup, write_lookup

GRAPH, CONFIG = "embedding.onnx", "genai_config.embedding.json"
IMAGE_FEATURES = "image_features"


def write_ort_genai(lookup: TokenLookup, folder: Path) -> None:
    """Write the lookup as a stage of a `decoder-pipeline`."""
    write_lookup(lookup, folder / GRAPH, f"{GRAPH}.data")
    stage = {"filename": GRAPH, "inputs": [INPUT_IDS], "outputs": [INPUTS_EMBEDS]}
    _write_config(folder, {"decoder": {"pipeline": [{"embedding": stage}]}})


def write_ort_genai_images(lookup: TokenLookup, folder: Path, image_token_id: int) -> None:
    """Write the lookup as the embedding model of a model with images.

    A further input `image_features`, float32 (N, D), replaces the vectors of the N image tokens, in order. Another
    number of features than image tokens is an error of onnxruntime.

    Args:
        lookup: the lookup.
        folder: folder to write.
        image_token_id: id of an image token.

    Raises:
        ExportError: `image_token_id` is beyond the vocabulary.

    """
    largest = lookup.manifest.vocab_size - 1
    if image_token_id > largest:
        raise ExportError(f"--image-token-id: got {image_token_id}, expected 0 to {largest}")
    nodes = onnx.parser.parse_graph(f"""
        scatter (float[features, {lookup.shape[0]}] {IMAGE_FEATURES}) => (float[B, L, D] {INPUTS_EMBEDS})
        <int64 image_token_id = {{{image_token_id}}}> {{
          is_image = Equal ({INPUT_IDS}, image_token_id)
          axes = NonZero (is_image)
          places = Transpose <perm = [1, 0]> (axes)
          {INPUTS_EMBEDS} = ScatterND ({TEXT_EMBEDS}, places, {IMAGE_FEATURES})
        }}
    """)
    write_lookup(lookup, folder / GRAPH, f"{GRAPH}.data", nodes)
    inputs = {name: name for name in (INPUT_IDS, IMAGE_FEATURES)}
    embedding = {"filename": GRAPH, "inputs": inputs, "outputs": {INPUTS_EMBEDS: INPUTS_EMBEDS}}
    _write_config(folder, {"image_token_id": image_token_id, "embedding": embedding})


def _write_config(folder: Path, model: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps({"model": model}, indent=2) + "\n", encoding="utf-8")
