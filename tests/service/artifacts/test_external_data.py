"""Graphs whose tensors lie at a wrong place of the data file. Oracle: the onnx package."""

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from preblock.service.artifacts.names import DATA, GRAPH, TOKEN_GRAPH
from tests.service.artifacts.broken_artifacts import LENGTH, TOKENS, edit, entries, place, refusal

LOCATIONS = [
    "/etc/passwd",
    "../model.onnx.data",
    "../../gpt/1/model.onnx.data",
    "./model.onnx.data",
    "model.onnx.data/",
    "x/../model.onnx.data",
    "model.onnx",
    "tokenizer.json",
    "MODEL.ONNX.DATA",
    "",
    "model.onnx.data\0",
    "*/_ORT_MEM_ADDR_/*",  # onnxruntime's own mark for an address in memory
]


@pytest.mark.parametrize("location", LOCATIONS)
def test_external_data_elsewhere_is_rejected(weighty_copy: Path, location: str) -> None:
    edit(weighty_copy, lambda model: place(model.graph.initializer[0], location=location))
    got = location.replace("\0", "\\x00")
    assert refusal(weighty_copy) == f"{TOKENS} location: got {got}, expected {DATA}, in the same folder"


@pytest.mark.parametrize("absolute", [False, True])
def test_identical_external_data_elsewhere_is_rejected(weighty_copy: Path, absolute: bool) -> None:
    outside = shutil.copy(weighty_copy / DATA, weighty_copy.parent / "outside")
    location = str(outside) if absolute else "../outside"
    edit(weighty_copy, lambda model: place(model.graph.initializer[0], location=location))
    assert refusal(weighty_copy).startswith(f"{TOKENS} location: got {location[:80]}")


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("text", ["-1", "1e3", " 0", "", "0x10", "+1", "\u0661", "1" * 19, "1_0", "0\n"])
def test_invalid_byte_count_is_rejected(weighty_copy: Path, key: str, text: str) -> None:
    edit(weighty_copy, lambda model: place(model.graph.initializer[0], **{key: text}))
    assert refusal(weighty_copy) == f"{TOKENS} {key}: got {ascii(text)[1:-1]}, expected a whole number of bytes"


@pytest.mark.parametrize("offset", [6401, 19200, 10**17])
def test_external_offset_beyond_data_is_rejected(weighty_copy: Path, offset: int) -> None:
    edit(weighty_copy, lambda model: place(model.graph.initializer[0], offset=str(offset)))
    message = f"{TOKENS}: got bytes {offset} to {offset + LENGTH}, expected 0 to 19200, as {DATA} has"
    assert refusal(weighty_copy) == message


@pytest.mark.parametrize("length", [0, 12799, 12801, 19200])
def test_external_length_not_matching_shape_is_rejected(weighty_copy: Path, length: int) -> None:
    edit(weighty_copy, lambda model: place(model.graph.initializer[0], length=str(length)))
    expected = f"{TOKENS} length: got {length}, expected {LENGTH} bytes, as float32 [100, 32] has"
    assert refusal(weighty_copy) == expected


@pytest.mark.parametrize("data_type", [11, 10, 7, 2])
def test_external_length_not_matching_type_is_rejected(weighty_copy: Path, data_type: int) -> None:
    edit(weighty_copy, lambda model: setattr(model.graph.initializer[0], "data_type", data_type))
    assert refusal(weighty_copy).startswith(f"{TOKENS} length: got {LENGTH}, expected ")


@pytest.mark.parametrize("data_type", [0, 8, 14, 22, 99, -1])
def test_unsupported_data_type_is_rejected(weighty_copy: Path, data_type: int) -> None:
    edit(weighty_copy, lambda model: setattr(model.graph.initializer[0], "data_type", data_type))
    assert refusal(weighty_copy).startswith(f"{TOKENS} data_type: got {data_type}, expected 1 (float32), 2 (uint8), ")


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ([2**40, 2**40], f" length: got {LENGTH}, expected {4 * 2**80} bytes"),
        ([2**62, 2**62, 2**62], f" length: got {LENGTH}, expected {4 * 2**186} bytes"),
        ([2**63 - 1, 0, 2**63 - 1], f" length: got {LENGTH}, expected 0 bytes"),
        ([-100, -32], " dims: got [-100, -32], expected sizes of 0 or more"),
        ([2**62] * 10**5, " dims: got 100000 of them, expected at most 32"),
        ([], f" length: got {LENGTH}, expected 4 bytes"),
    ],
    ids=range(6),
)
def test_invalid_shape_is_rejected(weighty_copy: Path, dims: list[int], message: str) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].dims[:] = dims

    edit(weighty_copy, change)
    assert refusal(weighty_copy).startswith(f"{TOKENS}{message}")


