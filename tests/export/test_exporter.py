"""Whole exports: the content of an artifact, and vectors equal to those of transformers."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import BertModel, GPT2Config, GPT2Model

import preblock
from preblock.export import verification
from preblock.export.errors import ExportError
from preblock.export.exporter import ExportResult, export, export_loaded
from preblock.export.source import LoadedSource
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.embeddings import GPT2Embeddings
from preblock.models.frontend import FrontEnd
from preblock.models.steps import Norm, Positions, Project, Tokens
from preblock.service.artifacts.io import read, write
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.parity import ParityReport
from preblock.service.artifacts.records import Resized, Source
from preblock.service.runtime import providers
from preblock.service.runtime.providers import CPU, CUDA
from preblock.service.runtime.session import Session
from tests.support import commands


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return export(str(tiny_checkpoint), "tiny", tmp_path_factory.mktemp("repository"))


@pytest.fixture
def copy(tiny: ExportResult, tmp_path: Path) -> Path:
    """The tiny artifact, to break."""
    return shutil.copytree(tiny.folder, tmp_path / "1")


def test_export_writes_version_folder_with_seven_files(tiny: ExportResult) -> None:
    assert tiny.folder.parts[-2:] == ("tiny", "1")
    assert sorted(path.name for path in tiny.folder.iterdir()) == [
        "manifest.json",
        "model.onnx",
        "model.onnx.data",
        "parity.json",
        "positioned.onnx",
        "token.onnx",
        "tokenizer.json",
    ]


def test_manifest_describes_inputs_and_outputs(tiny: ExportResult) -> None:
    found = json.loads((tiny.folder / "manifest.json").read_text())
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
    assert found["versions"]["preblock"] == preblock.__version__
    assert found["versions"]["torch"] == torch.__version__


def test_manifest_holds_sha256_and_size_of_every_file(tiny: ExportResult) -> None:
    found = json.loads((tiny.folder / "manifest.json").read_text())["files"]
    graphs = ["model.onnx", "positioned.onnx", "token.onnx"]
    assert sorted(found) == sorted([*graphs, "model.onnx.data", "tokenizer.json"])
    for name, record in found.items():
        content = (tiny.folder / name).read_bytes()
        assert record == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def test_manifest_records_source_without_path(tiny: ExportResult, tiny_checkpoint: Path) -> None:
    config = hashlib.sha256((tiny_checkpoint / "config.json").read_bytes()).hexdigest()
    assert tiny.manifest.source == Source(kind="folder", config_sha256=config)
    for name in ("manifest.json", "parity.json"):
        assert "/" not in (tiny.folder / name).read_text()


def test_tokenizer_is_copied_byte_for_byte(tiny: ExportResult, tiny_checkpoint: Path) -> None:
    assert (tiny.folder / "tokenizer.json").read_bytes() == (tiny_checkpoint / "tokenizer.json").read_bytes()


def test_source_without_tokenizer_exports_without_one(tmp_path: Path) -> None:
    loaded = LoadedSource(GPT2Embeddings(7, 4, 6), Source(kind="module"))
    exported = export_loaded(loaded, "m", tmp_path)
    assert not (exported.folder / "tokenizer.json").exists()
    assert "tokenizer.json" not in exported.manifest.files
    assert exported.manifest.source == Source(kind="module")


def test_export_of_same_source_writes_same_bytes(tiny: ExportResult, tiny_checkpoint: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_checkpoint, tmp_path / "elsewhere" / "copy")
    again = export(str(moved), "another-name", tmp_path / "repository").folder
    for name in ("model.onnx", "model.onnx.data", "manifest.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (tiny.folder / name).read_bytes(), name


def test_export_reports_every_step(tiny_checkpoint: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    export(str(tiny_checkpoint), "m", tmp_path, steps.append)
    assert steps[:4] == [
        f"reading {tiny_checkpoint}",
        "tracing the module",
        "writing the graph",
        "proving it equal",
    ]
    proven = [step.partition(" cases")[0] for step in steps[4:]]  # bytes and rate follow, once it takes a second
    for step in ("proving it equal", "proving given positions equal"):
        reported = [text for text in proven if text.startswith(step)]
        assert reported == [f"{step}: {done} of {len(reported)}" for done in range(1, len(reported) + 1)]
        assert reported


def test_preset_is_exported_bit_for_bit(tmp_path: Path) -> None:
    exported = export("transformer-base", "m", tmp_path)
    assert exported.manifest.source == Source(kind="preset", name="transformer-base")
    assert isinstance(exported.manifest, Manifest)
    assert (exported.manifest.vocab_size, exported.manifest.width, exported.manifest.max_len) == (32000, 512, 4096)
    parity = exported.parity.providers["CPUExecutionProvider"]
    assert [output.max_abs for output in parity.outputs.values()] == [0, 0, 0]


def test_minilm_export_matches_transformers(checkpoint: Path, tmp_path: Path) -> None:
    session = Session(export(str(checkpoint), "minilm", tmp_path).folder)
    embeddings = BertModel.from_pretrained(checkpoint).embeddings.eval()
    generator = np.random.Generator(np.random.PCG64(1))
    for batch, length, offset in ((1, 1, 0), (3, 512, 0), (7, 33, 479), (2, 128, 5)):
        input_ids = generator.integers(0, 30522, (batch, length))
        segments = generator.integers(0, 2, (batch, length))
        found = session.run({"input_ids": input_ids, "offset": np.array([offset]), "token_type_ids": segments})[
            "embeddings"
        ]
        with torch.inference_mode():
            expected = embeddings(
                torch.from_numpy(input_ids), torch.from_numpy(segments), past_key_values_length=offset
            ).numpy()
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
            past = model(input_ids[:, begin:end], past_key_values=past, use_cache=True).past_key_values
        for offset in (np.array([begin]), np.full(3, begin)):
            found = session.run({"input_ids": input_ids[:, begin:end].numpy(), "offset": offset})["embeddings"]
            assert np.array_equal(found, caught[-1].numpy())


def test_verify_repeats_parity_of_export(tiny: ExportResult) -> None:
    steps: list[str] = []
    assert verify(tiny.folder, steps.append) == tiny.parity
    assert steps[0] == "checking the hashes"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stand for CUDA."""
    monkeypatch.setattr(providers, "cuda_unavailable_reason", lambda: None)
    monkeypatch.setattr(verification, "open_session", lambda folder, _, graph: Session(folder, graph=graph))


