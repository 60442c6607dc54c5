"""Options and sources of an export, and the suggestions for wrong ones."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preblock.export.errors import ExportError
from preblock.export.options import ExportOptions, default_name, detect_format, parse_source, resolve


def folder_of(parent: Path, **config: Any) -> str:
    """Make a folder with a `config.json` and no weights."""
    (parent / "config.json").write_text(json.dumps(config))
    return str(parent)


def test_options_module_does_not_import_torch() -> None:
    code = "import sys, preblock.export.options; print({'torch', 'huggingface_hub', 'onnx'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gpt2", "'gpt2' is neither a folder nor a preset; did you mean gpt2-small?"),
        ("GPT2-Smal", "'GPT2-Smal' is neither a folder nor a preset; did you mean gpt2-small?"),
        ("x", "'x' is neither a folder nor a preset; known presets: gpt2-small, transformer-base"),
        ("", "the text is empty; name a folder, a preset, or hf:owner/name"),
        (
            "owner/name",
            "no folder owner/name exists; to download it from the hub, prefix it with hf:, as in hf:owner/name",
        ),
        ("./none", "no folder ./none exists"),
        ("a.txt", "a.txt is a file; name its folder, which holds config.json or frontend.toml"),
        ("/none/a", "no folder /none/a exists"),
        ("hf:name", "'hf:name' names no repository of the hub; write hf:owner/name or hf:owner/name@revision"),
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


def test_folder_of_exported_artifact_is_rejected(tiny_repository: Path) -> None:
    for folder in (tiny_repository / "bert", tiny_repository / "bert" / "1"):
        with pytest.raises(ExportError, match="it is an exported artifact already, ready for `preblock serve`"):
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "../x"}, "--name: got '../x', expected 1 to 128 letters"),
        ({"scale": "row"}, "--scale is only for --dtype int8; the dtype is float32"),
        ({"resizing": "truncate"}, "--resize needs --max-len"),
        ({"side": "encoder"}, "--side is only for published checkpoints; gpt2-small is none"),
    ],
)
def test_incompatible_options_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError) as error:
        resolve("gpt2-small", **{"name": "m"} | arguments)
    assert str(error.value).startswith(message)


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
