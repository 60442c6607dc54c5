"""Reading static embedding models. Oracles: model2vec, and wordllama on its published table."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model2vec import StaticModel
from safetensors.numpy import load_file, save_file

from preblock.models.checkpoints.static_families import find_static
from preblock.models.checkpoints.static_reader import StaticModel as Read
from preblock.models.checkpoints.static_reader import read_static, static_files_needed
from preblock.models.checkpoints.weight_files import CheckpointError
from tests.support.paths import CHECKPOINTS
from tests.support.static_models import load_wordllama, make_table, save_bag, save_mapped, save_plain

TEXT = "hello abc world jih"


def read(folder: Path) -> Read:
    layout = find_static(folder)
    assert layout is not None
    return read_static(folder, layout)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_token_vectors_match_model2vec(dtype: str, tmp_path: Path) -> None:
    library = StaticModel.from_pretrained(save_plain(tmp_path, dtype))
    ids = torch.tensor(library.tokenize([TEXT]))
    with torch.inference_mode():
        found = read(tmp_path).frontend.eval()(ids)[0]
    assert np.array_equal(found.numpy(), library.encode_as_sequence(TEXT).astype(np.float32))


def test_mapped_and_weighted_vectors_match_model2vec(tmp_path: Path) -> None:
    library = StaticModel.from_pretrained(save_mapped(tmp_path))
    ids = torch.tensor(library.tokenize([TEXT]))
    with torch.inference_mode():
        found = read(tmp_path).frontend.eval()(ids)[0]
    np.testing.assert_allclose(found.numpy(), library.encode_as_sequence(TEXT), rtol=2e-7)  # its weights are float64


def test_normalization_limit_and_unknown_id_are_read(tmp_path: Path) -> None:
    mapped, plain = read(save_mapped(tmp_path / "mapped")), read(save_plain(tmp_path / "plain"))
    assert (mapped.normalize, mapped.frontend.config.max_len, mapped.ignored_ids) == (True, 8, (1,))
    assert (plain.normalize, plain.frontend.config.max_len, plain.ignored_ids) == (False, None, (1,))


def test_model2vec_without_max_length_uses_default(tmp_path: Path) -> None:
    save_plain(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "model2vec"}')
    assert read(tmp_path).frontend.config.max_len == StaticModel.from_pretrained(tmp_path).max_length == 512


def test_model2vec_without_model_type_is_recognized(tmp_path: Path) -> None:
    assert read(save_plain(tmp_path, config={})).frontend.config.family == "model2vec"


@pytest.mark.parametrize("part", ["0_StaticEmbedding", ""])
@pytest.mark.parametrize("further", [(), ("Normalize",)])
def test_sentence_transformers_folder_is_read(part: str, further: tuple[str, ...], tmp_path: Path) -> None:
    found = read(save_bag(tmp_path, *further, part=part))
    assert (found.normalize, found.ignored_ids, found.frontend.config.max_len) == (bool(further), (), None)
    assert np.array_equal(found.frontend.tokens.weight.detach().numpy(), make_table())
    layout = find_static(tmp_path)
    assert layout is not None
    assert all((tmp_path / name).is_file() for name in static_files_needed(layout))


def test_tokenizer_truncation_sets_max_len(tmp_path: Path) -> None:
    file = save_bag(tmp_path) / "0_StaticEmbedding" / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"truncation": truncation}))
    assert read(tmp_path).frontend.config.max_len == 5


def test_unigram_unknown_id_is_ignored_id(tmp_path: Path) -> None:
    file = save_plain(tmp_path) / "tokenizer.json"
    document = json.loads(file.read_bytes())
    document["model"] = {"type": "Unigram", "unk_id": 2, "vocab": [["a", 0.0], ["b", 0.0], ["<unk>", 0.0]]}
    file.write_text(json.dumps(document))
    assert read(tmp_path).ignored_ids == (2,)


@pytest.mark.parametrize("folder", ["nothing", "a Transformer first"])
def test_find_static_in_other_folder_returns_none(folder: str, tmp_path: Path) -> None:
    if folder == "a Transformer first":
        modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert find_static(tmp_path) is None


def test_token_vectors_match_wordllama() -> None:
    library = load_wordllama()
    ids = torch.tensor([encoding.ids for encoding in library.tokenize(["Hello, world!"])])
    found = read(CHECKPOINTS / "wordllama")
    assert (found.normalize, found.frontend.config.max_len, found.ignored_ids) == (True, None, ())
    with torch.inference_mode():
        assert np.array_equal(found.frontend.eval()(ids)[0].numpy(), library.embedding[ids[0]])


def test_several_tables_of_wordllama_are_rejected(tmp_path: Path) -> None:
    for name in ("weights/l3_supercat_64.safetensors", "weights/l3_supercat_256.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_static(tmp_path) is None  # without a tokenizer
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers/l3_supercat_tokenizer_config.json").touch()
    with pytest.raises(CheckpointError, match=r"several tables of wordllama \(weights/l3_supercat_256.safetensors, "):
        find_static(tmp_path)


def change_tensors(**changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors") | changed
        save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")

    return change


def change_json(name: str, **changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_bytes()) | changed))

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mapped(tmp_path_factory.mktemp("static") / "mapped")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("model.safetensors"), "no model.safetensors"),
        (remove("tokenizer.json"), "no tokenizer.json"),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            "tokenizer.json: no file of the package tokenizers",
        ),
        (lambda folder: (folder / "config.json").write_text("["), "config.json: Expecting value"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"0"), "model.safetensors: "),
        (change_json("config.json", normalize="yes"), "config.json: normalize is 'yes', understood is true or false"),
        (change_json("config.json", max_length=0), "max_len: got 0, expected 1 or more"),
        (change_tensors(embeddings=None), "no tensor embeddings or embedding.weight"),
        (change_tensors(embeddings=np.zeros((9, 8))), "tensor embeddings is torch.float64, expected torch.float32"),
        (change_tensors(embeddings=np.zeros(9, np.float32)), "embeddings has the shape (9,), expected 2 dimensions"),
        (change_tensors(weights=np.ones(25)), "weights has 25 values, expected 26, one for each id"),
        (change_tensors(weights=np.ones((26, 1))), "weights has the shape (26, 1), expected 1 dimensions"),
        (change_tensors(mapping=np.full(26, 9)), "mapping leads beyond the 9 rows of embeddings"),
        (change_tensors(mapping=np.full(26, -1)), "mapping leads beyond the 9 rows of embeddings"),
        (change_tensors(mapping=np.zeros(26)), "tensor mapping is torch.float64, expected torch.int64, torch.int32"),
        (change_tensors(mapping=None, weights=None), "the tokenizer has the id 25, the tensors end at 8"),
    ],
)
def test_broken_model2vec_folder_is_rejected(
    change: Callable[[Path], None], message: str, mapped: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(mapped, tmp_path / "broken")
    change(folder)
    with pytest.raises(CheckpointError) as error:
        read(folder)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("modules", "settings", "message"),
    [
        (("Dense",), {}, "modules.json: after StaticEmbedding comes Dense, understood is Normalize"),
        (("Normalize", "Dense"), {}, "modules.json: after StaticEmbedding comes Normalize, Dense, understood is Norm"),
        ((), {"default_prompt_name": "query"}, "default_prompt_name is 'query', understood is null"),
    ],
)
def test_unsupported_sentence_transformers_modules_are_rejected(
    modules: tuple[str, ...], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as error:
        read(save_bag(tmp_path, *modules, **settings))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ('{"a": 1}', "expected a list of modules with a type and a path"),
        ("[1]", "expected a list of modules with a type and a path"),
        ("5", "expected a list of modules with a type and a path"),
        ('[{"type": "x.StaticEmbedding", "path": "../other"}]', "the path '../other' lies outside the folder"),
        ('[{"type": "x.StaticEmbedding", "path": "/etc"}]', "the path '/etc' lies outside the folder"),
    ],
)
def test_malformed_list_of_modules_is_rejected(modules: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(CheckpointError) as error:
        find_static(tmp_path)
    assert message in str(error.value)
