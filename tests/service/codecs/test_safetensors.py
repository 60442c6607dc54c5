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
from preblock.service.codecs.safetensors import MAX_HEADER_BYTES, read_safetensors, write_result, write_safetensors
from preblock.service.core.errors import Malformed
from preblock.service.core.types import EmbedResult, TokenRows
from tests.support.late import safetensors_torch, torch

INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
IDS: dict[str, NDArray[Any]] = {"input_ids": np.arange(6).reshape(2, 3), "offset": np.array([1, 2], np.int32)}


def file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "I64", shape: Any = (2,), offsets: Any = (0, 16), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool", "float16", "float32", "float64"])
def test_library_safetensors_are_read(dtype: str) -> None:
    for shape in ((), (3,), (2, 3), (0,), (2, 0, 3)):
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        body = safetensors.numpy.save({"a": array, **IDS}, {"format": "pt"})
        found = read_safetensors(body)
        assert found.keys() == {"a", *IDS}
        assert (found["a"].dtype, found["a"].shape, found["a"].tobytes()) == (array.dtype, shape, array.tobytes())
        assert np.shares_memory(found["input_ids"], np.frombuffer(body, np.uint8))


def test_library_bfloat16_safetensors_are_read() -> None:
    tensor = torch.arange(6).to(torch.bfloat16)
    found = read_safetensors(safetensors_torch.save({"a": tensor}))["a"]
    assert found.dtype == ml_dtypes.bfloat16
    assert found.astype(np.float32).tolist() == tensor.tolist()


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


def test_safetensors_response_holds_row_tensors() -> None:
    lengths = np.array([1, 2])
    expected = {"embeddings": np.arange(12, dtype=np.float32).reshape(3, 4), "lengths": lengths}
    expected |= {"next_offset": lengths + 5, "truncated": np.array([0, 4]), "input_ids": np.array([7, 8, 9])}
    expected |= {"spans": np.arange(6).reshape(3, 2)}
    given: dict[str, Any] = expected | {"input_ids": TokenRows(expected["input_ids"], lengths)}
    tensors = {"embeddings": given.pop("embeddings")}
    body = join(write_result(EmbedResult(model="m", version=3, dtype="float32", tensors=tensors, **given)))
    found = safetensors.numpy.load(body)
    assert {name: array.tolist() for name, array in found.items()} == {n: a.tolist() for n, a in expected.items()}
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    assert header["__metadata__"] == {"model": "m", "version": "3", "use_as.embeddings": "input of block 0"}


HOSTILE = [
    pytest.param(b"", id="empty"),
    pytest.param(b"\x02\0\0\0", id="half-a-length"),
    pytest.param(b"\xff" * 8 + b"{}", id="length-2^64"),
    pytest.param(file({})[:9], id="header-that-ends-early"),
    pytest.param(file(b""), id="no-header"),
    pytest.param(file(b"{}".rjust(MAX_HEADER_BYTES + 1)), id="long-header"),
    pytest.param(file(b" {}"), id="space-first"),
    pytest.param(file(b"[]"), id="list"),
    pytest.param(file(b"{"), id="open"),
    pytest.param(file(b"{\xff}"), id="no-text"),
    pytest.param(file(b'{"a":' * 10_000), id="deep"),
    pytest.param(file(b'{"a":' + b"9" * 5000 + b"}"), id="long-number"),
    pytest.param(file({}, b"x"), id="bytes-of-no-tensor"),
    pytest.param(file({"a": 1}), id="no-entry"),
    pytest.param(file({"a": {}}), id="empty-entry"),
    pytest.param(file({"a": entry(more=1)}, bytes(16)), id="more-fields"),
    pytest.param(file({"a": entry("I128")}, bytes(16)), id="no-dtype"),
    pytest.param(file({"a": entry(["I64"])}, bytes(16)), id="dtype-list"),
    pytest.param(file({"a": entry(shape=2)}, bytes(16)), id="shape-number"),
    pytest.param(file({"a": entry(shape=[True, 2])}, bytes(16)), id="shape-bool"),
    pytest.param(file({"a": entry(shape=[2.0])}, bytes(16)), id="shape-float"),
    pytest.param(file({"a": entry(shape=[-1, -2])}, bytes(16)), id="shape-negative"),
    pytest.param(file({"a": entry(shape=[3])}, bytes(16)), id="too-few-bytes"),
    pytest.param(file({"a": entry(shape=[1])}, bytes(16)), id="too-many-bytes"),
    pytest.param(file({"a": entry(shape=[2**61, 8], offsets=[0, 0])}), id="product-2^64"),
    pytest.param(file({"a": entry(shape=[0, 2**70], offsets=[0, 0])}), id="no-rows-of-2^70"),
    pytest.param(file({"a": entry(shape=[1] * 100 + [2])}, bytes(16)), id="100-dimensions"),
    pytest.param(file({"a": entry(offsets=[0])}, bytes(16)), id="one-offset"),
    pytest.param(file({"a": entry(offsets=[0, 16, 16])}, bytes(16)), id="three-offsets"),
    pytest.param(file({"a": entry(offsets=[False, 16])}, bytes(16)), id="bool-offset"),
    pytest.param(file({"a": entry(offsets=[16, 0])}, bytes(16)), id="offsets-backwards"),
    pytest.param(file({"a": entry(offsets=[-16, 0])}, bytes(16)), id="negative-offset"),
    pytest.param(file({"a": entry(offsets=[8, 24])}, bytes(24)), id="hole-before"),
    pytest.param(file({"a": entry(), "b": entry(offsets=[24, 40])}, bytes(40)), id="hole-between"),
    pytest.param(file({"a": entry()}, bytes(24)), id="bytes-behind"),
    pytest.param(file({"a": entry()}, bytes(8)), id="beyond-the-end"),
    pytest.param(file({"a": entry(), "b": entry()}, bytes(16)), id="same-bytes-twice"),
    pytest.param(file({"a": entry(), "b": entry(offsets=[8, 24])}, bytes(24)), id="overlap"),
    pytest.param(file(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(16)), id="name-twice"),
    pytest.param(file({"__metadata__": {"a": 1}}), id="metadata-number"),
    pytest.param(file({"__metadata__": []}), id="metadata-list"),
    pytest.param(file(b'{"\\ud800":%b}' % json.dumps(entry()).encode(), bytes(16)), id="half-a-character"),
]


@pytest.mark.parametrize("body", HOSTILE)
def test_malformed_safetensors_are_rejected(body: bytes) -> None:
    with pytest.raises(Malformed, match=r"^body: not a valid safetensors file \(.*\), expected integer tensors"):
        read_safetensors(body)


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
