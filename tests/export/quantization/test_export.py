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
from preblock.export.verification import verify
from preblock.models.steps import Positions
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import DATA, PARITY
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from tests.clients.client_matrix import check_standard
from tests.export.quantization.rounding import M, V, put, run, tiny
from tests.families import bias_models, library_models


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"dtype": "int8"}),
        ("gpt2", {"dtype": "bfloat16", "max_len": 99, "resizing": "hybrid", "arithmetic": "source"}),
        ("bloom", {"dtype": "int4"}),
    ],
)
def test_quantization_combines_with_other_export_options(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    if name in bias_models.BIASED:
        bias_models.save(name, tmp_path / "source")
    else:
        library_models.save(name, tmp_path / "source", torch.bfloat16 if "arithmetic" in options else torch.float32)
    exported = export(str(tmp_path / "source"), "m", tmp_path, **options)
    assert isinstance(exported.manifest, Manifest)
    assert exported.manifest.dtype == options["dtype"]
    assert ("embeddings.onnx" in exported.manifest.files) == (name == "llama")
    assert ("bias.onnx" in exported.manifest.files) == (name in bias_models.BIASED)
    assert verify(exported.folder).providers == exported.parity.providers
    assert Repository(tmp_path, CPU, 1).get("m").manifest == exported.manifest
    check_standard(exported.folder, exported.manifest.indices)
