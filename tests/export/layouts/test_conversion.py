"""Layouts of other engines: bits of transformers, names and shapes; wrong requests; interrupted conversions."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModel, EsmConfig, EsmModel, Gemma3TextModel, LlamaModel

from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.export.layouts import conversion
from preblock.export.layouts.conversion import LAYOUTS, convert
from preblock.export.layouts.triton import write_config
from preblock.service.artifacts.names import LAYER_TOKENS_GRAPH
from preblock.service.runtime.session import Session
from tests.export.interruption import interrupt_at
from tests.families.library_models import TransformersModel, save
from tests.families.published_models import PUBLISHED
from tests.support.artifacts import copy_artifact
from tests.support.shared import Shared

IDS = np.array([[5, 3, 29, 3]])


@pytest.fixture(scope="module")
def gemma(shared: Shared) -> tuple[Path, Gemma3TextModel]:
    """An artifact of a random Gemma 3, whose vectors are scaled, and the model."""

    def fill(root: Path) -> None:
        save("gemma3_text", root / "source")
        export(str(root / "source"), "gemma", root)

    root = shared.make("gemma", fill)
    return root / "gemma/1", AutoModel.from_pretrained(root / "source").eval()


@pytest.mark.parametrize(
    ("layout", "graph", "own_scale"),
    [("transformers.js", "onnx/embed_tokens.onnx", True), ("ort-genai", "embedding.onnx", False)],
)
def test_converted_graph_matches_inputs_embeds_bit_for_bit(
    gemma: tuple[Path, Gemma3TextModel], tmp_path: Path, layout: str, graph: str, own_scale: bool
) -> None:
    """Granite of transformers scales given vectors itself; a decoder of the builder of ONNX Runtime GenAI does not."""
    save("granite", tmp_path / "granite")
    granite = AutoModel.from_pretrained(tmp_path / "granite").eval()
    exported = export(str(tmp_path / "granite"), "granite", tmp_path).folder
    scale = 1 if own_scale else granite.embedding_multiplier
    for number, (folder, model, by) in enumerate(((*gemma, 1), (exported, granite, scale))):
        output = tmp_path / "new" / str(number)
        files = convert(folder, layout, output)
        assert all(file.is_file() and file.stat().st_mode & 0o777 == 0o644 for file in files)
        session = onnxruntime.InferenceSession(output / graph)
        assert [node.name for node in session.get_inputs()] == ["input_ids"]
        assert [node.name for node in session.get_outputs()] == ["inputs_embeds"]
        with torch.no_grad():
            expected = model.get_input_embeddings()(torch.from_numpy(IDS)) * by
        assert np.array_equal(session.run(None, {"input_ids": IDS})[0], expected.numpy())


def test_converted_layout_holds_only_needed_weights(tmp_path: Path) -> None:
    folder = copy_artifact("gpt-100x32x50", tmp_path, "gpt")
    convert(folder, "transformers.js", tmp_path / "out")
    assert (tmp_path / "out/onnx/embed_tokens.onnx_data").stat().st_size == 100 * 32 * 4
    (tensor,) = onnx.load(tmp_path / "out/onnx/embed_tokens.onnx", load_external_data=False).graph.initializer
    assert {entry.key: entry.value for entry in tensor.external_data}["location"] == "embed_tokens.onnx_data"


def test_transformers_js_file_name_states_dtype(tmp_path: Path) -> None:
    save("llama", tmp_path / "llama")
    for stored, suffix in (("float16", "_fp16"), ("int8", "_quantized"), ("int4", "_q4")):
        folder = export(str(tmp_path / "llama"), "llama", tmp_path, dtype=stored).folder
        files = convert(folder, "transformers.js", tmp_path / "out")
        assert [file.name for file in files] == [f"embed_tokens{suffix}.onnx", f"embed_tokens{suffix}.onnx_data"]
    folder = export(str(tmp_path / "llama"), "llama", tmp_path, dtype="bfloat16").folder
    with pytest.raises(ExportError, match=r"transformers\.js has no name for tables in bfloat16"):
        convert(folder, "transformers.js", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_openvino_layout_holds_table_of_all_vectors(gemma: tuple[Path, Gemma3TextModel], tmp_path: Path) -> None:
    folder, model = gemma
    graph, table = convert(folder, "openvino", tmp_path)[::-1]
    with torch.no_grad():
        expected = model.get_input_embeddings()(torch.arange(model.config.vocab_size)).numpy()
    assert table.read_bytes() == expected.tobytes() + bytes(8)
    layers = ElementTree.parse(graph).getroot().findall("layers/layer")
    assert [layer.attrib["type"] for layer in layers] == ["Parameter", "Const", "Const", "Gather", "Result"]


def test_edgellm_layout_has_scaled_table(gemma: tuple[Path, Gemma3TextModel], tmp_path: Path) -> None:
    folder, model = gemma
    convert(folder, "edgellm", tmp_path)
    with torch.no_grad():
        table = model.get_input_embeddings()(torch.arange(model.config.vocab_size)).half().numpy()
    found = load_file(tmp_path / "embedding.safetensors")
    assert found.keys() == {"embedding"}
    assert found["embedding"].dtype == np.float16
    assert np.array_equal(found["embedding"], table)


def test_edgellm_layout_of_too_many_positions_is_rejected(tmp_path: Path) -> None:
    save("llama", tmp_path / "source")
    folder = export(str(tmp_path / "source"), "llama", tmp_path, max_len=2**24 + 1).folder
    with pytest.raises(
        ExportError, match=r"^max_len: got 16777217, expected at most 16777216: the cache has a row for"
    ):
        convert(folder, "edgellm", tmp_path)


def test_float16_rotary_outputs_fit_triton_and_not_edgellm(tmp_path: Path) -> None:
    save("llama", tmp_path / "source")
    folder = export(str(tmp_path / "source"), "llama", tmp_path, rotary_dtype="float16").folder
    text = write_config(folder.parent).read_text()
    assert 'name: "rotary_cos" data_type: TYPE_FP16' in text
    assert 'name: "embeddings" data_type: TYPE_FP32' in text
    with pytest.raises(ExportError, match=r"got rotary_cos in float16, expected float32: the cache is float32"):
        convert(folder, "edgellm", tmp_path / "out")


def test_edgellm_layout_with_values_beyond_float16_is_rejected(tmp_path: Path) -> None:
    save("llama", tmp_path / "llama")
    model = LlamaModel.from_pretrained(tmp_path / "llama")
    with torch.no_grad():
        model.embed_tokens.weight[7, 3] = 1e5
    model.save_pretrained(tmp_path / "llama")
    folder = export(str(tmp_path / "llama"), "llama", tmp_path).folder
    with pytest.raises(ExportError, match="the value 100000 of the table is too large for float16"):
        convert(folder, "edgellm", tmp_path / "out")


def test_image_token_beyond_vocabulary_is_rejected(tmp_path: Path) -> None:
    folder = copy_artifact("gpt-100x32x50", tmp_path, "gpt")
    with pytest.raises(ExportError, match="--image-token-id: got 100, expected 0 to 99"):
        convert(folder, "ort-genai", tmp_path / "out", 100)


def test_convert_does_not_overwrite_existing_files(tmp_path: Path) -> None:
    folder, out = copy_artifact("gpt", tmp_path), tmp_path / "out"
    (out / "onnx").mkdir(parents=True)
    (out / "onnx/decoder_model_merged.onnx").write_text("theirs")
    convert(folder, "transformers.js", out)
    before = (out / "onnx/embed_tokens.onnx").read_bytes()
    with pytest.raises(ExportError, match=r"embed_tokens.onnx exists; remove it, or choose another --output"):
        convert(folder, "transformers.js", out)
    assert (out / "onnx/embed_tokens.onnx").read_bytes() == before
    assert (out / "onnx/decoder_model_merged.onnx").read_text() == "theirs"
    assert [entry.name for entry in out.iterdir()] == ["onnx"]
    (tmp_path / "file/onnx").parent.mkdir()
    (tmp_path / "file/onnx").touch()
    with pytest.raises(ExportError, match=r"file/onnx: Not a directory$"):
        convert(folder, "transformers.js", tmp_path / "file")
    assert [entry.name for entry in (tmp_path / "file").iterdir()] == ["onnx"]


def test_convert_of_stem_is_rejected(tmp_path: Path) -> None:
    folder = copy_artifact("vit", tmp_path)
    for layout in LAYOUTS:
        with pytest.raises(ExportError, match="has no token embeddings, so no engine takes them as inputs_embeds"):
            convert(folder, layout, tmp_path / "out")


@pytest.mark.parametrize(
    ("positions", "inputs"),
    [("rotary", "input_ids, attention_mask"), ("absolute", "input_ids, offset, attention_mask")],
)
def test_convert_of_lookup_with_mask_is_rejected(tmp_path: Path, positions: str, inputs: str) -> None:
    """ESM gives block 0 the given vectors as they are: its own hold the mask, and perhaps positions."""
    config = PUBLISHED["esm"].config | {"position_embedding_type": positions}
    EsmModel(EsmConfig(**config)).save_pretrained(tmp_path / "source")
    folder = export(str(tmp_path / "source"), "esm", tmp_path).folder
    for layout in LAYOUTS:
        with pytest.raises(ExportError, match=f"esm: inputs_embeds depends on {inputs}; expected input_ids alone"):
            convert(folder, layout, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_edgellm_layout_without_rotary_has_only_table(tmp_path: Path) -> None:
    folder = copy_artifact("gpt", tmp_path)
    assert [file.name for file in convert(folder, "edgellm", tmp_path / "out")] == ["embedding.safetensors"]


LAYER_IDS = np.array([[3, 89, 90, 40], [80, 85, 12, 0]])
"""For Gemma 4 these hold an image token and an audio token, 80 and 85; the table of layers of Gemma 3n has 90 rows."""
LAYERS = {"gemma3n/text": (3, 16), "gemma4/text": (2, 256)}


@pytest.fixture(scope="module", params=LAYERS)
def layered(request: pytest.FixtureRequest, shared: Shared) -> tuple[str, Path, Any]:
    """A name, an artifact, and the text model of transformers."""
    name: str = request.param

    def fill(root: Path) -> None:
        save(name, root / "source")
        export(str(root / "source"), "m", root, side=name.partition("/")[2] or None)

    root = shared.make(f"layered {name}", fill)
    folder = root / "m/1"
    whole = TransformersModel.load(name, root / "source").whole
    return name, folder, whole.language_model if "/" in name else whole


def expected_layers(name: str, text: Any, ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the vectors, and the inputs of layers with padding in place of images and audio, as Gemma4Model has."""
    given = torch.from_numpy(ids)
    padded = torch.where((given == 80) | (given == 85), 0, given) if name == "gemma4/text" else given
    with torch.inference_mode():
        return text.embed_tokens(given).numpy(), text.get_per_layer_inputs(padded).numpy()


