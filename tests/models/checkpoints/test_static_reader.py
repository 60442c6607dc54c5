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

from preblock.models.checkpoints.static_reader import StaticModel as Read
from preblock.models.checkpoints.static_reader import find_static, read_static, static_files_needed
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.frontend import FrontEnd
from tests.models.rejections import rejection
from tests.support.paths import CHECKPOINTS
from tests.support.static_models import load_wordllama, make_table, save_bag, save_mapped, save_plain

TEXT = "hello abc world jih"


def read(folder: Path) -> Read:
    layout = find_static(folder)
    assert layout is not None
    return read_static(folder, layout)


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "mapped"])
def test_token_vectors_match_model2vec(kind: str, tmp_path: Path) -> None:
    library = StaticModel.from_pretrained(save_mapped(tmp_path) if kind == "mapped" else save_plain(tmp_path, kind))
    ids, expected = torch.tensor(library.tokenize([TEXT])), library.encode_as_sequence(TEXT)
    with torch.inference_mode():
        found = FrontEnd.from_data(read(tmp_path).frontend).eval()(ids)[0]
    # The weights of mapped tokens are float64 in the library.
    np.testing.assert_allclose(found.numpy(), expected.astype(np.float32), rtol=2e-7 if kind == "mapped" else 0)


def test_normalization_limit_and_unknown_id_are_read(tmp_path: Path) -> None:
    mapped, plain = read(save_mapped(tmp_path / "mapped")), read(save_plain(tmp_path / "plain"))
    assert (mapped.normalize, mapped.frontend.config.max_len, mapped.ignored_ids) == (True, 8, (1,))
    assert (plain.normalize, plain.frontend.config.max_len, plain.ignored_ids) == (False, None, (1,))


@pytest.mark.parametrize(("part", "further"), [("0_StaticEmbedding", ()), ("", ("Normalize",))])
def test_sentence_transformers_folder_is_read(part: str, further: tuple[str, ...], tmp_path: Path) -> None:
    found = read(save_bag(tmp_path, *further, part=part))
    assert (found.normalize, found.ignored_ids, found.frontend.config.max_len) == (bool(further), (), None)
    assert np.array_equal(found.frontend.tensors["tokens.weight"], make_table())
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


def test_model2vec_config_without_keys_uses_defaults(tmp_path: Path) -> None:
    assert read(save_plain(tmp_path, config={})).frontend.config.family == "model2vec"
    (tmp_path / "config.json").write_text('{"model_type": "model2vec"}')
    assert read(tmp_path).frontend.config.max_len == StaticModel.from_pretrained(tmp_path).max_length == 512


def test_find_static_in_other_folder_returns_none(tmp_path: Path) -> None:
    assert find_static(tmp_path) is None
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert find_static(tmp_path) is None


def test_token_vectors_match_wordllama() -> None:
    library = load_wordllama()
    ids = torch.tensor([encoding.ids for encoding in library.tokenize(["Hello, world!"])])
    found = read(CHECKPOINTS / "wordllama")
    assert (found.normalize, found.frontend.config.max_len, found.ignored_ids) == (True, None, ())
    with torch.inference_mode():
        assert np.array_equal(FrontEnd.from_data(found.frontend).eval()(ids)[0].numpy(), library.embedding[ids[0]])


def test_wordllama_folder_that_is_a_link_out_is_rejected(tmp_path: Path) -> None:
    for part, name in (("weights", "l3_supercat_64.safetensors"), ("tokenizers", "l3_supercat_tokenizer_config.json")):
        (tmp_path / "other" / part).mkdir(parents=True)
        (tmp_path / "other" / part / name).touch()
    shutil.copytree(tmp_path / "other/weights", tmp_path / "model/weights")
    (tmp_path / "model/tokenizers").symlink_to("../other/tokenizers")
    message = f"{tmp_path}/model: the path 'tokenizers' lies outside the folder"
    assert rejection(CheckpointError, find_static, tmp_path / "model") == message


def test_several_tables_of_wordllama_are_rejected(tmp_path: Path) -> None:
    for name in ("weights/l3_supercat_64.safetensors", "weights/l3_supercat_256.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_static(tmp_path) is None  # without a tokenizer
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers/l3_supercat_tokenizer_config.json").touch()
    message = "several tables of wordllama (weights/l3_supercat_256.safetensors, "
    assert message in rejection(CheckpointError, find_static, tmp_path)


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


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (remove("model.safetensors"), "no model.safetensors"),
    (remove("tokenizer.json"), "no tokenizer.json"),
    (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "tokenizer.json: no file of the package tokenizers",
    ),
    (lambda folder: (folder / "config.json").write_text("["), "config.json: not valid JSON: Expecting value"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"0"), "model.safetensors: "),
    (change_json("config.json", normalize="yes"), "config.json: normalize is 'yes', understood is true or false"),
    (change_json("config.json", max_length=0), "max_len: got 0, expected 1 or more"),
    (change_tensors(embeddings=None), "no tensor embeddings or embedding.weight"),
    (change_tensors(embeddings=np.zeros((9, 8))), "tensor embeddings is float64, expected float32"),
    (change_tensors(embeddings=np.zeros(9, np.float32)), "embeddings has the shape (9,), expected 2 dimensions"),
    (change_tensors(weights=np.ones(25)), "weights has 25 values, expected 26, one for each id"),
    (change_tensors(weights=np.ones((26, 1))), "weights has the shape (26, 1), expected 1 dimensions"),
    (change_tensors(mapping=np.full(26, 9)), "mapping leads beyond the 9 rows of embeddings"),
    (change_tensors(mapping=np.full(26, -1)), "mapping leads beyond the 9 rows of embeddings"),
    (change_tensors(mapping=np.zeros(26)), "tensor mapping is float64, expected int64, int32"),
    (change_tensors(mapping=None, weights=None), "the tokenizer has the id 25, the tensors end at 8"),
]


def test_broken_model2vec_folder_is_rejected(tmp_path: Path) -> None:
    save_mapped(tmp_path / "mapped")
    for number, (change, message) in enumerate(BROKEN):
        folder = shutil.copytree(tmp_path / "mapped", tmp_path / str(number))
        change(folder)
        assert message in rejection(CheckpointError, read, folder)


def test_unsupported_sentence_transformers_modules_are_rejected(tmp_path: Path) -> None:
    modules = "modules.json: after StaticEmbedding comes"
    cases: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        (("Dense",), {}, f"{modules} Dense, understood is Normalize"),
        (("Normalize", "Dense"), {}, f"{modules} Normalize, Dense, understood is Norm"),
        ((), {"default_prompt_name": "query"}, "default_prompt_name is 'query', understood is null"),
    ]
    for number, (further, settings, message) in enumerate(cases):
        assert message in rejection(CheckpointError, read, save_bag(tmp_path / str(number), *further, **settings))


def test_malformed_list_of_modules_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("..")
    for modules, message in (
        *((text, "expected a list of modules with a type and a path") for text in ('{"a": 1}', "[1]", "5")),
        ('[{"type": "x.StaticEmbedding", "path": "../other"}]', "the path '../other' lies outside the folder"),
        ('[{"type": "x.StaticEmbedding", "path": "/etc"}]', "the path '/etc' lies outside the folder"),
        ('[{"type": "x.StaticEmbedding", "path": "link"}]', "the path 'link' lies outside the folder"),
    ):
        (tmp_path / "modules.json").write_text(modules)
        assert message in rejection(CheckpointError, find_static, tmp_path)
