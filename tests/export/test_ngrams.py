"""N-gram embeddings of Qwen4. Oracle: transformers' own module in the same tiny model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from preblock.export.errors import ExportError
from preblock.export.exporter import ExportResult, export
from preblock.export.verification import verify
from preblock.models.checkpoints.reader import files_needed, read_frontend
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_file import write_frontend
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest
from preblock.service.runtime.ngram_ids import NgramIds, open_ngram_ids
from preblock.service.runtime.session import Session
from tests.export.qwen4 import END, LAYERS, WIDTH, random_ids, run_transformers, save_qwen4
from tests.support.shared import Shared


@pytest.fixture(scope="module")
def ngram_checkpoint(shared: Shared) -> Path:
    return shared.build("ngrams checkpoint", save_qwen4)


@pytest.fixture(scope="module")
def exported(ngram_checkpoint: Path, shared: Shared) -> ExportResult:
    return shared.build("ngrams", lambda root: export(str(ngram_checkpoint), "m", root))


def test_module_has_the_rows_of_transformers(ngram_checkpoint: Path) -> None:
    ids = random_ids(4, 40)
    rows, vectors = run_transformers(ngram_checkpoint, [ids])
    frontend = FrontEnd.from_data(read_frontend(ngram_checkpoint)).eval()
    assert np.array_equal(frontend.ngrams.row_ids(torch.from_numpy(ids)).numpy(), rows)
    assert np.array_equal(frontend.ngrams(torch.from_numpy(ids)).detach().numpy(), vectors)
    assert np.array_equal(frontend.ngram_outputs(torch.from_numpy(ids))["ngram_embeddings"].detach().numpy(), vectors)


@pytest.mark.parametrize("changed", [{"ngram_size": 2}, {"ngram_size": 5, "seed": 7}, {"eos_token_id": [98, 3]}])
def test_other_sizes_and_seeds_agree(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = save_qwen4(tmp_path, **changed)
    ids = random_ids(3, 30)
    ids[ids == END] = 98 if "eos_token_id" in changed else END
    rows, _ = run_transformers(folder, [ids])
    assert np.array_equal(FrontEnd.from_data(read_frontend(folder)).ngrams.row_ids(torch.from_numpy(ids)).numpy(), rows)


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


def test_hash_of_the_manifest_has_the_rows_of_transformers(
    ngram_checkpoint: Path, exported: ExportResult, tmp_path: Path
) -> None:
    larger = save_qwen4(tmp_path / "model", ngram_size=5, seed=7)
    for folder, result in ((ngram_checkpoint, exported), (larger, export(str(larger), "m", tmp_path))):
        assert isinstance(result.manifest, Manifest)
        assert result.manifest.history is not None
        runner = open_ngram_ids(result.manifest, Session(result.folder, graph="ngram.ids.onnx"))
        assert isinstance(runner, NgramIds)
        tokens = result.manifest.history.tokens
        for lengths in ((1,) * 12, (7, 5)):
            chunks = np.split(random_ids(3, 12, seed=len(lengths)), np.cumsum(lengths)[:-1], axis=1)
            context, found = np.full((3, tokens), END), list[Any]()
            for chunk in chunks:
                found += runner.run({"input_ids": chunk, "context": context}, ["ngram_row_ids"]).values()
                context = np.concatenate((context, chunk), axis=1)[:, -tokens:]
            expected, _ = run_transformers(folder, chunks)
            assert np.array_equal(np.concatenate(found, axis=1), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_manifest_locates_the_rows_of_each_layer(dtype: str, ngram_checkpoint: Path, tmp_path: Path) -> None:
    folder = export(str(ngram_checkpoint), "m", tmp_path, dtype=dtype).folder
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    tensors = load_file(ngram_checkpoint / "model.safetensors")
    assert len(manifest.ngram_tables) == LAYERS
    for layer, table in enumerate(manifest.ngram_tables):
        prefix = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_"
        expected = torch.cat([tensors[f"{prefix}{shard}.weight"] for shard in range(4)]).to(getattr(torch, dtype))
        (part,) = table.parts
        size = expected.numel() * expected.element_size()
        content = (folder / part.file).read_bytes()[part.begin : part.begin + size]
        assert (table.rows, table.width) == tuple(expected.shape)
        assert content == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_constants_of_many_heads_lie_in_the_data_file(dtype: str, tmp_path: Path) -> None:
    """They have more bytes than a graph holds, so another stored type moves them."""
    folder = save_qwen4(tmp_path / "model", heads_per_ngram=64, ple_embed_dim=256)
    result = export(str(folder), "m", tmp_path, dtype=dtype)
    graph = onnx.load(result.folder / "ngram.ids.onnx", load_external_data=False).graph
    assert any(tensor.external_data for tensor in graph.initializer)
    outputs = result.parity.providers["CPUExecutionProvider"].outputs
    assert outputs["ngram_row_ids"].max_abs == outputs["ngram_embeddings of given rows"].max_abs == 0


def test_graph_of_rows_has_the_embeddings_of_transformers(ngram_checkpoint: Path, exported: ExportResult) -> None:
    rows, expected = run_transformers(ngram_checkpoint, [random_ids(3, 20, seed=6)])
    session = Session(exported.folder, graph="ngram.rows.onnx")
    assert [tensor.name for tensor in session.inputs] == ["ngram_row_ids"]
    assert np.array_equal(session.run({"ngram_row_ids": rows})["ngram_embeddings"], expected)


def test_manifest_describes_output_and_history(exported: ExportResult) -> None:
    assert isinstance(exported.manifest, Manifest)
    assert exported.manifest.shapes["ngram_embeddings"] == (LAYERS, WIDTH)
    assert exported.manifest.exact_rows
    assert exported.manifest.history is not None
    assert exported.manifest.history.model_dump() == {"tokens": 2, "reset_id": END}
    assert [tensor.name for tensor in exported.manifest.graphs["model.onnx"].inputs] == ["input_ids", "offset"]
    outputs = verify(exported.folder).providers["CPUExecutionProvider"].outputs
    assert outputs["ngram_embeddings"].allowed_ulp == 0


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", None), ("int8", "tensor")])
def test_stored_type_applies_to_the_tables(
    dtype: str, scale: str | None, ngram_checkpoint: Path, tmp_path: Path
) -> None:
    result = export(str(ngram_checkpoint), "m", tmp_path, dtype=dtype, scale=scale)
    tables = {f"ngrams.tables.{layer}.weight" for layer in range(LAYERS)}
    assert set(result.parity.storage) == {"tokens.weight", *tables}
    assert verify(result.folder).providers["CPUExecutionProvider"].outputs["ngram_embeddings"].max_abs == 0
    assert isinstance(result.manifest, Manifest)
    assert bool(result.manifest.ngram_tables) == (dtype == "bfloat16")


def test_model_without_ngram_layers_has_no_ngram_output(tmp_path: Path) -> None:
    result = export(str(save_qwen4(tmp_path / "plain", ple_layer_ids=[])), "m", tmp_path)
    assert isinstance(result.manifest, Manifest)
    assert "ngram_embeddings" not in result.manifest.shapes
    assert result.manifest.history is None


def test_description_cannot_hold_ngrams(ngram_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^ngrams: got n-gram embeddings, expected none"):
        write_frontend(tmp_path, read_frontend(ngram_checkpoint))


def test_hub_downloads_the_files_of_all_parts(ngram_checkpoint: Path, tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.ple.ple_embedding.ngram_embedding.shard_3.weight"]
    index = {"weight_map": {name: f"{place}.safetensors" for place, name in enumerate([*names, "lm_head.weight"])}}
    shutil.copy(ngram_checkpoint / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert files_needed(tmp_path) == ["0.safetensors", "1.safetensors"]


PREFIX = "model.layers.0.ple.ple_embedding."


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(PREFIX + name)]:
            del tensors[key]

    return remove


def _add_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors[PREFIX + "layer_multipliers"] += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            _without("ngram_embedding.shard_3"),
            r"ngram_embedding.weight has \d+ rows in 3 parts, expected \d+ rows in 4",
        ),
        (_without("ngram_embedding"), "no tensor .*layers.0.ple.ple_embedding.ngram_embedding.weight"),
        (_add_one, r"layer_multipliers is \[.*\], expected \[.*\], as config.json states"),
    ],
)
def test_damaged_tables_are_refused(
    damage: Callable[[dict[str, torch.Tensor]], None], message: str, ngram_checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(ngram_checkpoint, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=message):
        export(str(folder), "m", tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ngram_size", 1, r"ngrams\.size: got 1, expected 2 to 16"),
        ("ngram_size", "3", r"ngrams\.size: got '3', expected 2 to 16"),
        ("heads_per_ngram", 0, r"ngrams\.heads: got 0, expected 1 or more"),
        ("heads_per_ngram", 2**12, r"ngrams\.heads: got 16384 in all layers, expected at most 4096"),
        ("heads_per_ngram", 3, r"ngrams\.width: got 32, expected a multiple of 6 heads"),
        ("ngram_vocab_size_base", 2**40, r"ngrams\.base: got \d+, expected at most \d+"),
        ("ngram_vocab_size_base", 60, r"rows in 4 parts, expected \d+ rows in 4 parts"),
        ("make_ngram_vocab_size_divisible_by", 0, r"ngrams\.multiple: got 0, expected 1 or more"),
        ("split_ngram_parts", 10**9, r"split_ngram_parts: got 1000000000, expected 1 to 65536"),
        ("seed", 1.5, r"ngrams\.seed: got 1\.5, expected a whole number"),
        ("seed", 99, r"layer_multipliers is"),
        ("ple_layer_ids", [0], r"ngrams\.layers: got \[-1\], expected ascending numbers from 0 on"),
        ("eos_token_id", 99, r"ngrams\.reset_id: got 99, expected 0 to 98"),
        ("eos_token_id", None, r"ngrams\.reset_id: got None, expected a whole number"),
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
