"""Tensors by name. Oracle: the safetensors library."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from preblock.service.codecs.chunks import join
from preblock.service.codecs.safetensors import MAX_HEADER_BYTES, read_safetensors, write_safetensors
from preblock.service.core.errors import Malformed
from tests.support.late import safetensors_torch, torch

INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
IDS: dict[str, NDArray[Any]] = {"input_ids": np.arange(6).reshape(2, 3), "offset": np.array([1, 2], np.int32)}


def file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "I64", shape: Any = (2,), offsets: Any = (0, 16), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


def test_library_safetensors_are_read() -> None:
    for dtype in (*INTEGERS, "bool", "float16", "float32", "float64"):
        for shape in ((), (3,), (2, 3), (0,), (2, 0, 3)):
            array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            body = safetensors.numpy.save({"a": array, **IDS}, {"format": "pt"})
            found = read_safetensors(body)
            assert found.keys() == {"a", *IDS}
            assert (found["a"].dtype, found["a"].shape, found["a"].tobytes()) == (array.dtype, shape, array.tobytes())
            assert np.shares_memory(found["input_ids"], np.frombuffer(body, np.uint8))
    tensor = torch.arange(6).to(torch.bfloat16)
    brain = read_safetensors(safetensors_torch.save({"a": tensor}))["a"]
    assert (brain.dtype, brain.astype(np.float32).tolist()) == (ml_dtypes.bfloat16, tensor.tolist())


def test_safetensors_library_reads_the_output() -> None:
    random = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "half": random.standard_normal((3, 5)).astype(np.float16),
        "brain": random.standard_normal((1, 7)).astype(ml_dtypes.bfloat16),
        "single": random.standard_normal((2, 3, 5)).astype(np.float32),
        "lengths": np.array([1, 2, 3]),
    }
    body = join(write_safetensors(tensors, {"model": "m"}))
    assert body == join(write_safetensors(tensors, {"model": "m"}))
    found = safetensors_torch.load(body)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert list(found[name].shape) == list(tensor.shape)
        assert found[name].view(torch.uint8).numpy().tobytes() == tensor.tobytes()
    assert found["brain"].dtype == torch.bfloat16
    begin = np.frombuffer(body, np.uint8).ctypes.data
    for array in read_safetensors(body).values():
        assert (array.ctypes.data - begin) % array.itemsize == 0


def test_safetensors_are_written_without_a_copy() -> None:
    array = np.zeros((2, 3), np.float32)
    _, values = write_safetensors({"a": array}, {})
    assert isinstance(values, memoryview)
    assert np.shares_memory(np.frombuffer(values, np.uint8), array)


HOSTILE: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"\xff" * 8 + b"{}", "length-2^64"),
    (file({})[:9], "header-that-ends-early"),
    (file(b"{}".rjust(MAX_HEADER_BYTES + 1)), "long-header"),
    (file(b" {}"), "space-first"),
    (file(b"{"), "open"),
    (file(b'{"a":' * 10_000), "deep"),
    (file(b'{"a":' + b"9" * 5000 + b"}"), "long-number"),
    (file({}, b"x"), "bytes-of-no-tensor"),
    (file({"a": entry(more=1)}, bytes(16)), "more-fields"),
    (file({"a": entry(["I64"])}, bytes(16)), "dtype-list"),
    (file({"a": entry(shape=[True, 2])}, bytes(16)), "shape-bool"),
    (file({"a": entry(shape=[-1, -2])}, bytes(16)), "shape-negative"),
    (file({"a": entry(shape=[3])}, bytes(16)), "too-few-bytes"),
    (file({"a": entry(shape=[2**61, 8], offsets=[0, 0])}), "product-2^64"),
    (file({"a": entry(shape=[0, 2**70], offsets=[0, 0])}), "no-rows-of-2^70"),
    (file({"a": entry(shape=[1] * 100 + [2])}, bytes(16)), "100-dimensions"),
    (file({"a": entry(offsets=[0, 16, 16])}, bytes(16)), "three-offsets"),
    (file({"a": entry(offsets=[16, 0])}, bytes(16)), "offsets-backwards"),
    (file({"a": entry(), "b": entry(offsets=[24, 40])}, bytes(40)), "hole-between"),
    (file({"a": entry()}, bytes(8)), "beyond-the-end"),
    (file({"a": entry(), "b": entry()}, bytes(16)), "same-bytes-twice"),
    (file({"a": entry(), "b": entry(offsets=[8, 24])}, bytes(24)), "overlap"),
    (file(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(16)), "name-twice"),
    (file({"__metadata__": {"a": 1}}), "metadata-number"),
    (file(b'{"\\ud800":%b}' % json.dumps(entry()).encode(), bytes(16)), "half-a-character"),
    (file(b'{"\\ud800":%b,"\\ud800":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(16)), "half-a-character-twice"),
]


def test_malformed_safetensors_are_rejected() -> None:
    for body, name in HOSTILE:
        with pytest.raises(Malformed) as refused:
            read_safetensors(body)
        assert str(refused.value).startswith("body: not a valid safetensors file ("), name
        assert str(refused.value).isprintable(), name
        assert refused.value.expected.startswith("integer tensors"), name


def test_changed_bytes_are_rejected_or_read_like_library() -> None:
    random, read = np.random.default_rng(0), 0
    body = safetensors.numpy.save(IDS, {"a": "b"})
    for _ in range(2000):
        changed = bytearray(body)
        for _ in range(random.integers(1, 4)):
            changed[random.integers(0, len(body) if random.random() < 0.5 else 8)] = random.integers(0, 256)
        content = bytes(changed[: len(body) - int(random.integers(0, 30)) * (random.random() < 0.2)])
        try:
            found = read_safetensors(content)
        except Malformed:
            continue
        expected = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
        read += 1
        assert found.keys() == expected.keys()
        for name, array in found.items():
            assert (list(array.shape), array.tobytes()) == (expected[name]["shape"], bytes(expected[name]["data"]))
    assert read > 40
