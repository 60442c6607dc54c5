"""Exports that leave n-gram tables in the files of the checkpoint. Oracles: transformers, safetensors, hashlib."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from preblock.export.errors import ExportError
from preblock.export.exporter import ExportResult, export
from preblock.export.verification import verify
from preblock.service.artifacts.io import read
from preblock.service.artifacts.manifest import Manifest, TablePart
from preblock.service.artifacts.names import DATA, PARITY
from preblock.service.artifacts.parity import ParityReport
from preblock.service.artifacts.references import describe_check
from preblock.service.runtime.session import Session
from tests.export.qwen4 import (
    END,
    LAYERS,
    SHARDS,
    WIDTH,
    narrow_tables,
    quantize_tables,
    random_ids,
    run_transformers,
    save_qwen4,
)
from tests.support.shared import Shared

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def reference_checkpoint(shared: Shared) -> Path:
    return shared.build("referenced checkpoint", save_qwen4)


@pytest.fixture(scope="module")
def exported(reference_checkpoint: Path, shared: Shared) -> ExportResult:
    return shared.build("referenced", lambda root: export(str(reference_checkpoint), "m", root, reference=True))


def manifest_of(result: ExportResult) -> Manifest:
    assert isinstance(result.manifest, Manifest)
    return result.manifest


def _read(file: str, begin: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    type_ = getattr(torch, dtype)
    content = np.fromfile(file, np.uint8, int(np.prod(shape)) * type_.itemsize, offset=begin)
    return torch.from_numpy(content).view(type_).reshape(shape).float()


def read_part(part: TablePart, width: int, dtype: str) -> torch.Tensor:
    """Return the values of a part, float32 (rows, width), by its place alone."""
    stored = _read(part.file, part.begin, dtype, (part.rows, width))
    if part.scales is None:
        return stored
    scales = part.scales
    shape = (-(-part.rows // scales.block_rows), -(-width // scales.block_columns))
    factors = _read(scales.file, scales.begin, scales.dtype, shape)
    spread = factors.repeat_interleave(scales.block_rows, 0)[: part.rows]
    return stored * spread.repeat_interleave(scales.block_columns, 1)[:, :width]


def gather(manifest: Manifest, row_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the embeddings (B, L, N, E) of row ids (B, L, N, H), by the places in the manifest alone."""
    layers = []
    for layer, table in enumerate(manifest.ngram_tables):
        rows = torch.cat([read_part(part, table.width, table.dtype) for part in table.parts])
        layers.append(rows[torch.from_numpy(row_ids[:, :, layer])].flatten(2))
    return torch.stack(layers, dim=2).numpy()


def compare_with_transformers(folder: Path, result: ExportResult) -> None:
    """Compare row ids and gathered rows, bit for bit."""
    ids = random_ids(3, 20)
    expected_rows, expected = run_transformers(folder, [ids])
    session = Session(result.folder, graph="ngram.ids.onnx")
    row_ids: Any = session.run({"input_ids": ids, "context": np.full((3, 2), END)})["ngram_row_ids"]
    assert np.array_equal(row_ids, expected_rows)
    found = gather(manifest_of(result), row_ids)
    assert found.shape == (3, 20, LAYERS, WIDTH)
    assert np.array_equal(found, expected)


def test_rows_in_place_are_those_of_transformers(reference_checkpoint: Path, exported: ExportResult) -> None:
    compare_with_transformers(reference_checkpoint, exported)
    file = reference_checkpoint / FILE
    content = file.read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    assert {path: record.model_dump() for path, record in manifest_of(exported).references.items()} == {
        str(file): {
            "bytes": len(content),
            "mtime_ns": file.stat().st_mtime_ns,
            "header_sha256": hashlib.sha256(header).hexdigest(),
            "sha256": None,
        }
    }


def test_artifact_has_no_tables_and_no_graph_over_them(exported: ExportResult) -> None:
    names = {file.name for file in exported.folder.iterdir()}
    assert names == {"manifest.json", "parity.json", "model.onnx", "embeddings.onnx", DATA, "ngram.ids.onnx"}
    tokens = load_file(next(iter(manifest_of(exported).references)))["model.embed_tokens.weight"]
    assert (exported.folder / DATA).stat().st_size == 4 * tokens.numel()
    assert exported.parity.providers["CPUExecutionProvider"].outputs["ngram_row_ids"].max_abs == 0


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_narrow_tables_stay_in_their_type(dtype: str, tmp_path: Path) -> None:
    folder = narrow_tables(save_qwen4(tmp_path / "model"), getattr(torch, dtype))
    result = export(str(folder), "m", tmp_path, reference=True, dtype="int8")
    assert {table.dtype for table in manifest_of(result).ngram_tables} == {dtype}
    assert manifest_of(result).dtype == "int8"
    assert set(result.parity.storage) == {"tokens.weight"}
    compare_with_transformers(folder, result)
    assert verify(result.folder, reference_roots=[tmp_path]).references


