"""Optional segments and languages, against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, XLMConfig, XLMModel

from preblock.export.outputs import write_graphs
from preblock.export.parity import difference
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.families import FAMILIES
from preblock.models.frontend import FrontEnd
from tests.families.library_models import TransformersModel, model_class, save
from tests.families.published_models import PUBLISHED, VOCABULARY, WIDTH
from tests.models.rejections import rejection

CACHED = ("gpt2", "gpt_neo", "gpt_bigcode", "gptj", "codegen", "ctrl")
FED, LENGTH = 9, 14
RANDOM = np.random.default_rng(0)
IDS, TYPES = RANDOM.integers(3, VOCABULARY, (2, LENGTH)), RANDOM.integers(0, VOCABULARY, (2, LENGTH))


def session_of(checkpoint: Path, folder: Path, **choices: Any) -> onnxruntime.InferenceSession:
    """Export the front-end with segments."""
    folder.mkdir()
    write_graphs(read_frontend(checkpoint, segments=True, **choices), folder)
    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, begin: int, end: int, **indices: NDArray[np.int64]) -> NDArray[Any]:
    feeds = {"input_ids": IDS[:, begin:end], "offset": np.array([begin])}
    vectors: NDArray[Any] = session.run(None, feeds | {name: index[:, begin:end] for name, index in indices.items()})[0]
    return vectors


def continued(model: TransformersModel) -> list[NDArray[Any]]:
    """Return the input of the first block of the library's model: 9 tokens, then 5 more with a cache."""
    seen, cache = [], None
    for part in (slice(0, FED), slice(FED, LENGTH)):
        given = {"input_ids": torch.from_numpy(IDS[:, part]), "token_type_ids": torch.from_numpy(TYPES[:, part])}
        with torch.inference_mode(), model.first_block_inputs() as vectors:
            cache = model.whole(**given, cache=cache, use_cache=True).cache
        seen.append(vectors[0].float().numpy())
    return seen


CASES = [
    *((name, torch.float32) for name in (*CACHED, "openai-gpt")),
    ("gpt2", torch.bfloat16),
    ("ctrl", torch.bfloat16),
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_segment_vectors_of_token_table_match_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(name, tmp_path / "checkpoint", dtype)
    session = session_of(tmp_path / "checkpoint", tmp_path / "artifact", arithmetic="source")
    model = TransformersModel(name, model_class(name).from_pretrained(tmp_path / "checkpoint", dtype=dtype).eval())
    expected = model.first_block_input(IDS, token_type_ids=TYPES)
    assert np.array_equal(run(session, 0, LENGTH, token_type_ids=TYPES), expected)
    if name in CACHED:
        for part, (begin, end) in zip(continued(model), ((0, FED), (FED, LENGTH)), strict=True):
            assert np.array_equal(run(session, begin, end, token_type_ids=TYPES), part)


def test_segments_are_off_by_default_and_for_few_families(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    assert read_frontend(tmp_path).config.indices == {}
    assert read_frontend(tmp_path, segments=True).config.indices == {"token_type_ids": VOCABULARY}
    allowed = ", ".join(sorted(("xlm", "openai-gpt", *CACHED), key=list(FAMILIES).index))
    for name in ("bert", "llama"):
        save(name, tmp_path)
        message = f"--segments is only for {allowed}, whose segments are token ids; the model is '{name}'"
        assert message in rejection(CheckpointError, read_frontend, tmp_path, segments=True)


def xlm(folder: Path, **values: Any) -> TransformersModel:
    """Save an XLM with random weights, and return it."""
    torch.manual_seed(0)
    model = XLMModel(XLMConfig(**PUBLISHED["xlm"].config, **values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    model.train(False)
    return TransformersModel("xlm", model)


@pytest.mark.parametrize("segments", [False, True])
def test_xlm_languages_are_graph_input(segments: bool, tmp_path: Path) -> None:
    model = xlm(tmp_path / "checkpoint", n_langs=3)
    frontend = FrontEnd.from_data(read_frontend(tmp_path / "checkpoint", segments=segments)).eval()
    (tmp_path / "artifact").mkdir()
    write_graphs(frontend.data(), tmp_path / "artifact")
    indices = {"langs": TYPES % 3} | ({"token_type_ids": TYPES} if segments else {})
    assert list(frontend.config.indices) == list(indices)
    feeds = {"input_ids": IDS, "offset": np.zeros(1, np.int64), "attention_mask": IDS * 0 + 1, **indices}
    session = onnxruntime.InferenceSession(tmp_path / "artifact/model.onnx")
    assert [node.name for node in session.get_inputs()] == ["input_ids", "offset", *indices, "attention_mask"]
    assert difference(session.run(None, feeds)[0], model.first_block_input(IDS, IDS * 0 + 1, **indices))[1] <= 8


def test_xlm_languages_follow_config(tmp_path: Path) -> None:
    xlm(tmp_path, n_langs=3, use_lang_emb=False)
    assert read_frontend(tmp_path).config.indices == {}
    xlm(tmp_path, n_langs=3)
    change(tmp_path, n_langs=4)
    assert "n_langs is 4, the tensors have 3" in rejection(CheckpointError, read_frontend, tmp_path)


def test_clip_text_model_with_projection_is_read(tmp_path: Path) -> None:
    """Its file has another layout than that of the model without."""
    torch.manual_seed(0)
    model = CLIPTextModelWithProjection(CLIPTextConfig(**PUBLISHED["clip_text_model"].config))
    model.save_pretrained(tmp_path)
    assert "text_model.embeddings.token_embedding.weight" in load_file(tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = model.get_submodule("text_model.embeddings")(torch.from_numpy(IDS))
        assert torch.equal(FrontEnd.from_data(read_frontend(tmp_path)).eval()(torch.from_numpy(IDS)), expected)


def change(folder: Path, **values: Any) -> None:
    """Change keys of `config.json`."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def test_clip_text_side_reads_text_config(tmp_path: Path) -> None:
    save("clip/text", tmp_path)
    message = "--side is missing, but a model of type 'clip' needs one of vision, text"
    assert message in rejection(CheckpointError, read_frontend, tmp_path)
    change(tmp_path, hidden_size=7)
    expected = read_frontend(tmp_path, "text").config
    change(tmp_path, text_config={"hidden_size": 7}, text_config_dict={"hidden_size": WIDTH, "pad_token_id": 1})
    assert read_frontend(tmp_path, "text").config == expected
    change(tmp_path, text_config_dict=None)
    for value, message in (
        ({"hidden_size": 7}, "hidden_size is 7, the tensors have 32"),
        ([7], "text_config is [7], expected an object"),
        (None, "text_config is missing, expected an object"),
    ):
        change(tmp_path, text_config=value)
        assert message in rejection(CheckpointError, read_frontend, tmp_path, "text")
