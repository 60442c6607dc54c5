"""Quantized exports: options, limits and reproducibility."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.models.steps import Positions
from preblock.service.artifacts.names import DATA, PARITY
from tests.export.quantization.rounding import M, V, put, run, tiny


@pytest.mark.parametrize(("dtype", "arithmetic"), [("float16", "source"), ("bfloat16", "float32")])
def test_export_in_source_dtype_is_lossless(
    tmp_path: Path, quantized_source: Path, dtype: str, arithmetic: Any
) -> None:
    model = transformers.GPT2Model.from_pretrained(quantized_source, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "source")
    folders = [
        export(str(tmp_path / "source"), "m", tmp_path, dtype=stored, arithmetic=arithmetic).folder
        for stored in ("float32", dtype)
    ]
    ids = np.arange(V - V % M).reshape(-1, M) % V
    wide, narrow = (run(folder, {"input_ids": ids, "offset": np.array([0])}) for folder in folders)
    assert wide.tobytes() == narrow.tobytes()
    sizes = [(folder / DATA).stat().st_size for folder in folders]
    assert 0 <= 2 * sizes[1] - sizes[0] < 2 * 64
    assert all(table["max_abs"] == 0 for table in json.loads((folders[1] / PARITY).read_text())["storage"].values())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float16", 65520), ("bfloat16", 3.4e38), ("int8", np.inf), ("int4", np.nan), ("float16", -7e4)],
)
def test_weight_beyond_dtype_is_rejected_and_leaves_no_files(tmp_path: Path, dtype: str, value: float) -> None:
    frontend = tiny(Positions(rows=20))
    with torch.no_grad():
        frontend.get_parameter("positions.weight")[3, 2] = value
    with pytest.raises(ExportError) as refused:
        put(frontend, tmp_path, dtype)
    told = f"{np.float32(value):g}"
    assert str(refused.value) == f"--dtype: got {dtype}, expected a type that holds {told}, a value of positions.weight"
    assert list(tmp_path.iterdir()) == []