@pytest.mark.usefixtures("cuda")
def test_verify_adds_or_replaces_parity_of_provider(copy: Path, tiny: ExportResult) -> None:
    cpu, cuda = tiny.parity.providers[CPU], verify(copy, provider="cuda").providers[CUDA]
    both = ParityReport(providers={CPU: cpu, CUDA: cuda})
    assert read(ParityReport, copy / "parity.json") == both
    old = cpu.model_copy(update={"torch": "0.1"})
    write(ParityReport(providers={CPU: old, CUDA: cuda}), copy / "parity.json")
    assert verify(copy, provider="cpu").providers == {CPU: cpu}
    assert read(ParityReport, copy / "parity.json") == both
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in tiny.folder.iterdir())
    assert (copy / "parity.json").stat().st_mode & 0o777 == 0o644


def test_verify_does_not_rewrite_unchanged_parity(copy: Path) -> None:
    before = (copy / "parity.json").stat()
    verify(copy)
    after = (copy / "parity.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.usefixtures("cuda")
def test_export_is_proven_on_every_provider(tiny_checkpoint: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    exported = export(str(tiny_checkpoint), "m", tmp_path, steps.append)
    assert list(exported.parity.providers) == [CPU, CUDA]
    assert "proving it equal on CUDAExecutionProvider" in steps


@pytest.mark.skipif(providers.cuda_unavailable_reason() is None, reason="CUDA works here")
def test_verify_without_cuda_device_fails(copy: Path) -> None:
    with pytest.raises(ExportError, match="provider cuda cannot be used: "):
        verify(copy, provider="cuda")


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
@pytest.mark.parametrize("place", [0, -1])
def test_verify_names_file_with_flipped_bit(copy: Path, name: str, place: int) -> None:
    content = bytearray((copy / name).read_bytes())
    content[place] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(ExportError, match=rf"^{name}: got sha256 .*, expected sha256 "):
        verify(copy)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("harm", [Path.unlink, truncate])
def test_verify_names_missing_or_truncated_file(copy: Path, name: str, harm: Callable[[Path], None]) -> None:
    if name == "manifest.json":
        (copy / name).write_text((copy / name).read_text().rstrip())
    harm(copy / name)
    with pytest.raises(ExportError, match=rf"^{name}\b"):
        verify(copy)


def test_export_of_unreadable_source_leaves_no_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"broken: neither model\.safetensors"):
        export(str(broken), "m", tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_invalid_name_is_rejected_before_weights_are_read(tmp_path: Path) -> None:
    steps: list[str] = []
    with pytest.raises(ExportError, match=r"--name: got '\.\./x'"):
        export("gpt2-small", "../x", tmp_path, steps.append)
    assert steps == []


def test_unproven_graph_is_not_published(tmp_path: Path) -> None:
    frontend = GPT2Embeddings(7, 4, 6)
    torch.nn.init.constant_(frontend.tokens.weight, float("inf"))
    with pytest.raises(ExportError, match="differs from its PyTorch module"):
        export_loaded(LoadedSource(frontend, Source(kind="module")), "m", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("room", "dtype"),
    [  # for the graph, for a part of the table, for one more, for a part of the rounded table
        (2**8, "float32"),
        (2**20, "float32"),
        (2**26 + 1, "float32"),
        (2**20, "int8"),
    ],
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


def test_export_keeps_front_end_in_training_mode(tmp_path: Path) -> None:
    frontend = GPT2Embeddings(7, 4, 6).train()
    export_loaded(LoadedSource(frontend, Source(kind="module")), "m", tmp_path)
    assert frontend.training
    assert frontend.dropout.training


def test_computed_positions_are_proven_up_to_max_len(tmp_path: Path) -> None:
    config = FrontEndConfig(
        family="unbounded",
        steps=(Tokens(rows=7, width=6), Positions(table="exact")),
        max_len=2**31,
    )
    exported = export_loaded(LoadedSource(FrontEnd(config), Source(kind="module")), "m", tmp_path)
    parity = exported.parity.providers["CPUExecutionProvider"].outputs["embeddings"]
    cases: list[dict[str, Any]] = [case.arguments for case in parity.cases]
    assert max(case["length"] + max(case["offset"]) for case in cases) == 2**31
    assert parity.max_abs == 0
    assert verify(exported.folder) == exported.parity


def test_resized_max_len_is_recorded_in_manifest(tiny_checkpoint: Path, tmp_path: Path) -> None:
    exported = export(str(tiny_checkpoint), "m", tmp_path, max_len=26, resizing="interpolate")
    assert isinstance(exported.manifest, Manifest)
    assert exported.manifest.max_len == 26
    assert exported.manifest.resized == Resized(from_max_len=20, method="interpolate")
    assert verify(exported.folder) == exported.parity


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 40}, "resize: got None, expected truncate"),
        ({"max_len": 40, "resizing": "truncate"}, "length: got 40, expected 1 to 20"),
        ({"resizing": "truncate"}, "--resize needs --max-len, the new limit of the positions"),
    ],
)
def test_unreachable_max_len_is_rejected(
    tiny_checkpoint: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        export(str(tiny_checkpoint), "m", tmp_path, **options)


@pytest.mark.parametrize(("field", "value"), [("max_len", 5000), ("counts", "mask"), ("width", 16)])
def test_verify_detects_wrong_manifest_field(copy: Path, field: str, value: int | str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {field: value}))
    with pytest.raises(ExportError, match=rf"manifest\.json: {field} is {value!r}, but the artifact has"):
        verify(copy)