@pytest.mark.parametrize("offset", [1, 12796, 12799])
def test_overlapping_tensors_are_rejected(weighty_copy: Path, offset: int) -> None:
    edit(weighty_copy, lambda model: place(model.graph.initializer[1], offset=str(offset)))
    message = f"{GRAPH} frontend.positions.weight begins at offset {offset}, within {TOKENS}"
    assert refusal(weighty_copy) == message


def test_overlapping_tensors_of_two_graphs_are_rejected(weighty_copy: Path) -> None:
    edit(weighty_copy, lambda model: place(model.graph.initializer[0], offset="4"), TOKEN_GRAPH)
    assert " begins at offset 4, within " in refusal(weighty_copy)


def test_tensors_sharing_bytes_are_rejected(weighty_copy: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
        model.graph.initializer[-1].name = "twin"

    edit(weighty_copy, change)
    assert refusal(weighty_copy) == f"{GRAPH} twin has the bytes of {TOKENS}, expected bytes of its own"


PLACE = (("location", DATA), ("offset", "0"), ("length", "12800"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entries(), " external_data: got nothing, expected location, offset and length, once each"),
        (entries(*PLACE[:2]), " external_data: got location, offset, expected"),
        (entries(*PLACE, ("location", "/etc/passwd")), " external_data: got location, offset, length, location, ex"),
        (entries(*PLACE, ("checksum", "x")), " external_data: got location, offset, length, checksum, expected"),
        (lambda tensor: tensor.ClearField("data_location"), " data_location: got DEFAULT, expected EXTERNAL, since"),
        (lambda tensor: setattr(tensor, "raw_data", b"abcd"), " data_location: got EXTERNAL, expected DEFAULT, since"),
        (
            lambda tensor: tensor.float_data.append(1),
            " data_location: got EXTERNAL, expected DEFAULT, since it holds 4",
        ),
        (lambda tensor: setattr(tensor.segment, "end", 4), ": got a segment, expected a whole tensor"),
    ],
    ids=range(8),
)
def test_malformed_external_data_is_rejected(
    weighty_copy: Path, change: Callable[[TensorProto], object], message: str
) -> None:
    edit(weighty_copy, lambda model: change(model.graph.initializer[0]))
    assert refusal(weighty_copy).startswith(TOKENS + message)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (TensorProto(data_type=1, dims=[2], raw_data=bytes(4)), "4 bytes, expected 8 bytes, as float32 [2] has"),
        (TensorProto(data_type=1, dims=[1], raw_data=bytes(8)), "8 bytes, expected 4 bytes, as float32 [1] has"),
        (TensorProto(data_type=1, dims=[2**50]), f"0 bytes, expected {2**52} bytes, as float32 [{2**50}] has"),
        (TensorProto(data_type=7, dims=[3], int64_data=[1, 2]), "16 bytes, expected 24 bytes, as int64 [3] has"),
        (TensorProto(data_type=10, dims=[3], int32_data=[1]), "2 bytes, expected 6 bytes, as float16 [3] has"),
        (TensorProto(data_type=1, dims=[1], double_data=[1]), "0 bytes, expected 4 bytes, as float32 [1] has"),
    ],
    ids=range(6),
)
def test_inline_values_not_matching_shape_are_rejected(weighty_copy: Path, tensor: TensorProto, message: str) -> None:
    tensor.name = "inline"
    edit(weighty_copy, lambda model: model.graph.initializer.append(tensor))
    assert refusal(weighty_copy) == f"{GRAPH} inline: got {message}"
