"""Whole exports: the content of an artifact, vectors equal to those of transformers, and exports that fail."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import BertModel, GPT2Config, GPT2Model

import preblock
from preblock.export.errors import ExportError
from preblock.export.exporter import ExportResult, export, export_loaded
from preblock.export.source import LoadedSource
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.embeddings import BertEmbeddings
from preblock.models.frontend import FrontEnd
from preblock.models.modules.stems import PatchConfig, PatchStem
from preblock.models.steps import Norm, Project, Tokens
from preblock.service.artifacts.manifest import Manifest, Resized, Source
from preblock.service.runtime.session import Session
from tests.families.bias_models import save
from tests.models.rejections import rejection
from tests.support import commands
from tests.support.shared import Shared


def test_manifest_describes_inputs_and_outputs(tiny_export: ExportResult) -> None:
    found = json.loads((tiny_export.folder / "manifest.json").read_text())
    sizes = {key: found[key] for key in ("family", "vocab_size", "width", "max_len", "indices", "dtype")}
    assert sizes == {
        "family": "bert",
        "vocab_size": 40,
        "width": 8,
        "max_len": 20,
        "indices": {"token_type_ids": 2},
        "dtype": "float32",
    }
    ids = {"dtype": "int64", "shape": ["batch", "length"]}
    graph = found["graphs"]["model.onnx"]
    assert graph["inputs"] == [
        {"name": "input_ids", **ids},
        {"name": "offset", "dtype": "int64", "shape": ["offsets"]},
        {"name": "token_type_ids", **ids},
    ]
    assert graph["outputs"] == [{"name": "embeddings", "dtype": "float32", "shape": ["batch", "length", 8]}]
    assert found["versions"] == {"preblock": preblock.__version__, "onnx": onnx.__version__}


def test_manifest_holds_sha256_and_size_of_every_file(tiny_export: ExportResult) -> None:
    found = json.loads((tiny_export.folder / "manifest.json").read_text())["files"]
    graphs = ["model.onnx", "token.onnx"]
    assert sorted(found) == sorted([*graphs, "model.onnx.data", "tokenizer.json"])
    for name, record in found.items():
        content = (tiny_export.folder / name).read_bytes()
        assert record == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def test_export_of_same_source_writes_same_bytes(
    tiny_export: ExportResult, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(tiny_checkpoint, tmp_path / "elsewhere" / "copy")
    again = export(str(moved), "another-name", tmp_path / "repository").folder
    for name in ("model.onnx", "model.onnx.data", "manifest.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (tiny_export.folder / name).read_bytes(), name


def test_export_reports_every_step(tiny_checkpoint: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    export(str(tiny_checkpoint), "m", tmp_path, steps.append)
    assert steps[:3] == [
        f"reading {tiny_checkpoint}",
        "writing the graph",
        "proving it equal",
    ]
    proven = [step.partition(" cases")[0] for step in steps[3:]]  # bytes and rate follow, once it takes a second
    for graph in ("model.onnx", "token.onnx"):
        step = f"proving it equal: {graph}: "
        reported = [text for text in proven if text.startswith(step)]
        assert reported == [f"{step}{done} of {len(reported)}" for done in range(1, len(reported) + 1)]
        assert reported


def test_minilm_export_matches_transformers(minilm_checkpoint: Path, tmp_path: Path) -> None:
    session = Session(export(str(minilm_checkpoint), "minilm", tmp_path).folder)
    embeddings = BertModel.from_pretrained(minilm_checkpoint).embeddings.eval()
    generator = np.random.Generator(np.random.PCG64(1))
    for batch, length, offset in ((1, 1, 0), (3, 512, 0), (7, 33, 479), (2, 128, 5)):
        input_ids = generator.integers(0, 30522, (batch, length))
        segments = generator.integers(0, 2, (batch, length))
        found = session.run({"input_ids": input_ids, "offset": np.array([offset]), "token_type_ids": segments})[
            "embeddings"
        ]
        with torch.inference_mode():
            expected = embeddings(torch.from_numpy(input_ids), torch.from_numpy(segments), cache_length=offset).numpy()
        assert np.abs(found - expected).max() <= 2e-6


def test_gpt2_export_matches_block_0_input_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = GPT2Model(GPT2Config(vocab_size=90, n_embd=24, n_positions=40, n_layer=2, n_head=2))
    model.save_pretrained(tmp_path / "source")
    session = Session(export(str(tmp_path / "source"), "gpt", tmp_path / "repository").folder)
    model.train(False)
    caught: list[torch.Tensor] = []
    model.h[0].register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    input_ids, past = torch.randint(90, (3, 40)), None
    for begin, end in ((0, 7), (7, 8), (8, 9), (9, 40)):
        with torch.inference_mode():
            past = model(input_ids[:, begin:end], cache=past, use_cache=True).cache
        for offset in (np.array([begin]), np.full(3, begin)):
            found = session.run({"input_ids": input_ids[:, begin:end].numpy(), "offset": offset})["embeddings"]
            assert np.array_equal(found, caught[-1].numpy())


def test_equal_weights_are_all_stored(tmp_path: Path) -> None:
    steps = (Tokens(rows=30, width=8), Norm(eps=1e-5), Project(width=8), Project(width=8))
    frontend = FrontEnd(FrontEndConfig(family="twins", steps=steps, max_len=20))
    for name in ("norm.bias", "project.bias", "project2.bias"):
        torch.nn.init.zeros_(frontend.get_parameter(name))
    frontend.get_parameter("project2.weight").data = frontend.get_parameter("project.weight").data.clone()
    exported = export_loaded(LoadedSource(frontend.data(), Source(kind="module")), "m", tmp_path)
    assert verify(exported.folder) == exported.parity


def test_resized_max_len_is_recorded_in_manifest(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"max_len": 40}, "resize: got nothing, expected truncate"),
        ({"max_len": 40, "resizing": "truncate"}, "length: got 40, expected 1 to 20"),
    ):
        assert message in rejection(ExportError, export, str(tiny_checkpoint), "m", tmp_path, **options)
    exported = export(str(tiny_checkpoint), "m", tmp_path, max_len=26, resizing="interpolate")
    assert isinstance(exported.manifest, Manifest)
    assert exported.manifest.max_len == 26
    assert exported.manifest.resized == Resized(from_max_len=20, method="interpolate")
    assert verify(exported.folder) == exported.parity


@pytest.mark.parametrize(
    ("weight", "value", "place", "dtype"),
    [
        ("tokens.weight", float("inf"), "row", "float32"),
        ("norm.bias", float("nan"), "element", "float32"),
        ("norm.bias", float("nan"), "element", "int8"),
    ],
)
def test_weight_that_is_not_finite_is_named(weight: str, value: float, place: str, dtype: str, tmp_path: Path) -> None:
    frontend = BertEmbeddings(7, 4, 6)
    with torch.no_grad():
        frontend.get_parameter(weight)[3] = value
    frontend.save_frontend(tmp_path / "trained")
    with pytest.raises(
        ExportError, match=rf"differ.*; {weight}: got NaN or infinity in {place} 3, expected finite numbers$"
    ):
        export(str(tmp_path / "trained"), "m", tmp_path / "models", dtype=dtype)
    assert not (tmp_path / "models" / "m").exists()


@pytest.mark.parametrize(
    ("room", "dtype"),
    [(2**8, "float32"), (2**26 + 1, "float32"), (2**20, "int8")],  # for the graph, for parts of the tables
)
def test_export_on_full_disk_fails_and_leaves_no_files(
    large_checkpoint: Path, tmp_path: Path, room: int, dtype: str
) -> None:
    arguments = ("export", large_checkpoint, "--name", "m", "--repository", tmp_path, "--dtype", dtype)
    done = commands.run(commands.preblock, *arguments, room=room)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"preblock: {tmp_path}: File too large"
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Path, shared: Shared) -> list[ExportResult]:
    """A BERT with segments and a T5 with a bias."""

    def fill(root: Path) -> list[ExportResult]:
        save("t5/decoder", root / "t5")
        return [export(str(tiny_checkpoint), "bert", root), export(str(root / "t5"), "t5", root, side="decoder")]

    return shared.build("described", fill)


def test_onnxruntime_metadata_holds_limits(exported: list[ExportResult]) -> None:
    bert, t5 = (onnxruntime.InferenceSession(artifact.folder / "model.onnx").get_modelmeta() for artifact in exported)
    assert bert.custom_metadata_map == {
        "preblock.family": "bert",
        "preblock.vocab_size": "40",
        "preblock.max_len": "20",
        "preblock.indices.token_type_ids": "2",
    }
    assert t5.custom_metadata_map == {"preblock.family": "t5/decoder", "preblock.vocab_size": "50"}
    assert (bert.producer_name, bert.graph_name) == ("preblock", "model")


def test_onnxruntime_metadata_of_stem_holds_sizes(tmp_path: Path) -> None:
    stem = PatchStem(PatchConfig(family="vit", width=4, channels=1, image_size=8, patch_size=4))
    torch.nn.init.zeros_(stem.positions)
    artifact = export_loaded(LoadedSource(stem, Source(kind="module")), "vit", tmp_path)
    found = onnxruntime.InferenceSession(artifact.folder / "model.onnx").get_modelmeta().custom_metadata_map
    assert found == {"preblock.family": "vit", "preblock.image_size": "8", "preblock.patch_size": "4"}