def test_transformers_js_graph_has_inputs_of_layers(layered: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, folder, text = layered
    convert(folder, "transformers.js", tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "onnx/embed_tokens.onnx")
    assert [node.name for node in session.get_inputs()] == ["input_ids"]
    outputs = {node.name: node.shape for node in session.get_outputs()}
    assert outputs == {
        "inputs_embeds": ["batch", "length", 32],
        "per_layer_inputs": ["batch", "length", *LAYERS[name]],
    }
    onnx.checker.check_model(tmp_path / "onnx/embed_tokens.onnx", full_check=True)
    vectors, layers = session.run(["inputs_embeds", "per_layer_inputs"], {"input_ids": LAYER_IDS})
    wanted = expected_layers(name, text, LAYER_IDS)
    assert np.array_equal(vectors, wanted[0])
    assert np.array_equal(layers, wanted[1])


def test_stored_dtype_applies_to_inputs_of_layers(tmp_path: Path) -> None:
    save("gemma4_text", tmp_path / "source")
    folder = export(str(tmp_path / "source"), "m", tmp_path, dtype="int8").folder
    file = convert(folder, "transformers.js", tmp_path / "out")[0]
    (found,) = onnxruntime.InferenceSession(file).run(["per_layer_inputs"], {"input_ids": LAYER_IDS})
    (expected,) = Session(folder, graph=LAYER_TOKENS_GRAPH).run({"input_ids": LAYER_IDS}).values()
    assert np.array_equal(found, expected)


def test_openvino_layout_has_table_of_inputs_of_layers(layered: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, folder, text = layered
    convert(folder, "openvino", tmp_path)
    _, wanted = expected_layers(name, text, np.arange(99)[None])
    table = (tmp_path / "openvino_text_embeddings_per_layer_model.bin").read_bytes()
    assert table == wanted[0].tobytes() + bytes(8)


def test_conversion_interrupted_leaves_all_files_or_none(tmp_path: Path) -> None:
    artifact = copy_artifact("gpt", tmp_path)
    found = set[int]()

    def run() -> None:
        convert(artifact, "openvino", output)

    for line in range(100):
        output = tmp_path / str(line)
        stopped = interrupt_at(line, conversion.__file__, run)
        found.add(sum(path.is_file() for path in output.glob("**/*")))
        if not stopped:
            break
    assert line > 20
    assert found == {0, 2}