def test_verify_detects_wrong_token_graph(copy: Path) -> None:
    model = onnx.load(copy / "token.onnx")
    gather = next(node for node in model.graph.node if node.op_type == "Gather")
    output, gather.output[0] = gather.output[0], "raw"
    model.graph.node.append(onnx.helper.make_node("Neg", ["raw"], [output]))
    onnx.save(model, copy / "token.onnx")
    manifest = json.loads((copy / "manifest.json").read_text())
    content = (copy / "token.onnx").read_bytes()
    manifest["files"]["token.onnx"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ExportError, match="token_embeddings of the graph differs"):
        verify(copy)


def test_equal_weights_are_all_stored(tmp_path: Path) -> None:
    steps = (Tokens(rows=30, width=8), Norm(eps=1e-5), Project(width=8), Project(width=8))
    frontend = FrontEnd(FrontEndConfig(family="twins", steps=steps, max_len=20))
    for name in ("norm.bias", "project.bias", "project2.bias"):
        torch.nn.init.zeros_(frontend.get_parameter(name))
    frontend.get_parameter("project2.weight").data = frontend.get_parameter("project.weight").data.clone()
    exported = export_loaded(LoadedSource(frontend, Source(kind="module")), "m", tmp_path)
    assert verify(exported.folder) == exported.parity
