"""Front-ends of model types without a row, against whole models of transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from preblock.cli import app
from preblock.export.discovery.discovery import Discovery, discover, files_discovered
from preblock.export.discovery.errors import DiscoveryError
from preblock.export.discovery.library import library_version
from preblock.export.discovery.refusals import explain
from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.families import FAMILIES
from preblock.models.steps import RmsNorm
from preblock.service.artifacts.manifest import Manifest
from preblock.service.codecs.output_uses import describe_uses
from tests.families.coverage import differences
from tests.families.tiny_models import MULTIMODAL_ROPE, head_class, save_whole

EXAMPLES = {
    "bert-generation": ["tokens", "positions", "norm"],
    "convbert": ["tokens", "positions", "segments", "norm"],
    "longformer": ["tokens", "positions", "segments", "norm"],
    "data2vec-text": ["tokens", "segments", "positions", "norm"],
    "squeezebert": ["tokens", "positions", "segments", "norm"],
    "pegasus_x/encoder": ["tokens", "scale", "positions"],
    "plbart/decoder": ["tokens", "scale", "positions", "norm"],
    "git": ["tokens", "positions", "norm"],
    "helium": ["tokens"],
    "paligemma/text": ["tokens", "scale"],
    "inkling_text": ["tokens", "rms_norm"],
    "muse_spark_text": ["tokens", "rms_norm"],
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
@pytest.mark.parametrize(
    ("name", "table", "values"),
    [
        ("chinese_clip/text", "text_model.embeddings.word_embeddings.weight", {}),
        ("youtu", "model.embed_tokens.weight", {"pad_token_id": 7}),  # the library writes through `.data`
    ],
)
def test_padding_row_overwritten_at_load_is_stored_as_loaded(
    name: str, table: str, values: dict[str, object], widen: bool, tmp_path: Path
) -> None:
    model_type, _, side = name.partition("/")
    document = save(model_type, tmp_path, **values)
    frontend = discover(tmp_path, document, side or None, widen=widen).frontend
    padding = frontend.config.padding_idx
    assert padding is not None
    assert load_file(tmp_path / "model.safetensors")[table][padding].any()
    loaded = head_class(model_type).from_pretrained(tmp_path).get_parameter(table)
    assert torch.equal(frontend.tokens.weight, loaded)


def test_discovery_uses_weights_of_edited_checkpoint(tmp_path: Path) -> None:
    document = save("helium", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].neg()
    save_file(tensors, tmp_path / "model.safetensors")
    frontend = discover(tmp_path, document).frontend
    assert torch.equal(frontend.tokens.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda table: table[:50].clone(), "shape (50, 32), config.json makes it (99, 32)"),
        (lambda table: table.double(), "is float64, expected float32"),
        (lambda _: None, "the checkpoint lacks"),
        (lambda table: torch.full_like(table, torch.nan), "inf ULP"),
    ],
    ids=["fewer rows", "float64", "missing", "NaN"],
)
def test_discovery_of_damaged_table_is_rejected(edit: object, message: str, tmp_path: Path) -> None:
    document = save("helium", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = edit(tensors.pop("model.embed_tokens.weight"))  # type: ignore[operator]
    save_file(
        tensors if table is None else tensors | {"model.embed_tokens.weight": table}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ExportError) as error:
        export(str(tmp_path), "m", tmp_path / "repository")
    assert message in str(error.value)
    assert document["model_type"] == "helium"


@pytest.mark.parametrize("key", ["auto_map", "trust_remote_code"])
def test_checkpoint_with_remote_code_is_rejected(key: str, tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('this code ran')")
    document = save("helium", tmp_path, **{key: {"AutoModel": "modeling_own.Own"}})
    with pytest.raises(DiscoveryError, match=f"{key} names code inside the checkpoint, which Preblock never runs"):
        discover(tmp_path, document)


def test_unknown_model_type_is_rejected(tmp_path: Path) -> None:
    document = save("helium", tmp_path) | {"model_type": "hellium"}
    with pytest.raises(DiscoveryError, match=r"known neither to the family table .*; did you mean helium\?"):
        discover(tmp_path, document)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model_type": "longcat_flash_ngram", "auto_map": {"AutoModel": "own.Own"}}, "'longcat_flash_ngram'"),
        (
            {"model_type": "longcat_flash", "ngram_vocab_size_ratio": 78},
            "'longcat_flash' with ngram_vocab_size_ratio 78",
        ),
    ],
)
def test_ngram_embeddings_without_library_model_are_rejected(
    changes: dict[str, object], name: str, tmp_path: Path
) -> None:
    """Under the name `longcat_flash`, the library would read the token table alone."""
    document = save("helium", tmp_path) | changes
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ExportError, match=f"{name} is not supported: its vectors depend on the ids before each token"):
        export(str(tmp_path), "m", tmp_path / "repository")


def test_canine_hash_embedding_is_rejected(tmp_path: Path) -> None:
    reason = r"'canine' is not supported: its vectors depend on hashes of characters \(.*HashBucketCodepointEmbedder_0"
    with pytest.raises(DiscoveryError, match=reason):
        found("canine", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bark", "it is three models, one for each stage of sound"),
        ("perceiver", "its blocks take latent vectors"),
        ("speecht5/encoder", "its parts take text and sound alike, as input_values"),
        ("speecht5/decoder", "its parts take text and sound alike, as input_values"),
        ("musicgen/decoder", "it takes several channels of audio codes"),
        ("musicgen/encoder", "the checkpoint lacks tensors that the front-end needs, such as text_encoder"),
    ],
)
def test_type_of_sound_is_refused_with_reason(name: str, message: str, tmp_path: Path) -> None:
    model_type, _, side = name.partition("/")
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=message) as error:
        export(str(tmp_path), "m", tmp_path, side=side or None)
    assert "stem table" not in str(error.value)


def test_advice_of_error_is_data_apart_from_its_cause() -> None:
    error = DiscoveryError("it takes: discovery finds nothing", "ask")
    assert str(error) == "it takes: discovery finds nothing: ask"
    assert str(explain("bark", error)).endswith("token ids alone (it takes: discovery finds nothing)")
    assert explain("helium", error) is error


def test_prefix_of_discovered_table_is_named(tmp_path: Path) -> None:
    save("helium", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=r"the files hold module\.model\.embed_tokens\.weight; remove 'module\.'"):
        export(str(tmp_path), "m", tmp_path)


def test_table_outside_parameters_and_buffers_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match=r"a table before block 0 is neither a parameter nor a buffer"):
        found("trocr", tmp_path, use_learned_position_embeddings=False)


def test_image_model_is_refused_by_its_input(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match=r"takes no input_ids: .* images or sound needs a row of the stem table"):
        found("siglip_vision_model", tmp_path)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("lilt", "layout_inputs of layout_embeddings"),  # of bbox: 0 without it
        ("embedding_gemma2_text", "per_layer_input of embed_tokens"),
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
    [("deepseek_v4", "hc_mult"), ("hy_v4", "hc_mult"), ("hy_v4_vl_text", "hc_mult"), ("qwen4_exp_text", "hc_count")],
)
def test_equal_streams_at_block_0_are_stated(name: str, key: str, tmp_path: Path) -> None:
    save_whole(name, tmp_path / "checkpoint", rope=MULTIMODAL_ROPE if name == "hy_v4_vl_text" else None)
    manifest = export(str(tmp_path / "checkpoint"), "m", tmp_path).manifest
    assert isinstance(manifest, Manifest)
    assert manifest.front_end is not None
    copies = json.loads((tmp_path / "checkpoint/config.json").read_text())[key]
    assert copies > 1
    assert manifest.front_end["copies"] == copies
    assert f"Each of the {copies} equal streams" in describe_uses(manifest)["embeddings"]
    page = CliRunner().invoke(app, ["inspect", "m", "--repository", str(tmp_path)]).output
    assert f"the input of block 0, which takes each vector {copies} times" in page


@pytest.mark.parametrize(("side", "allowed"), [(None, "encoder, decoder"), ("text", "encoder, decoder")])
def test_missing_or_unknown_side_is_rejected(side: str | None, allowed: str, tmp_path: Path) -> None:
    document = save("plbart", tmp_path)
    with pytest.raises(DiscoveryError, match=f"--side: got {side!r}, expected for 'plbart': {allowed}"):
        discover(tmp_path, document, side)


def test_artifact_records_transformers_version_of_discovery(tmp_path: Path) -> None:
    save("git", tmp_path / "checkpoint")
    exported = export(str(tmp_path / "checkpoint"), "m", tmp_path)
    assert exported.manifest.source.discovered_with == library_version()
    discovery = exported.parity.discovery
    assert discovery is not None
    assert discovery.allowed_ulp == 8.0
    assert {"from_id": 0, "to_id": 98} in [case.arguments for case in discovery.cases]
    assert verify(exported.folder).discovery == discovery


@pytest.mark.parametrize(("model_type", "weighted"), [("inkling_text", True), ("nanochat", False)])
def test_rms_norm_of_discovered_model_is_exported(model_type: str, weighted: bool, tmp_path: Path) -> None:
    save(model_type, tmp_path / "checkpoint")
    exported = export(str(tmp_path / "checkpoint"), "m", tmp_path)
    assert isinstance(exported.manifest, Manifest)
    assert exported.manifest.front_end is not None
    norm = FrontEndConfig.from_document(exported.manifest.front_end).steps[1]
    assert isinstance(norm, RmsNorm)
    assert (norm.weight is not None) == weighted
    verify(exported.folder)


def test_discovered_tables_are_stored_as_int8(tmp_path: Path) -> None:
    save("helium", tmp_path / "checkpoint")
    exported = export(str(tmp_path / "checkpoint"), "m", tmp_path, dtype="int8")
    assert isinstance(exported.manifest, Manifest)
    assert exported.manifest.dtype == "int8"
    assert exported.parity.discovery is not None


def test_segments_option_without_family_row_is_rejected(tmp_path: Path) -> None:
    save("helium", tmp_path)
    with pytest.raises(ExportError, match="--segments is only for model types with a row"):
        export(str(tmp_path), "m", tmp_path, segments=True)


def test_tokens_only_export_of_discovered_model_works(tmp_path: Path) -> None:
    save("deepseek_v4", tmp_path / "checkpoint")
    exported = export(str(tmp_path / "checkpoint"), "m", tmp_path, tokens_only=True)
    assert isinstance(exported.manifest, Manifest)
    assert exported.manifest.front_end is not None
    config = FrontEndConfig.from_document(exported.manifest.front_end)
    assert [step.kind for step in config.steps] == ["tokens"]
    assert exported.manifest.family == "deepseek_v4/tokens"
    assert verify(exported.folder).discovery == exported.parity.discovery


def test_tokens_only_export_of_known_family_works(tiny_checkpoint: Path, tmp_path: Path) -> None:
    exported = export(str(tiny_checkpoint), "m", tmp_path, tokens_only=True)
    assert (exported.manifest.family, exported.manifest.width) == ("bert/tokens", 8)
    assert exported.manifest.source.discovered_with is None


@pytest.mark.parametrize(("installed", "expected"), [(True, "False"), (False, "install preblock[discover]")])
def test_transformers_is_imported_for_discovery_only(
    installed: bool, expected: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        f"if not {installed}: sys.modules['transformers'] = None\n"
        "from preblock.export.options import resolve\n"
        "from preblock.export.source import load_source\n"
        "from preblock.export.errors import ExportError\n"
        "try:\n"
        "    load_source(resolve(sys.argv[1]))\n"
        "    print('transformers' in sys.modules)\n"
        "except ExportError as error:\n"
        "    print(error)\n"
    )
    folder = tiny_checkpoint
    if not installed:
        folder = tmp_path
        save("helium", folder)
    result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert expected in result.stdout


def test_discovery_needs_only_shard_of_token_table(tmp_path: Path) -> None:
    document = save("helium", tmp_path)
    head_class("helium").from_pretrained(tmp_path).save_pretrained(tmp_path, max_shard_size="1KB")
    (tmp_path / "model.safetensors").unlink()
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(files.values()):
        (tmp_path / file).unlink()  # the files need not be there yet
    needed = files_discovered(tmp_path, document)
    assert needed == [files["model.embed_tokens.weight"]]
    assert len(set(files.values())) > 2
