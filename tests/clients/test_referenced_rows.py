"""A server of tables in the files of their source. Oracles: transformers for row ids, torch for float8 with scales."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import preblock
from preblock.export.exporter import export
from tests.export.qwen4 import LAYERS, SHARDS, quantize_tables, random_ids, run_transformers, save_qwen4
from tests.support.servers import serve

IDS, ROWS, ROW_IDS = random_ids(2, 9, seed=3), "ngram_embeddings", "ngram_row_ids"


@pytest.mark.parametrize("unit", ["tensor", "row", "block"])
def test_referenced_float8_tables_are_scaled(unit: str, tmp_path: Path) -> None:
    folder = save_qwen4(tmp_path / "model", ple_embed_dim=1040, ngram_vocab_size_base=150)
    values = quantize_tables(folder, unit)
    export(str(folder), "m", tmp_path / "repository", reference=True)
    with (
        serve(tmp_path / "repository", "--reference-roots", str(folder)) as server,
        preblock.connect(server.address) as client,
    ):
        outputs = client.model("m").outputs
        assert outputs["ngram_scales"] == outputs[ROW_IDS] * (3 if unit == "block" else 1)
        ids, rows = (client.embed(IDS, model="m", output=output).vectors for output in (ROW_IDS, ROWS))
        stored = client.embed(IDS, model="m", output=ROWS, dtype="stored").vectors
    assert np.array_equal(ids, run_transformers(folder, [IDS])[0])
    expected, parts = [], load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        names = [f"model.layers.{layer}.{SHARDS}{shard}.weight" for shard in range(4)]
        places = torch.from_numpy(ids[:, :, layer])
        expected.append(torch.cat([values[name] for name in names])[places].flatten(2))
        table = torch.cat([parts[name].view(torch.uint8) for name in names])
        assert stored[:, :, layer].tobytes() == table[places].numpy().tobytes()
    assert rows.tobytes() == torch.stack(expected, 2).numpy().tobytes()
