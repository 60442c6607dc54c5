"""N-gram embeddings of Qwen4, in the artifact or in place. Oracles: transformers in the same model, and safetensors."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from preblock.export.errors import ExportError
from preblock.export.exporter import ExportResult, export
from preblock.export.verification import verify
from preblock.models.checkpoints.reader import files_needed, read_frontend
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_file import write_frontend
from preblock.service.artifacts.io import read
from preblock.service.artifacts.manifest import Manifest, NgramTable, TablePart
from preblock.service.artifacts.names import DATA, PARITY
from preblock.service.artifacts.parity import ParityReport
from preblock.service.artifacts.references import describe_check
from preblock.service.runtime.session import Session
from tests.export.qwen4 import (
    END,
    LAYERS,
    SHARDS,
    WIDTH,
    random_ids,
    run_transformers,
    save_qwen4,
)
from tests.families.library_models import save
from tests.support.shared import Shared

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def ngram_checkpoint(shared: Shared) -> Path:
    return shared.build("ngrams checkpoint", save_qwen4)


@pytest.fixture(scope="module")
def exported(ngram_checkpoint: Path, shared: Shared) -> ExportResult:
    return shared.build("ngrams", lambda root: export(str(ngram_checkpoint), "m", root))


@pytest.mark.parametrize("changed", [{}, {"ngram_size": 2}, {"ngram_size": 5, "seed": 7}, {"eos_token_id": [98, 3]}])
def test_other_sizes_and_seeds_agree(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = save_qwen4(tmp_path, **changed)
    ids = random_ids(3, 30)
    ids[ids == END] = 98 if "eos_token_id" in changed else END
    rows, vectors = run_transformers(folder, [ids])
    module = FrontEnd.from_data(read_frontend(folder)).ngrams
    assert np.array_equal(module.row_ids(torch.from_numpy(ids)).numpy(), rows)
    assert np.array_equal(module(torch.from_numpy(ids)).detach().numpy(), vectors)


@pytest.mark.parametrize("lengths", [(1,) * 12, (1, 4, 1, 6)])
def test_graph_continues_like_the_cache_of_transformers(
    lengths: tuple[int, ...], ngram_checkpoint: Path, exported: ExportResult
) -> None:
    ids = random_ids(3, 12, seed=len(lengths))
    ends = np.cumsum(lengths)
    chunks = [ids[:, end - length : end] for end, length in zip(ends, lengths, strict=True)]
    _, expected = run_transformers(ngram_checkpoint, chunks)
    session = Session(exported.folder, graph="ngrams.onnx")
    context, found = np.full((3, 2), END), []
    for chunk in chunks:
        found.append(session.run({"input_ids": chunk, "context": context})["ngram_embeddings"])
        context = np.concatenate((context, chunk), axis=1)[:, -2:]
    assert np.array_equal(np.concatenate(found, axis=1), expected)
    assert expected.shape == (3, 12, LAYERS, WIDTH)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_constants_of_many_heads_lie_in_the_data_file(dtype: str, tmp_path: Path) -> None:
    """They have more bytes than a graph holds, so another stored type moves them."""
    folder = save_qwen4(tmp_path / "model", heads_per_ngram=64, ple_embed_dim=256)
    result = export(str(folder), "m", tmp_path, dtype=dtype)
    graph = onnx.load(result.folder / "ngram.ids.onnx", load_external_data=False).graph
    assert any(tensor.external_data for tensor in graph.initializer)
    outputs = result.parity.providers["CPUExecutionProvider"].outputs
    assert outputs["ngram_row_ids"].max_abs == outputs["ngram_embeddings of given rows"].max_abs == 0


def test_tables_of_a_model_of_images_are_read(tmp_path: Path) -> None:
    save("qwen4_exp/text", tmp_path)
    found, stored = read_frontend(tmp_path, "text").tensors, load_file(tmp_path / FILE)
    for layer in range(LAYERS):
        shards = [stored[f"language_model.layers.{layer}.{SHARDS}{shard}.weight"] for shard in range(4)]
        assert np.array_equal(found[f"ngrams.tables.{layer}.weight"], torch.cat(shards))


def test_description_cannot_hold_ngrams(ngram_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^ngrams: got n-gram embeddings, expected none"):
        write_frontend(tmp_path, read_frontend(ngram_checkpoint))


@pytest.mark.parametrize(
    ("missing", "reference", "message"),
    [
        (f"{SHARDS}3", False, r"ngram_embedding.weight has \d+ rows in 3 parts, expected \d+ rows in 4"),
        (SHARDS, False, "no tensor .*layers.0.ple.ple_embedding.ngram_embedding.weight"),
        (SHARDS, True, "no tensor .*layers.0.ple.ple_embedding.ngram_embedding.weight"),
    ],
)
def test_missing_tables_are_refused(
    missing: str, reference: bool, message: str, ngram_checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(ngram_checkpoint, tmp_path / "copy")
    tensors = load_file(folder / FILE)
    save_file({name: tensor for name, tensor in tensors.items() if missing not in name}, folder / FILE)
    with pytest.raises(ExportError, match=message):
        export(str(folder), "m", tmp_path, reference=reference)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("heads_per_ngram", 0, r"ngrams\.heads: got 0, expected 1 or more"),
        ("heads_per_ngram", 2**12, r"ngrams\.heads: got 16384 in all layers, expected at most 4096"),
        ("ngram_vocab_size_base", 2**40, r"ngrams\.base: got \d+, expected at most \d+"),
        ("make_ngram_vocab_size_divisible_by", 0, r"ngrams\.multiple: got 0, expected 1 or more"),
        ("split_ngram_parts", 10**9, r"split_ngram_parts: got 1000000000, expected 1 to 65536"),
        ("seed", 1.5, r"ngrams\.seed: got 1\.5, expected a whole number"),
        ("seed", 99, r"layer_multipliers is"),
        ("ple_layer_ids", [0], r"ngrams\.layers: got \[-1\], expected ascending numbers from 0 on"),
        ("eos_token_id", 99, r"ngrams\.reset_id: got 99, expected 0 to 98"),
    ],
)
def test_bad_configurations_are_refused(
    key: str, value: Any, message: str, ngram_checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(ngram_checkpoint, tmp_path / "copy")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {key: value}))
    with pytest.raises(ExportError, match=message):
        export(str(folder), "m", tmp_path)


@pytest.fixture(scope="module")
def referenced(ngram_checkpoint: Path, shared: Shared) -> ExportResult:
    return shared.build("referenced", lambda root: export(str(ngram_checkpoint), "m", root, reference=True))


def manifest_of(result: ExportResult) -> Manifest:
    assert isinstance(result.manifest, Manifest)
    return result.manifest


def read_rows(part: TablePart, table: NgramTable) -> torch.Tensor:
    """Return the values of a part, float32 (rows, width), by its place alone."""
    dtype = getattr(torch, table.dtype)
    content = np.fromfile(part.file, np.uint8, part.rows * table.width * dtype.itemsize, offset=part.begin)
    return torch.from_numpy(content).view(dtype).reshape(-1, table.width).float()


def compare_with_transformers(folder: Path, result: ExportResult) -> None:
    """Compare row ids, and the rows at the places in the manifest, bit for bit."""
    ids = random_ids(3, 20)
    expected_rows, expected = run_transformers(folder, [ids])
    session = Session(result.folder, graph="ngram.ids.onnx")
    row_ids: Any = session.run({"input_ids": ids, "context": np.full((3, 2), END)})["ngram_row_ids"]
    assert np.array_equal(row_ids, expected_rows)
    for layer, table in enumerate(manifest_of(result).ngram_tables):
        rows = torch.cat([read_rows(part, table) for part in table.parts])
        assert np.array_equal(rows[torch.from_numpy(row_ids[:, :, layer])].flatten(2).numpy(), expected[:, :, layer])


def test_rows_in_place_are_those_of_transformers(ngram_checkpoint: Path, referenced: ExportResult) -> None:
    compare_with_transformers(ngram_checkpoint, referenced)
    file = ngram_checkpoint / FILE
    content = file.read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    assert {path: record.model_dump() for path, record in manifest_of(referenced).references.items()} == {
        str(file): {
            "bytes": len(content),
            "mtime_ns": file.stat().st_mtime_ns,
            "header_sha256": hashlib.sha256(header).hexdigest(),
            "sha256": None,
        }
    }


def test_artifact_has_no_tables_and_no_graph_over_them(referenced: ExportResult) -> None:
    names = {file.name for file in referenced.folder.iterdir()}
    assert names == {"manifest.json", "parity.json", "model.onnx", "embeddings.onnx", DATA, "ngram.ids.onnx"}
    tokens = load_file(next(iter(manifest_of(referenced).references)))["model.embed_tokens.weight"]
    assert (referenced.folder / DATA).stat().st_size == 4 * tokens.numel()
    assert referenced.parity.providers["CPUExecutionProvider"].outputs["ngram_row_ids"].max_abs == 0


def test_narrow_tables_stay_in_their_type(tmp_path: Path) -> None:
    folder = save_qwen4(tmp_path / "model")
    tensors = load_file(folder / FILE)
    narrowed = {name: tensor.bfloat16() if SHARDS in name else tensor for name, tensor in tensors.items()}
    save_file(narrowed, folder / FILE, {"format": "pt"})
    result = export(str(folder), "m", tmp_path, reference=True, dtype="int8")
    assert {table.dtype for table in manifest_of(result).ngram_tables} == {"bfloat16"}
    assert manifest_of(result).dtype == "int8"
    assert set(result.parity.storage) == {"tokens.weight"}
    compare_with_transformers(folder, result)
    assert verify(result.folder, reference_roots=[tmp_path]).references


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
    change: dict[str, Any], message: str, ngram_checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(ngram_checkpoint, tmp_path / "copy")
    tensors, key = load_file(folder / FILE), f"model.layers.0.{SHARDS}0.weight"
    if "" not in change:
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    for ending, value in change.items():
        tensors[key + ending] = tensors[key].to(value) if isinstance(value, torch.dtype) else value
    save_file(tensors, folder / FILE, {"format": "pt"})
    with pytest.raises(ExportError, match=message):
        export(str(folder), "m", tmp_path, reference=True)


def test_other_sources_are_rejected(ngram_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ngram_checkpoint, tmp_path / "a,b")
    with pytest.raises(ExportError, match=r"--reference: got .*a,b/model.safetensors, expected a path without commas"):
        export(str(folder), "m", tmp_path, reference=True)
    with pytest.raises(ExportError, match="--reference is only for published checkpoints; gpt2-small is none"):
        export("gpt2-small", "m", tmp_path, reference=True)
    for options, message in (
        ({"reference": True}, "--reference is for n-gram tables, and --tokens-only leaves them out"),
        ({"segments": True}, "--segments is for segments, and --tokens-only leaves them out"),
        ({"rotary_length": 9}, "--rotary-length is for rotary outputs, and --tokens-only leaves them out"),
        ({"rotary_layout": "half"}, "--rotary-layout is for rotary outputs, and --tokens-only leaves them out"),
    ):
        with pytest.raises(ExportError, match=message):
            export(str(ngram_checkpoint), "m", tmp_path, tokens_only=True, **options)
    plain = save_qwen4(tmp_path / "plain", ple_layer_ids=[])
    with pytest.raises(ExportError, match="--reference: got a 'qwen4_exp_text' without n-gram tables"):
        export(str(plain), "m", tmp_path, reference=True)


def test_tables_in_several_files_are_referenced(ngram_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "split"
    transformers.Qwen4ExpForCausalLM.from_pretrained(ngram_checkpoint).save_pretrained(folder, max_shard_size="20KB")
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tables = {file for name, file in files.items() if SHARDS in name}
    assert len(tables) > 1
    assert {*files_needed(folder)} == tables | {files["model.embed_tokens.weight"]} < {*files.values()}
    result = export(str(folder), "m", tmp_path, reference=True)
    assert set(manifest_of(result).references) == {str(folder / file) for file in tables}
    compare_with_transformers(ngram_checkpoint, result)


def test_verify_hashes_the_files_and_finds_changes(ngram_checkpoint: Path, tmp_path: Path) -> None:
    source = shutil.copytree(ngram_checkpoint, tmp_path / "copy")
    result = export(str(source), "m", tmp_path, reference=True)
    folder, manifest = result.folder, manifest_of(result)
    assert describe_check(manifest, read(ParityReport, folder / PARITY)) == "header"
    with pytest.raises(ExportError, match=f"{FILE} is outside the folders of the setting reference_roots: no folder"):
        verify(folder)
    expected = {str(source / FILE): hashlib.sha256((source / FILE).read_bytes()).hexdigest()}
    assert verify(folder, reference_roots=[source]).references == expected
    report = read(ParityReport, folder / PARITY)
    assert report.references == expected
    assert describe_check(manifest, report) == "content"
    assert verify(folder, reference_roots=[source]) == report
    _damage(source / FILE)
    with pytest.raises(ExportError, match=rf"{FILE}: got sha256 \w+…, expected \w+…, as an earlier verification found"):
        verify(folder, reference_roots=[source])


def _damage(file: Path) -> None:
    """Change the last byte of a file, and keep its time."""
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_hash_of_a_hub_is_recorded_and_verified(ngram_checkpoint: Path, tmp_path: Path) -> None:
    cache, content = tmp_path / "models--q--w", (ngram_checkpoint / FILE).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    blob = cache / "blobs" / digest
    blob.write_bytes(content)
    (snapshot / FILE).symlink_to(f"../../blobs/{digest}")
    shutil.copy(ngram_checkpoint / "config.json", snapshot)
    result = export(str(snapshot), "m", tmp_path, reference=True)
    assert {path: of.sha256 for path, of in manifest_of(result).references.items()} == {str(blob): digest}
    verify(result.folder, reference_roots=[snapshot])
    _damage(blob)
    with pytest.raises(ExportError, match=r"got sha256 \w+…, expected \w+…, as published"):
        verify(result.folder, reference_roots=[cache])


def test_large_tables_are_neither_copied_nor_hashed(ngram_checkpoint: Path, tmp_path: Path) -> None:
    """The tables of 205 GB, more than most memories, are holes in a sparse file."""
    folder = tmp_path / "large"
    folder.mkdir()
    config = json.loads((ngram_checkpoint / "config.json").read_text())
    config |= {"ngram_vocab_size_base": 100_000_000, "ple_embed_dim": 256, "split_ngram_parts": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = load_file(ngram_checkpoint / FILE)["model.embed_tokens.weight"]
    header: dict[str, Any] = {}
    end, rows = 0, [400_000_136, 400_000_408]
    tables = [(f"layers.{layer}.ple.ple_embedding.ngram_embedding", count, 64) for layer, count in enumerate(rows)]
    for name, count, width in (("embed_tokens", *tokens.shape), *tables):
        begin, end = end, end + 4 * count * width
        header[f"model.{name}.weight"] = {"dtype": "F32", "shape": [count, width], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / FILE).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text + tokens.numpy().tobytes())
        stream.truncate(8 + len(text) + end)
    result = export(str(folder), "m", tmp_path, reference=True)
    assert sum(file.stat().st_size for file in result.folder.iterdir()) < 200_000
    assert (folder / FILE).stat().st_blocks * 512 < 200_000
    assert [table.rows for table in manifest_of(result).ngram_tables] == rows
    assert (result.manifest.source.files, result.manifest.source.options) == ({}, {"reference": True})
