"""Sources, options and origins of an export."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import BertModel

from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.export.options import ExportOptions, default_name, detect_format, parse_source, resolve
from preblock.export.origin import SameExport, find_same
from preblock.export.source import load_source
from preblock.models.frontend_data import FrontEndData
from preblock.models.frontend_file import INDEX, WEIGHTS
from preblock.service.artifacts.names import MANIFEST
from preblock.service.core.errors import Invalid
from preblock.service.core.types import PartsRequest, RowPart, TextRequest
from preblock.service.runtime.model import TokenModel
from tests.families.stems import save
from tests.support.engines import ask_engine, open_engine
from tests.support.permissions import ordinary_user, public_folder
from tests.support.static_models import save_bag
from tests.support.tokenizers import write_tokenizer


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
        parts = ((RowPart("text[0]", text="a"),), (RowPart("text[1]", text="<image_soft_token>"),))
        for request in (TextRequest(text=("a", "a <image_soft_token>")), PartsRequest(rows=parts)):
            message = (
                r"^text\[1\]: got the token <image_soft_token> \(id 11\), .* beyond 10, the last one of the model$"
            )
            with pytest.raises(Invalid, match=message) as refused:
                asyncio.run(ask_engine(engine, model, request))
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
        (place / "listed").mkdir(mode=0o744)
        with ordinary_user(), pytest.raises(ExportError, match=r"listed/\S+: permission denied"):
            resolve(f"{place}/listed")


def folder_of(parent: Path, **config: Any) -> str:
    """Make a folder with a `config.json` and no weights."""
    (parent / "config.json").write_text(json.dumps(config))
    return str(parent)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("GPT2", "'GPT2' is neither a folder nor a preset; did you mean gpt2-small?"),
        ("x", "'x' is neither a folder nor a preset; known presets: gpt2-small, transformer-base"),
        ("", "the text is empty; name a folder, a preset, or hf:owner/name"),
        (
            "owner/name",
            "no folder owner/name exists; to download it from the hub, prefix it with hf:, as in hf:owner/name",
        ),
        ("a.txt", "a.txt is a file; name its folder, which holds config.json or frontend.toml"),
        ("/none/a", "no folder /none/a exists"),
        ("hf:name", "'hf:name' names no repository of the hub; write hf:owner/name or hf:owner/name@revision"),
        ("hf:a/b@", "'hf:a/b@' names no repository of the hub; write hf:owner/name or hf:owner/name@revision"),
        ("hf:a/b/c", "'hf:a/b/c' names no repository of the hub; write hf:owner/name or hf:owner/name@revision"),
    ],
)
def test_unknown_source_is_rejected_with_suggestion(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").touch()
    with pytest.raises(ExportError) as error:
        parse_source(source)
    assert str(error.value) == f"SOURCE: {message}"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("0_Transformer/config.json", r"; the model lies in 0_Transformer: export .*/0_Transformer$"),
        ("manifest.json", "; it is an exported artifact already, ready for `preblock serve`$"),
        ("2/manifest.json", "; it is an exported artifact already, ready for `preblock serve`$"),
        ("model.gguf", r", only model\.gguf, a file for other engines"),
        ("model.safetensors", "$"),
        ("model.safetensors.index.json", "$"),
    ],
)
def test_folder_with_model_elsewhere_is_rejected_with_advice(name: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(ExportError, match=rf"neither config\.json nor frontend\.toml{advice}"):
        detect_format(tmp_path, ExportOptions())


@pytest.mark.parametrize("beside_model", [True, False])
def test_folder_with_adapter_is_rejected(beside_model: bool, tmp_path: Path) -> None:
    folder = Path(folder_of(tmp_path, model_type="bert")) if beside_model else tmp_path
    assert not beside_model or detect_format(folder, ExportOptions()) == "checkpoint"
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ExportError, match=r"adapter_config\.json belongs to an adapter .* merge_and_unload\(\)"):
        detect_format(folder, ExportOptions())


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {}, "model_type is missing, expected a name such as 'bert'; `preblock families` lists the known ones"),
        ({"model_type": None}, {}, "model_type is missing, expected a name such as 'bert'"),
        ({"model_type": ["bert"]}, {}, "model_type is ['bert'], expected a name such as 'bert'"),
        ({"model_type": "bart"}, {}, "--side is missing, but a model of type 'bart' needs one of encoder, decoder"),
        ({"model_type": "bart"}, {"side": "vision"}, "--side is 'vision', but a model of type 'bart' needs one of"),
        ({"model_type": "gpt2"}, {"side": "text"}, "--side is only for models with two sides; 'gpt2' has one"),
        ({"model_type": "bert"}, {"segments": True}, "whose segments are token ids; the model is 'bert'"),
        ({"model_type": "helium"}, {"segments": True}, "--segments is only for model types with a row"),
        ({"model_type": "vit"}, {"segments": True}, "--segments is only for front-ends of token ids; a stem is none"),
        ({"model_type": "vit"}, {"arithmetic": "source"}, "--arithmetic is only for front-ends of token ids"),
        ({"model_type": "vit"}, {"max_len": 5}, "--max-len is only for"),
        ({"model_type": "vit"}, {"dtype": "int8"}, "--dtype is only for"),
    ],
)
def test_config_json_alone_suffices_to_reject_model(
    config: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError) as error:
        resolve(folder_of(tmp_path, **config), "m", **options)
    assert message in str(error.value)


def test_incompatible_options_are_rejected() -> None:
    for arguments, message in (
        ({"arithmetic": "source"}, "--arithmetic is only for published checkpoints"),
        ({"segments": True}, "--segments is only for published checkpoints"),
        ({"dtype": "int4", "scale": "row"}, "--scale is only for --dtype int8"),
    ):
        with pytest.raises(ExportError, match=f"^{message}"):
            resolve("gpt2-small", "m", **arguments)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("gpt2-small", "gpt2-small"),
        ("hf:sentence-transformers/all-MiniLM-L6-v2@main", "all-MiniLM-L6-v2"),
        ("folder", "folder"),
        ("my model (v2)", "my-model-v2-"),
        ("__hidden", "hidden"),
        ("x" * 200, "x" * 128),
    ],
)
def test_default_name_is_derived_from_source(
    source: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if ":" not in source and source != "gpt2-small":
        (tmp_path / source).mkdir()
    assert default_name(source) == name


def test_default_name_of_folder_without_letters_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "___").mkdir()
    with pytest.raises(ExportError, match="--name is needed: the name of the source, '___', has no letter"):
        default_name(str(tmp_path / "___"))


def same(source: Path, repository: Path) -> SameExport | None:
    return find_same(resolve(str(source), "m"), repository, lambda _: None, None)


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with an export of the tiny checkpoint."""
    root = tmp_path_factory.mktemp("exported")
    export(str(tiny_checkpoint), "m", root)
    return root


