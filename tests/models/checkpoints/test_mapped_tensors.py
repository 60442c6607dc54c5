"""Tensors mapped from a safetensors file. Oracles: the safetensors library with torch, the file system."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from preblock.models.checkpoints.weight_files import CheckpointError, WeightFile
from preblock.service.artifacts.safetensors_header import TYPES
from tests.models.rejections import rejection

ALL = [dtype.name for dtype in TYPES.values()]


def write(file: Path, entries: dict[str, Any], content: bytes = b"", padding: int = 0) -> WeightFile:
    """Write a file with this header and content; `padding` shifts the content by spaces in the header."""
    header = json.dumps(entries).encode() + b" " * padding
    file.write_bytes(len(header).to_bytes(8, "little") + header + content)
    return WeightFile(file)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
def test_tensors_equal_those_of_library(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (3,), (0, 4), (5, 4), (5000, 3))
    tensors = {f"t{place}": (torch.randn(shape) * 100).to(dtype) for place, shape in enumerate(shapes)}
    save_file(tensors, tmp_path / "f")
    weights, before = WeightFile(tmp_path / "f"), (tmp_path / "f").read_bytes()
    with safe_open(tmp_path / "f", framework="pt") as library:
        assert weights.keys() == sorted(library.keys())
        for key in library.keys():  # noqa: SIM118
            found, expected = weights.get(key, ALL), library.get_tensor(key)
            assert (found.dtype.name, found.shape) == (str(dtype).removeprefix("torch."), tuple(expected.shape))
            assert found.tobytes() == expected.reshape(-1).view(torch.uint8).numpy().tobytes()
            if found.ndim:
                part = library.get_slice(key)[1:3].reshape(-1).view(torch.uint8).numpy()
                assert weights.get(key, ALL, slice(1, 3)).tobytes() == part.tobytes()
            found[...] = 0
    assert (tmp_path / "f").read_bytes() == before


def test_tensor_at_odd_byte_is_read(tmp_path: Path) -> None:
    content = np.arange(6, dtype=np.float32)
    for padding in range(8):
        weights = write(tmp_path / "f", {"a": entry("F32", [2, 3], 0, 24)}, content.tobytes(), padding)
        found = weights.get("a")
        assert found.flags.aligned
        assert np.array_equal(found, content.reshape(2, 3))


def test_null_metadata_is_accepted_like_library(tmp_path: Path) -> None:
    weights = write(tmp_path / "f", {"__metadata__": None, "a": entry("U8", [1], 0, 1)}, b"1")
    with safe_open(tmp_path / "f", framework="pt") as library:
        assert weights.get("a", ALL).tolist() == library.get_tensor("a").tolist() == [ord("1")]


def test_file_replaced_after_its_header_is_rejected(tmp_path: Path) -> None:
    weights = write(tmp_path / "f", {"a": entry("F32", [2], 0, 8)}, b"\0" * 8)
    mapped = weights.get("a")
    write(tmp_path / "new", {"b": entry("F32", [2], 0, 8)}, b"\1" * 8)
    (tmp_path / "new").replace(tmp_path / "f")
    assert rejection(CheckpointError, weights.get, "a") == f"{tmp_path}/f: tensor a: the file changed while it was read"
    assert not mapped.any()


def test_tensor_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    size = 2**40
    header = json.dumps({"a": entry("F32", [size // 4096, 1024], 0, size)}).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "f").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + size)
    table = WeightFile(tmp_path / "f").get("a")
    assert table.shape == (2**28, 1024)
    table[-1] = 1
    assert table[-1].sum() == 1024
    assert not table[:2].any()


def test_unsupported_or_impossible_tensor_is_rejected(tmp_path: Path) -> None:
    for dtype, shape, count, message in (
        ("C64", [1], 8, "tensor a is C64, expected float32, float16, bfloat16"),
        ("F64", [1], 8, "tensor a is float64, expected float32, float16, bfloat16"),
        ("F32", [3], 8, r"f: tensor a has 8 bytes, expected [3] float32"),
        ("F32", [2**62, 2**62, 0], 0, "f: tensor a: "),
        ("F32", [1] * 100, 4, "f: tensor a: "),
        ("F32", [10**400], 8, "f: tensor a has 8 bytes"),
    ):
        weights = write(tmp_path / "f", {"a": entry(dtype, shape, 0, count)}, b"\0" * count)
        assert message in rejection(CheckpointError, weights.get, "a")
    assert "f: no tensor b" in rejection(CheckpointError, weights.get, "b")


def test_hostile_header_is_rejected(tmp_path: Path) -> None:
    good = entry("F32", [2], 0, 8)
    for entries in (
        {"a": good | {"data_offsets": [0, 2**63]}},
        {"a": good | {"data_offsets": [8, 0]}},
        {"a": good | {"data_offsets": [-8, 0]}},
        {"a": good | {"data_offsets": [0, math.inf]}},
        {"a": good | {"shape": [True, 2]}},
        {"a": good | {"shape": None}},
        {"a": good, "b": good},
        {"a": [1]},
        {},
    ):
        found = rejection(CheckpointError, write, tmp_path / "f", entries, b"\0" * 8)
        assert found.startswith(f"{tmp_path / 'f'}: got ")
    for length in (0, 2**40, 2**64 - 1):
        (tmp_path / "f").write_bytes(length.to_bytes(8, "little") + b"{}")
        assert "f: got " in rejection(CheckpointError, WeightFile, tmp_path / "f")
