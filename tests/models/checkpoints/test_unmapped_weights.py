"""Tensors of a file larger than the memory. Oracle: safetensors with its mapping by torch."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from preblock.models.checkpoints.unmapped_weights import UnmappedWeights
from preblock.models.checkpoints.weight_files import CheckpointError
from tests.models.rejections import rejection


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (5, 4)])
def test_tensors_equal_mapped_ones(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    save_file({"a": tensor, "b": torch.zeros(2)}, tmp_path / "f")
    with UnmappedWeights(tmp_path / "f") as weights, safe_open(tmp_path / "f", framework="pt") as mapped:
        assert weights.keys() == sorted(mapped.keys())
        found, expected = weights.get_tensor("a"), mapped.get_tensor("a")
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        if shape:
            assert torch.equal(weights.get_slice("a")[1:3], mapped.get_slice("a")[1:3])


def test_missing_and_unsupported_tensors_are_rejected(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "f")
    with UnmappedWeights(tmp_path / "f") as weights:
        assert "f: no tensor b" in rejection(CheckpointError, weights.get_tensor, "b")
        assert "f: tensor a is C64, expected F64, F32" in rejection(CheckpointError, weights.get_slice, "a")
