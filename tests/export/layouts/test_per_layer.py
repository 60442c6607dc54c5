"""Per-layer inputs in layouts. Oracle: `get_per_layer_inputs` of transformers on the same tiny model."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from preblock.export.exporter import export
from preblock.export.layouts.conversion import convert
from tests.families.library_models import TransformersModel, save
from tests.support.shared import Shared

IDS = np.array([[3, 89, 90, 40], [80, 85, 12, 0]])
"""For Gemma 4 these hold an image token and an audio token, 80 and 85; the table of layers of Gemma 3n has 90 rows."""
VOCABULARY = 99
LAYERS = {"gemma3n_text": (3, 16), "gemma3n/text": (3, 16), "gemma4/text": (2, 256)}


@pytest.fixture(scope="module", params=LAYERS)
def model(request: pytest.FixtureRequest, shared: Shared) -> tuple[str, Path, Any]:
    """A name, an artifact, and the text model of transformers."""
    name: str = request.param

    def fill(root: Path) -> None:
        save(name, root / "source")
        export(str(root / "source"), "m", root, side=name.partition("/")[2] or None)

    root = shared.make(f"layered {name}", fill)
    folder = root / "m/1"
    whole = TransformersModel.load(name, root / "source").whole
    return name, folder, whole.language_model if "/" in name else whole


def expected(name: str, text: Any, ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the vectors, and the inputs of layers with padding in place of images and audio, as Gemma4Model has."""
    given = torch.from_numpy(ids)
    padded = torch.where((given == 80) | (given == 85), 0, given) if name == "gemma4/text" else given
    with torch.inference_mode():
        return text.embed_tokens(given).numpy(), text.get_per_layer_inputs(padded).numpy()


def test_transformers_js_graph_has_inputs_of_layers(model: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, folder, text = model
    convert(folder, "transformers.js", tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "onnx/embed_tokens.onnx")
    assert [node.name for node in session.get_inputs()] == ["input_ids"]
    outputs = {node.name: node.shape for node in session.get_outputs()}
    assert outputs == {
        "inputs_embeds": ["batch", "length", 32],
        "per_layer_inputs": ["batch", "length", *LAYERS[name]],
    }
    onnx.checker.check_model(tmp_path / "onnx/embed_tokens.onnx", full_check=True)
    vectors, layers = session.run(["inputs_embeds", "per_layer_inputs"], {"input_ids": IDS})
    wanted = expected(name, text, IDS)
    assert np.array_equal(vectors, wanted[0])
    assert np.array_equal(layers, wanted[1])


def test_openvino_layout_has_table_of_inputs_of_layers(model: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, folder, text = model
    files = convert(folder, "openvino", tmp_path)
    names = ("text_embeddings_model", "text_embeddings_per_layer_model")
    assert [file.name for file in files] == [f"openvino_{name}.{end}" for name in names for end in ("bin", "xml")]
    table = (tmp_path / "openvino_text_embeddings_per_layer_model.bin").read_bytes()
    _, wanted = expected(name, text, np.arange(VOCABULARY)[None])
    assert table == wanted[0].tobytes() + bytes(8)
    root = ElementTree.parse(tmp_path / "openvino_text_embeddings_per_layer_model.xml").getroot()
    ports = [port.attrib.get("names") for port in root.iter("port")]
    assert [port for port in ports if port] == ["input_ids", "text_embeds_per_layer"]
    assert root.find("layers/layer[@name='table']/data").attrib["shape"] == f"99, {LAYERS[name][0]}, {LAYERS[name][1]}"  # type: ignore[union-attr]