@pytest.mark.parametrize("unit", ["row", "block"])
def test_tables_of_float8_keep_their_scales(unit: str, tmp_path: Path) -> None:
    folder = save_qwen4(tmp_path / "model", ple_embed_dim=1040, ngram_vocab_size_base=150)
    values = quantize_tables(folder, unit)
    manifest = manifest_of(export(str(folder), "m", tmp_path, reference=True))
    assert manifest.ngram_tables[0].width == 260
    for layer, table in enumerate(manifest.ngram_tables):
        assert table.dtype == "float8_e4m3fn"
        for shard, part in enumerate(table.parts):
            expected = values[f"model.layers.{layer}.{SHARDS}{shard}.weight"]
            assert torch.equal(read_part(part, table.width, table.dtype), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"_scale": torch.ones(3, 5)},
            r"shard_0.weight_scale is float32 \[3, 5\], expected float32, float16 or bfloat",
        ),
        ({"": torch.float8_e4m3fn}, "shard_0.weight is float8_e4m3fn without scales, expected scales for float8"),
        ({"": torch.float32, "_scale": torch.ones(())}, "shard_0.weight is float32 with scales, expected scales for"),
        ({"": torch.float16}, "shard_0.weight: got the types float16, float32, expected one type for all parts"),
        ({"": torch.int8}, "shard_0.weight is int8, expected float32, float16, bfloat16, float8_e4m3fn"),
        ({"": torch.zeros(60, 9)}, r"shard_0.weight has shape \[60, 9\], expected rows of 8"),
        ({"": torch.zeros(0, 8)}, "shard_0.weight has no rows, expected at least one in each part of a table"),
        ({"": torch.zeros(59, 8)}, "shard_0.weight: got 239 rows in 4 parts, expected 240"),
    ],
)
def test_unsupported_tables_are_rejected(
    change: dict[str, Any], message: str, reference_checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(reference_checkpoint, tmp_path / "copy")
    tensors, key = load_file(folder / FILE), f"model.layers.0.{SHARDS}0.weight"
    if "" not in change:
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    for ending, value in change.items():
        tensors[key + ending] = tensors[key].to(value) if isinstance(value, torch.dtype) else value
    save_file(tensors, folder / FILE, {"format": "pt"})
    with pytest.raises(ExportError, match=message):
        export(str(folder), "m", tmp_path, reference=True)


def test_other_sources_are_rejected(reference_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(reference_checkpoint, tmp_path / "a,b")
    with pytest.raises(ExportError, match=r"--reference: got .*a,b/model.safetensors, expected a path without commas"):
        export(str(folder), "m", tmp_path, reference=True)
    with pytest.raises(ExportError, match="--reference is only for published checkpoints; gpt2-small is none"):
        export("gpt2-small", "m", tmp_path, reference=True)
    with pytest.raises(ExportError, match="--reference is for n-gram tables, and --tokens-only leaves them out"):
        export(str(reference_checkpoint), "m", tmp_path, reference=True, tokens_only=True)
    plain = save_qwen4(tmp_path / "plain", ple_layer_ids=[])
    with pytest.raises(ExportError, match="--reference: got a 'qwen4_exp_text' without n-gram tables"):
        export(str(plain), "m", tmp_path, reference=True)


def test_tables_in_several_files_are_referenced(reference_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "split"
    folder.mkdir()
    shutil.copy(reference_checkpoint / "config.json", folder)
    tensors = load_file(reference_checkpoint / FILE)
    names = {name: f"{'0.ple' in name:d}.safetensors" for name in tensors}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    result = export(str(folder), "m", tmp_path, reference=True)
    assert set(manifest_of(result).references) == {str(folder / file) for file in set(names.values())}
    compare_with_transformers(reference_checkpoint, result)


def test_verify_hashes_the_files(reference_checkpoint: Path, exported: ExportResult, tmp_path: Path) -> None:
    folder = shutil.copytree(exported.folder, tmp_path / "m/1")
    manifest = manifest_of(exported)
    assert describe_check(manifest, read(ParityReport, folder / PARITY)) == "header"
    with pytest.raises(ExportError, match=f"{FILE} is outside the folders of the setting reference_roots: no folder"):
        verify(folder)
    expected = {
        str(reference_checkpoint / FILE): hashlib.sha256((reference_checkpoint / FILE).read_bytes()).hexdigest()
    }
    assert verify(folder, reference_roots=[reference_checkpoint]).references == expected
    report = read(ParityReport, folder / PARITY)
    assert report.references == expected
    assert describe_check(manifest, report) == "content"
    assert verify(folder, reference_roots=[reference_checkpoint]) == report


def _damage(file: Path) -> None:
    """Change the last byte of a file, and keep its time."""
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_hash_of_a_hub_is_recorded_and_verified(reference_checkpoint: Path, tmp_path: Path) -> None:
    cache, content = tmp_path / "models--q--w", (reference_checkpoint / FILE).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    blob = cache / "blobs" / digest
    blob.write_bytes(content)
    (snapshot / FILE).symlink_to(f"../../blobs/{digest}")
    shutil.copy(reference_checkpoint / "config.json", snapshot)
    result = export(str(snapshot), "m", tmp_path, reference=True)
    assert {path: of.sha256 for path, of in manifest_of(result).references.items()} == {str(blob): digest}
    verify(result.folder, reference_roots=[snapshot])
    _damage(blob)
    with pytest.raises(ExportError, match=r"got sha256 \w+…, expected \w+…, as published"):
        verify(result.folder, reference_roots=[cache])


def test_missing_table_is_rejected(reference_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(reference_checkpoint, tmp_path / "copy")
    tensors = load_file(folder / FILE)
    save_file({name: tensor for name, tensor in tensors.items() if SHARDS not in name}, folder / FILE, {"format": "pt"})
    with pytest.raises(ExportError, match=r"no tensor layers.0.ple.ple_embedding.ngram_embedding.weight"):
        export(str(folder), "m", tmp_path, reference=True)