def record(repository: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((repository / "m" / "1" / MANIFEST).read_text())["source"]
    return found


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights": lambda folder: (folder / WEIGHTS).write_bytes(b"other"),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a new file": lambda folder: (folder / "modules.json").write_text("[]"),
    "settings of the tokenizer": lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
    "a pipe": lambda folder: replace_by_pipe(folder / "config.json"),
}


def replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_folder_is_not_the_same(change: str, folder: Path, exported: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text("not read")
    asked = resolve(str(folder), "m"), exported, lambda _: None, tmp_path / "cache"
    for _ in range(2):  # without and with the cache
        assert find_same(*asked) == SameExport(1)
    CHANGES[change](folder)
    assert find_same(*asked) is None


def test_only_newest_export_of_this_release_is_the_same(folder: Path, exported: Path, tmp_path: Path) -> None:
    first = shutil.copytree(exported / "m", tmp_path / "r" / "m") / "1"
    document = json.loads((first / MANIFEST).read_text())
    (first / MANIFEST).write_text(json.dumps(document | {"versions": {"preblock": "0.0.9"}}))
    assert same(folder, tmp_path / "r") is None
    shutil.copytree(exported / "m" / "1", first.with_name("2"))
    assert same(folder, tmp_path / "r") == SameExport(2)
    for version, options in ((3, {"arithmetic": "source"}), (4, {"max_len": 9, "resizing": "truncate"})):
        made = export(str(folder), "m", tmp_path / "r", **options)
        assert (made.folder.name, made.manifest.source.options) == (str(version), options)
        assert made.manifest.source.files == {}
        assert same(folder, tmp_path / "r") is None
    preset = {"kind": "preset", "name": "gpt2-small"}
    for options, found in (({}, SameExport(4)), ({"dtype": "int8"}, None)):
        changed = json.loads((exported / "m/1" / MANIFEST).read_text()) | {"source": preset | {"options": options}}
        (first.with_name("4") / MANIFEST).write_text(json.dumps(changed))
        assert find_same(resolve("gpt2-small", "m"), tmp_path / "r", lambda _: None, None) == found
    (first.with_name("4") / MANIFEST).write_text("{")
    with pytest.raises(ExportError, match=r"m/4: manifest\.json is no JSON file: "):
        same(folder, tmp_path / "r")


def test_unread_shard_may_change(folder: Path, tmp_path: Path) -> None:
    BertModel.from_pretrained(folder).save_pretrained(folder, max_shard_size="1KB")
    (folder / WEIGHTS).unlink()
    export(str(folder), "m", tmp_path / "r")
    shards = {file.name for file in folder.glob("*.safetensors")}
    read = set(record(tmp_path / "r")["files"])  # type: ignore[call-overload]
    assert INDEX in read
    assert shards & read
    for shard in shards - read:
        (folder / shard).unlink()
    assert same(folder, tmp_path / "r") == SameExport(1)
    (folder / min(shards & read)).write_bytes(b"other")
    assert same(folder, tmp_path / "r") is None


def test_static_model_in_subfolder_is_compared(tmp_path: Path) -> None:
    folder = save_bag(tmp_path / "bag")
    export(str(folder), "m", tmp_path / "r")
    assert same(folder, tmp_path / "r") == SameExport(1)
    (weights,) = folder.glob(f"*/{WEIGHTS}")
    weights.write_bytes(b"other")
    assert same(folder, tmp_path / "r") is None
