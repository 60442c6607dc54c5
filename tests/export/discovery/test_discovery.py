"""Front-ends of model types without a row, against whole models of transformers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from preblock.cli import app
from preblock.export.discovery.discovery import Discovery, discover, files_discovered
from preblock.export.discovery.errors import DiscoveryError
from preblock.export.discovery.library import library_version
from preblock.export.discovery.refusals import explain
from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.export.verification import verify
from preblock.models.families import FAMILIES
from preblock.service.artifacts.manifest import Manifest
from preblock.service.codecs.output_uses import describe_uses
from tests.families.coverage import differences
from tests.families.tiny_models import head_class, save_whole
from tests.models.rejections import rejection

EXAMPLES = {
    "bert-generation": ["tokens", "positions", "norm"],
    "data2vec-text": ["tokens", "segments", "positions", "norm"],
    "squeezebert": ["tokens", "positions", "segments", "norm"],
    "pegasus_x/encoder": ["tokens", "scale", "positions"],
    "plbart/decoder": ["tokens", "scale", "positions", "norm"],
    "git": ["tokens", "positions", "norm"],
    "helium": ["tokens"],
    "inkling_text": ["tokens", "rms_norm"],
    "nanochat": ["tokens", "rms_norm"],  # without a weight
    "mra": ["tokens", "segments", "positions", "norm"],  # its table of indices is in the file
    "ibert": ["tokens", "segments", "positions", "norm"],
    "chinese_clip/text": ["tokens", "segments", "positions", "norm"],
}
"""Types without a row, one for each way of composing, and the steps of their front-ends."""


def save(model_type: str, folder: Path, **values: object) -> dict[str, object]:
    """Save a tiny model, change `config.json`, and return its content."""
    with torch.enable_grad():
        save_whole(model_type, folder)
    file = folder / "config.json"
    document: dict[str, object] = json.loads(file.read_text()) | values
    file.write_text(json.dumps(document))
    return document


def found(name: str, folder: Path, **values: object) -> Discovery:
    model_type, _, side = name.partition("/")
    return discover(folder, save(model_type, folder, **values), side or None)


@pytest.mark.parametrize("name", EXAMPLES)
def test_discovered_front_end_matches_whole_model(name: str, tmp_path: Path) -> None:
    assert name not in FAMILIES
    discovery = found(name, tmp_path)
    frontend, side = discovery.frontend, name.partition("/")[2] or None
    assert [step.kind for step in frontend.config.steps] == EXAMPLES[name]
    columns = frontend.project.in_features if "project" in EXAMPLES[name] else 0
    assert discovery.parity.allowed_ulp == (0.0 if frontend.config.exact else 8 + 4 * columns**0.5)
    model = head_class(name.partition("/")[0]).from_pretrained(tmp_path).eval()
    part = model.text_model if name == "chinese_clip/text" else model  # the whole model needs an image
    with torch.inference_mode():
        assert max(differences(part, side, frontend)) <= discovery.parity.allowed_ulp


def test_discovered_ids_replaced_by_library_are_unsupported(tmp_path: Path) -> None:
    config = found("gemma4_unified/text", tmp_path).frontend.config
    document = json.loads((tmp_path / "config.json").read_text())
    replaced = {document[f"{kind}_token_id"] for kind in ("image", "audio", "video")}
    assert set(config.refused_ids) == {number for number in replaced if number is not None}


@pytest.mark.parametrize("widen", [True, False])
def test_padding_row_overwritten_at_load_is_stored_as_loaded(widen: bool, tmp_path: Path) -> None:
    """The library writes through `.data`."""
    frontend = discover(tmp_path, save("youtu", tmp_path, pad_token_id=7), widen=widen).frontend
    padding = frontend.config.padding_idx
    assert padding is not None
    assert load_file(tmp_path / "model.safetensors")[TABLE][padding].any()
    loaded = head_class("youtu").from_pretrained(tmp_path).get_parameter(TABLE)
    assert torch.equal(frontend.tokens.weight, loaded)


TABLE = "model.embed_tokens.weight"
DAMAGES: list[tuple[Callable[[Tensor], dict[str, Tensor]], str]] = [
    (lambda table: {TABLE: table[:50].clone()}, "shape (50, 32), config.json makes it (99, 32)"),
    (lambda table: {TABLE: table.double()}, "is float64, expected float32"),
    (lambda _: {}, "the checkpoint lacks"),
    (lambda table: {TABLE: torch.full_like(table, torch.nan)}, "by NaN, infinity"),
    (lambda table: {f"module.{TABLE}": table}, f"the files hold module.{TABLE}; remove 'module.'"),
]


def test_discovery_of_damaged_table_is_rejected(tmp_path: Path) -> None:
    save("helium", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop(TABLE)
    for damage, message in DAMAGES:
        save_file(tensors | damage(table), tmp_path / "model.safetensors")
        assert message in rejection(ExportError, export, str(tmp_path), "m", tmp_path / "repository")
    save("helium", tmp_path, vocab_size=10**15)
    message = "embed_tokens.weight of shape (1000000000000000, 32) does not fit into memory"
    assert message in rejection(ExportError, export, str(tmp_path), "m", tmp_path / "repository")


OWN_CODE = {"AutoModel": "modeling_own.Own"}
REMOTE = "names code inside the checkpoint, which Preblock never runs"
NGRAMS = "is not supported: its vectors depend on the ids before each token"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("helium", {"auto_map": OWN_CODE}, f"auto_map {REMOTE}"),
    ("helium", {"trust_remote_code": OWN_CODE}, f"trust_remote_code {REMOTE}"),
    ("helium", {"model_type": "hellium"}, r"known neither to the family table .*; did you mean helium\?"),
    ("helium", {"model_type": "longcat_flash_ngram", "auto_map": OWN_CODE}, f"'longcat_flash_ngram' {NGRAMS}"),
    # Under this name, the library would read the token table alone.
    (
        "helium",
        {"model_type": "longcat_flash", "ngram_vocab_size_ratio": 78},
        f"'longcat_flash' with ngram_vocab_size_ratio 78 {NGRAMS}",
    ),
    ("canine", {}, r"'canine' is not supported: its vectors depend on hashes of characters \("),
    ("bark", {}, "it is three models, one for each stage of sound"),
    ("speecht5/decoder", {}, "its parts take text and sound alike, as input_values"),
    ("musicgen/decoder", {}, "it takes several channels of audio codes"),
    ("musicgen/encoder", {}, "the checkpoint lacks tensors that the front-end needs, such as text_encoder"),
    ("siglip_vision_model", {}, "takes no input_ids: .* images or sound needs a row of the stem table"),
    ("plbart", {}, "--side: got None, expected for 'plbart': encoder, decoder"),
    ("plbart/text", {}, "--side: got 'text', expected for 'plbart': encoder, decoder"),
]


@pytest.mark.parametrize(("name", "values", "message"), REFUSED)
def test_type_outside_discovery_is_refused(name: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('this code ran')")
    model_type, _, side = name.partition("/")
    document = CONFIG_MAPPING[model_type]().to_dict() | values
    (tmp_path / "config.json").write_text(json.dumps(document, default=str))
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    refusal = rejection(ExportError, export, str(tmp_path), "m", tmp_path / "repository", side=side or None)
    assert re.search(message, refusal)
    assert name.startswith("siglip") or "stem table" not in refusal


def test_table_outside_parameters_and_buffers_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match=r"a table before block 0 is neither a parameter nor a buffer"):
        found("trocr", tmp_path, use_learned_position_embeddings=False)


def test_advice_of_error_is_data_apart_from_its_cause() -> None:
    error = DiscoveryError("it takes: discovery finds nothing", "ask")
    assert str(error) == "it takes: discovery finds nothing: ask"
    assert str(explain("bark", error)).endswith("token ids alone (it takes: discovery finds nothing)")
    assert explain("helium", error) is error


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("lilt", "layout_inputs of layout_embeddings"),  # of bbox: 0 without it
        ("embedding_gemma2/text", "per_layer_input of language_model.embed_tokens"),
    ],
)
def test_further_content_at_block_0_is_rejected(name: str, argument: str, tmp_path: Path) -> None:
    model_type, _, side = name.partition("/")
    save_whole(model_type, tmp_path / "checkpoint")
    with pytest.raises(ExportError, match=f"'{name}' is not supported: .*block 0 takes {argument}"):
        export(str(tmp_path / "checkpoint"), "m", tmp_path, side=side or None)
    alone = export(str(tmp_path / "checkpoint"), "m", tmp_path, side=side or None, tokens_only=True)
    assert alone.manifest.family == f"{name}/tokens"


@pytest.mark.parametrize(
    ("name", "key"),
    [("deepseek_v4", "hc_mult"), ("qwen4_exp_text", "hc_count")],
)
def test_equal_streams_at_block_0_are_stated(name: str, key: str, tmp_path: Path) -> None:
    save_whole(name, tmp_path / "checkpoint")
    manifest = export(str(tmp_path / "checkpoint"), "m", tmp_path).manifest
    assert isinstance(manifest, Manifest)
    assert manifest.front_end is not None
    copies = json.loads((tmp_path / "checkpoint/config.json").read_text())[key]
    assert copies > 1
    assert manifest.front_end["copies"] == copies
    assert f"Each of the {copies} equal streams" in describe_uses(manifest)["embeddings"]
    page = CliRunner().invoke(app, ["inspect", "m", "--repository", str(tmp_path)]).output
    assert f"the input of block 0, which takes each vector {copies} times" in page


def test_artifact_records_transformers_version_of_discovery(tmp_path: Path) -> None:
    save("git", tmp_path / "checkpoint")
    exported = export(str(tmp_path / "checkpoint"), "m", tmp_path)
    assert exported.manifest.source.discovered_with == library_version()
    discovery = exported.parity.discovery
    assert discovery is not None
    assert discovery.allowed_ulp == 8.0
    assert {"from_id": 0, "to_id": 98} in [case.arguments for case in discovery.cases]
    assert verify(exported.folder).discovery == discovery
    assert export(str(tmp_path / "checkpoint"), "small", tmp_path, dtype="int8").parity.discovery is not None


def test_discovery_needs_only_shard_of_token_table(tmp_path: Path) -> None:
    document = save("helium", tmp_path)
    head_class("helium").from_pretrained(tmp_path).save_pretrained(tmp_path, max_shard_size="1KB")
    (tmp_path / "model.safetensors").unlink()
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(files.values()):
        (tmp_path / file).unlink()  # the files need not be there yet
    needed = files_discovered(tmp_path, document)
    assert needed == [files[TABLE]]
    assert len(set(files.values())) > 2


TABLES = ("shared.weight", "embed_tokens.weight", "lm_head.weight")


def save_with_table(model_type: str, table: str, folder: Path, **values: object) -> dict[str, object]:
    """Save a tiny model with the token table under the name `table` alone, and return its changed `config.json`."""
    document = save(model_type, folder, **values)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.endswith(TABLES)]
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(kept | {table: tensors[names[0]]}, folder / "model.safetensors", {"format": "pt"})
    return document


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("model_type", "table"),
    [
        ("mt5", "lm_head.weight"),
        ("plbart", "model.decoder.embed_tokens.weight"),
        ("plbart", "model.encoder.embed_tokens.weight"),
    ],
)
def test_table_under_any_tied_name_is_discovered(model_type: str, table: str, side: str, tmp_path: Path) -> None:
    document = save_with_table(model_type, table, tmp_path)
    model = head_class(model_type).from_pretrained(tmp_path)
    part = model.get_encoder() if side == "encoder" else model.get_decoder()
    expected = part.embed_tokens.weight
    assert torch.equal(discover(tmp_path, document, side).frontend.tokens.weight, expected)


def test_discovery_of_untied_head_alone_is_rejected(tmp_path: Path) -> None:
    document = save_with_table("helium", "lm_head.weight", tmp_path, tie_word_embeddings=False)
    with pytest.raises(DiscoveryError, match="the checkpoint lacks "):
        discover(tmp_path, document)
