"""The parts of a model beside its token lookup, as tiny graphs: the logits are `inputs_embeds`, unchanged."""

import json
from pathlib import Path
from typing import Any

import onnx


def write_decoder(file: Path, width: int) -> None:
    """Write a decoder with one layer of keys and values, with `inputs_embeds` as its logits."""
    _write(
        file,
        f"""
        decoder (float[B, L, {width}] inputs_embeds, int64[B, T] attention_mask,
                 float[B, 1, P, 1] past_key_0, float[B, 1, P, 1] past_value_0)
             => (float[B, L, {width}] logits, float[B, 1, Q, 1] present_key_0, float[B, 1, R, 1] present_value_0) {{
          logits = Identity (inputs_embeds)
          begin = Constant <value_ints = [0]> ()
          end = Constant <value_ints = [1]> ()
          width = Constant <value_ints = [2]> ()
          column = Slice (inputs_embeds, begin, end, width)
          heads = Constant <value_ints = [1]> ()
          new = Unsqueeze (column, heads)
          present_key_0 = Concat <axis = 2> (past_key_0, new)
          present_value_0 = Concat <axis = 2> (past_value_0, new)
        }}
        """,
    )


def write_layers_decoder(file: Path, width: int, layers: int, size: int) -> None:
    """Write a decoder with its `inputs_embeds` and `per_layer_inputs` as outputs."""
    _write(
        file,
        f"""
        decoder (float[B, L, {width}] inputs_embeds, float[B, L, {layers}, {size}] per_layer_inputs)
             => (float[B, L, {width}] logits, float[B, L, {layers}, {size}] layers) {{
          logits = Identity (inputs_embeds)
          layers = Identity (per_layer_inputs)
        }}
        """,
    )


def write_vision(file: Path, width: int) -> None:
    """Write a vision encoder with its input as features."""
    _write(
        file,
        f"""
        vision (float[images, N, {width}] pixel_values) => (float[F, {width}] image_features) {{
          shape = Constant <value_ints = [-1, {width}]> ()
          image_features = Reshape (pixel_values, shape)
        }}
        """,
    )


def write_genai_config(folder: Path, width: int) -> None:
    """Write `genai_config.json` of a model around the entries of the layout, after its documentation."""
    names = ["inputs_embeds", "attention_mask", "past_key_0", "past_value_0"]
    outputs = ["logits", "present_key_0", "present_value_0"]
    decoder: dict[str, Any] = {
        "filename": "decoder.onnx",
        "session_options": {"provider_options": []},
        "head_size": 1,
        "hidden_size": width,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "inputs": {
            "input_ids": "input_ids",
            "inputs_embeds": "inputs_embeds",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_%d",
            "past_value_names": "past_value_%d",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present_key_%d",
            "present_value_names": "present_value_%d",
        },
    }
    ids = {"bos_token_id": 0, "eos_token_id": [width - 1], "pad_token_id": 0}
    model = ids | {"vocab_size": width, "context_length": 64, "decoder": decoder}
    given = json.loads((folder / "genai_config.embedding.json").read_text())["model"]
    if "decoder" in given:
        stage = {"filename": "decoder.onnx", "inputs": names, "outputs": outputs}
        decoder["pipeline"] = [*given["decoder"]["pipeline"], {"decoder": stage}]
        model["type"] = "decoder-pipeline"
    else:
        vision = {name: {value: value} for name, value in (("inputs", "pixel_values"), ("outputs", "image_features"))}
        model |= given | {"type": "gemma3", "vision": {"filename": "vision.onnx", **vision}}
    search = {"max_length": 64, "do_sample": False}
    (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": search}))


def _write(file: Path, graph: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {graph}')
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, file)
