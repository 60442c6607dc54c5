"""Sources and their front-ends."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.export.options import resolve
from preblock.export.source import load_source
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.frontend_data import FrontEndData
from preblock.service.core.errors import Invalid
from preblock.service.core.types import PartsRequest, RowPart, TextRequest
from preblock.service.runtime.model import TokenModel
from tests.families.stems import save
from tests.support import commands
from tests.support.engines import ask_engine, open_engine
from tests.support.permissions import ordinary_user, public_folder
from tests.support.tokenizers import write_tokenizer


def test_load_source_of_folder_reads_checkpoint(tiny_checkpoint: Path) -> None:
    loaded = load_source(resolve(str(tiny_checkpoint)))
    expected = read_frontend(tiny_checkpoint).tensors
    assert isinstance(loaded.frontend, FrontEndData)
    assert all(np.array_equal(tensor, expected[name]) for name, tensor in loaded.frontend.tensors.items())
    assert loaded.record.kind == "folder"
    assert loaded.tokenizer == tiny_checkpoint / "tokenizer.json"


def test_load_source_of_stem_leaves_tokenizer_out(tmp_path: Path) -> None:
    save("whisper", tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json")
    assert load_source(resolve(str(tmp_path), side="encoder")).tokenizer is None
    assert load_source(resolve(str(tmp_path), side="decoder")).tokenizer == tmp_path / "tokenizer.json"


def test_load_source_prefers_folder_to_preset(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-small").symlink_to(tiny_checkpoint)
    loaded = load_source(resolve("gpt2-small"))
    assert loaded.record.kind == "folder"
    assert isinstance(loaded.frontend, FrontEndData)
    assert loaded.frontend.signature.vocab_size == 40


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be changed."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "tiny"))


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000])
def test_invalid_tokenizer_file_is_rejected(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ExportError, match=r"tiny/tokenizer\.json is no tokenizer of the package tokenizers: "):
        load_source(resolve(str(folder)))


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd"])
def test_tokenizer_link_outside_folder_is_rejected(folder: Path, target: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(target)
    with pytest.raises(ExportError, match=rf"tokenizer\.json: a link to {target}, outside the folder"):
        load_source(resolve(str(folder)))


def with_vocabulary(folder: Path, vocabulary: int) -> Path:
    """Cut the token table to the size of a vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"] = tensors["embeddings.word_embeddings.weight"][:vocabulary].clone()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tokenizer_ids_beyond_table_are_rejected(folder: Path) -> None:
    assert load_source(resolve(str(with_vocabulary(folder, 11)))).tokenizer is not None
    with pytest.raises(ExportError) as error:
        load_source(resolve(str(with_vocabulary(folder, 10))))
    assert str(error.value) == (
        f"{folder}/tokenizer.json: the tokenizer gives ids up to 10, but the largest row of the token table is 9; "
        "remove the tokens beyond it, or the file to export without a tokenizer"
    )


def test_added_token_beyond_table_is_refused_in_texts(folder: Path, tmp_path: Path) -> None:
    """Gemma 3 has the token <image_soft_token> with the id 262144, and a table of 262144 rows."""
    file = with_vocabulary(folder, 11) / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<image_soft_token>"])
    tokenizer.save(str(file))
    export(str(folder), "bert", tmp_path / "models")
    with open_engine(tmp_path / "models") as engine:
        model = engine.repository.find("bert")
        assert isinstance(model, TokenModel)
        asyncio.run(ask_engine(engine, model, TextRequest(text=("a b",))))
        for request in (
            TextRequest(text=("a", "a <image_soft_token>")),
            PartsRequest(rows=((RowPart("text[0]", text="a"),), (RowPart("text[1]", text="<image_soft_token>"),))),
        ):
            with pytest.raises(Invalid) as refused:
                asyncio.run(ask_engine(engine, model, request))
            assert str(refused.value) == (
                "text[1]: got the token <image_soft_token> (id 11), expected text without this token: its id is beyond "
                "10, the last one of the model"
            )
            assert refused.value.bad_indices == [1]
        plain = TextRequest(text=("<image_soft_token>",), special_tokens_in_text="plain")
        asyncio.run(ask_engine(engine, model, plain))


def test_token_around_texts_beyond_table_is_rejected(folder: Path) -> None:
    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 40)])
    tokenizer.save(str(file))
    with pytest.raises(ExportError, match="ids up to 40"):
        load_source(resolve(str(folder)))


def test_unreadable_source_reports_permission_denied() -> None:
    with public_folder() as place:
        (place / "private").mkdir(mode=0o700)
        with ordinary_user(), pytest.raises(ExportError, match=r"inner: permission denied"):
            load_source(resolve(f"{place}/private/inner"))


def test_known_family_is_exported_without_transformers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = commands.run(commands.export_without_transformers, tiny_checkpoint, tmp_path)
    assert done.stdout == f"{tmp_path}/m/1\n", done.stderr
