"""`preblock convert`: the real engines load each layout, and compute the bits of the artifact."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preblock.export.exporter import export
from preblock.export.layouts.conversion import convert
from preblock.service.artifacts.names import TOKEN_GRAPH
from preblock.service.runtime.runner import Float32
from preblock.service.runtime.session import Session
from tests.clients.client_environments import ask
from tests.clients.model_parts import write_decoder, write_genai_config, write_layers_decoder, write_vision
from tests.families.library_models import TransformersModel, save
from tests.support.artifacts import copy_artifact
from tests.support.paths import ROOT

IDS = [[5, 3, 29], [0, 31, 5]]
PROJECT = ROOT / "tests/clients/transformersjs"
GPT, WIDTH = "gpt-100x32x50", 32
TEXT, LAYERS = "openvino_text_embeddings_model.xml", "openvino_text_embeddings_per_layer_model.xml"
LAYER_IDS = [[3, 89, 90, 40], [7, 7, 12, 0]]
"""The table of layers of the tiny Gemma 3n has 90 rows."""


def look_up(folder: Path, ids: list[list[int]], graph: str = TOKEN_GRAPH) -> Float32:
    (vectors,) = Session(folder, graph=graph).run({"input_ids": np.array(ids), "offset": np.zeros(1, int)}).values()
    return vectors


@pytest.fixture
def gemma(tmp_path: Path) -> tuple[Path, Float32, Float32]:
    """An artifact of Gemma 3n, and the vectors and inputs of layers of transformers for LAYER_IDS."""
    save("gemma3n/text", tmp_path / "gemma")
    text = TransformersModel.load("gemma3n/text", tmp_path / "gemma").whole.language_model
    with torch.inference_mode():
        ids = torch.tensor(LAYER_IDS)
        vectors, layers = text.embed_tokens(ids).numpy(), text.get_per_layer_inputs(ids).numpy()
    return export(str(tmp_path / "gemma"), "gemma", tmp_path / "repository", side="text").folder, vectors, layers


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return copy_artifact(GPT, tmp_path / "repository", "gpt")


def test_openvino_runs_converted_layout_bit_for_bit(artifact: Path, tmp_path: Path) -> None:
    convert(artifact, "openvino", tmp_path / "out")
    found = ask("openvino", "openvino_embeddings.py", str(tmp_path / "out" / TEXT), json.dumps(IDS))
    assert found["inputs"] == [["input", "i64"]]
    assert found["outputs"] == [["inputs_embeds", "f32"]]
    assert found["shape"] == [2, 3, WIDTH]
    assert found["bytes"] == look_up(artifact, IDS).tobytes().hex()


def test_openvino_runs_inputs_of_layers_bit_for_bit(gemma: tuple[Path, Float32, Float32], tmp_path: Path) -> None:
    folder, _, layers = gemma
    convert(folder, "openvino", tmp_path / "out")
    found = ask("openvino", "openvino_embeddings.py", str(tmp_path / "out" / LAYERS), json.dumps(LAYER_IDS))
    assert found["inputs"] == [["input_ids", "i64"]]
    assert found["outputs"] == [["text_embeds_per_layer", "f32"]]
    assert found["shape"] == list(layers.shape) == [2, 4, 3, 16]
    assert found["bytes"] == layers.tobytes().hex()


def test_openvino_looks_up_rows_of_ngrams_bit_for_bit(tmp_path: Path) -> None:
    folder = copy_artifact("ngrams", tmp_path)
    ids, context = np.random.default_rng(0).integers(0, 99, (2, 7)), np.full((2, 2), 2)
    feeds = {"input_ids": ids, "context": context}
    row_ids = Session(folder, graph="ngram.ids.onnx").run(feeds)["ngram_row_ids"]
    found = ask("openvino", "openvino_embeddings.py", str(folder / "ngram.rows.onnx"), json.dumps(row_ids.tolist()))
    expected = Session(folder, graph="ngrams.onnx").run(feeds)["ngram_embeddings"]
    assert found["shape"] == [2, 7, 2, 64]
    assert found["bytes"] == expected.tobytes().hex()


def test_genai_runs_converted_lookup_before_decoder(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    convert(artifact, "ort-genai", folder)
    write_decoder(folder / "decoder.onnx", WIDTH)
    write_genai_config(folder, WIDTH)
    found = ask("onnxruntime-genai", "genai_decoder.py", str(folder), json.dumps(IDS[0]))
    vectors = look_up(artifact, [IDS[0]])
    token = int(vectors[0, -1].argmax())
    step = look_up(artifact, [[token]])
    assert found["steps"] == [[[1, 3, WIDTH], vectors.tobytes().hex()], [[1, 1, WIDTH], step.tobytes().hex()]]
    assert found["ids"] == [*IDS[0], token, int(step.argmax())]


def test_genai_replaces_image_tokens_with_features(artifact: Path, tmp_path: Path) -> None:
    folder, image = tmp_path / "out", 99
    convert(artifact, "ort-genai", folder, image)
    write_decoder(folder / "decoder.onnx", WIDTH)
    write_vision(folder / "vision.onnx", WIDTH)
    write_genai_config(folder, WIDTH)
    prompt = [5, image, image, 3, image, 9]
    features = np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
    expected = look_up(artifact, [prompt])
    expected[0, [1, 2, 4]] = features
    found = ask("onnxruntime-genai", "genai_decoder.py", str(folder), json.dumps(prompt), json.dumps(features.tolist()))
    step = look_up(artifact, [[int(expected[0, -1].argmax())]])
    assert found["steps"] == [[[1, 6, WIDTH], expected.tobytes().hex()], [[1, 1, WIDTH], step.tobytes().hex()]]


def embed_in_javascript(folder: Path, dtype: str) -> Any:
    write_decoder(folder / "onnx/decoder_model_merged.onnx", WIDTH)
    write_vision(folder / "onnx/vision_encoder.onnx", WIDTH)
    text = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 1}
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    return run_javascript("embed.mjs", str(folder), dtype, json.dumps(IDS))


def run_javascript(script: str, *arguments: str) -> Any:
    if not (PROJECT / "node_modules/@huggingface").is_dir() or shutil.which("node") is None:
        pytest.skip("there is no transformers.js; `make clients` installs it")
    command = ["node", str(PROJECT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "fp32"), ("float16", "fp16"), ("int8", "q8"), ("int4", "q4")]
)
def test_transformers_js_runs_converted_layout_bit_for_bit(tmp_path: Path, stored: str, dtype: str) -> None:
    save("llama", tmp_path / "llama")
    folder = export(str(tmp_path / "llama"), "llama", tmp_path / "repository", dtype=stored).folder
    convert(folder, "transformers.js", tmp_path / "out")
    found = embed_in_javascript(tmp_path / "out", dtype)
    vectors = look_up(folder, IDS, "embeddings.onnx")
    assert found == {"shape": [2, 3, WIDTH], "type": "float32", "bytes": vectors.tobytes().hex()}


def test_transformers_js_runs_inputs_of_layers(gemma: tuple[Path, Float32, Float32], tmp_path: Path) -> None:
    folder, vectors, layers = gemma
    out = tmp_path / "out"
    convert(folder, "transformers.js", out)
    write_layers_decoder(out / "onnx/decoder_model_merged.onnx", WIDTH, 3, 16)
    for part in ("vision_encoder", "audio_encoder"):
        write_vision(out / f"onnx/{part}.onnx", WIDTH)
    text = {"model_type": "gemma3n_text", "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8}
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (out / "config.json").write_text(json.dumps(config))
    found = run_javascript("embed_layers.mjs", str(out), json.dumps(LAYER_IDS))
    for name, expected in (("logits", vectors), ("layers", layers)):
        assert found[name] == {
            "shape": list(expected.shape),
            "type": "float32",
            "bytes": expected.tobytes().hex(),
        }
