"""Artifacts with broken files, and graphs whose tensors lie at a wrong place. Oracle: the onnx package."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST, PARITY, TOKEN_GRAPH
from preblock.service.runtime import loader
from preblock.service.runtime.session import Session, open_session
from tests.service.artifacts.broken_artifacts import LENGTH, TOKENS, edit, entries, place, refusal, seal


@pytest.mark.parametrize("name", [GRAPH, TOKEN_GRAPH, DATA])
def test_changed_file_is_rejected(weighty_copy: Path, name: str) -> None:
    content = (weighty_copy / name).read_bytes()
    flipped = [bytes([content[0] ^ 1]) + content[1:], content[:-1] + bytes([content[-1] ^ 1])]
    for changed in (*flipped, content[:-1], content + b"\0", b""):
        (weighty_copy / name).write_bytes(changed)
        assert refusal(weighty_copy).startswith(f"{name}: got sha256 {hashlib.sha256(changed).hexdigest()[:12]}…")


FILES = pytest.mark.parametrize("name", [MANIFEST, PARITY, GRAPH, TOKEN_GRAPH, DATA])


@FILES
def test_link_out_of_the_folder_is_rejected(weighty_copy: Path, name: str) -> None:
    outside = (weighty_copy / name).rename(weighty_copy.parent / "outside").resolve()
    (weighty_copy / name).symlink_to(outside)
    assert refusal(weighty_copy) == f"{name} is a link to {outside}, expected a file in its folder or its hub cache"


@FILES
def test_special_file_is_rejected_without_blocking(weighty_copy: Path, name: str) -> None:
    file = weighty_copy / name
    file.unlink()
    for make, remove in ((Path.mkdir, Path.rmdir), (os.mkfifo, Path.unlink)):
        make(file)
        assert refusal(weighty_copy) == f"{name}: got a folder or device, expected a regular file"
        remove(file)


def test_oversized_file_is_not_read(weighty_copy: Path) -> None:
    for name, most in ((GRAPH, 16 * 2**20), (TOKEN_GRAPH, 16 * 2**20), (PARITY, 4 * 2**20), (MANIFEST, 4 * 2**20)):
        content = (weighty_copy / name).read_bytes()
        os.truncate(weighty_copy / name, most + 1)
        if name in (GRAPH, TOKEN_GRAPH):
            seal(weighty_copy)
        assert refusal(weighty_copy) == f"{name}: got more than {most} bytes, expected at most {most} bytes"
        (weighty_copy / name).write_bytes(content)
        seal(weighty_copy)


def test_file_changed_during_open_is_rejected(weighty_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Session:
        opened = open_session(*arguments)
        (weighty_copy / DATA).write_bytes((weighty_copy / DATA).read_bytes())
        return opened

    monkeypatch.setattr(loader, "open_session", slow)
    assert refusal(weighty_copy) == f"{DATA} changed while it was opened"


def placed(**entries: object) -> Callable[[TensorProto], object]:
    """Return a change of entries of the external data of a tensor."""
    return lambda tensor: place(tensor, **{key: str(value) for key, value in entries.items()})


def typed(data_type: int) -> Callable[[TensorProto], object]:
    return lambda tensor: setattr(tensor, "data_type", data_type)


def shaped(*dims: int) -> Callable[[TensorProto], object]:
    def change(tensor: TensorProto) -> None:
        tensor.dims[:] = dims

    return change


def shown(text: str) -> str:
    return ascii(text)[1:-1][:80]


LOCATIONS = (
    *("/etc/passwd", "../model.onnx.data", "../../gpt/1/model.onnx.data", "./model.onnx.data", "model.onnx.data/"),
    *("x/../model.onnx.data", "model.onnx", "tokenizer.json", "MODEL.ONNX.DATA", "", "model.onnx.data\0"),
    "*/_ORT_MEM_ADDR_/*",  # onnxruntime's own mark for an address in memory
)
COUNTS = ("-1", "1e3", " 0", "", "0x10", "+1", "\u0661", "1" * 19, "1_0", "0\n")
PLACE = (("location", DATA), ("offset", "0"), ("length", "12800"))
MALFORMED: list[tuple[Callable[[TensorProto], object], str]] = [
    *((placed(location=text), f" location: got {shown(text)}") for text in LOCATIONS),
    *((placed(offset=text), f" offset: got {shown(text)}, expected a whole number of bytes") for text in COUNTS),
    *((placed(length=text), f" length: got {shown(text)}, expected a whole number of bytes") for text in COUNTS),
    *((placed(offset=begin), f": got bytes {begin} to {begin + LENGTH}, expected ") for begin in (6401, 10**17)),
    *((placed(length=length), f" length: got {length}, expected ") for length in (0, 12799, 12801)),
    *((typed(narrow), f" length: got {LENGTH}, expected ") for narrow in (11, 10, 2)),
    *((typed(unknown), f" data_type: got {unknown}, expected ") for unknown in (0, 8, 14, 22, 99, -1)),
    (shaped(2**62, 2**62, 2**62), f" length: got {LENGTH}, expected {4 * 2**186} bytes"),
    (shaped(2**63 - 1, 0, 2**63 - 1), f" length: got {LENGTH}, expected 0 bytes"),
    (shaped(-100, -32), " dims: got [-100, -32]"),
    (shaped(*[2**62] * 10**5), " dims: got 100000 of them"),
    (shaped(), f" length: got {LENGTH}, expected 4 bytes"),
    (entries(), " external_data: got nothing, expected location, offset and length, once each"),
    (entries(*PLACE[:2]), " external_data: got location, offset, expected"),
    (entries(*PLACE, ("location", "/etc/passwd")), " external_data: got location, offset, length, location, ex"),
    (entries(*PLACE, ("checksum", "x")), " external_data: got location, offset, length, checksum, expected"),
    (lambda tensor: tensor.ClearField("data_location"), " data_location: got DEFAULT, expected EXTERNAL, since"),
    (lambda tensor: setattr(tensor, "raw_data", b"abcd"), " data_location: got EXTERNAL, expected DEFAULT, since"),
    (lambda tensor: tensor.float_data.append(1), " data_location: got EXTERNAL, expected DEFAULT, since it holds 4"),
    (lambda tensor: setattr(tensor.segment, "end", 4), ": got a segment, expected a whole tensor"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_external_data_is_rejected(
    weighty_copy: Path, change: Callable[[TensorProto], object], message: str
) -> None:
    edit(weighty_copy, lambda model: change(model.graph.initializer[0]))
    assert refusal(weighty_copy).startswith(TOKENS + message)


@pytest.mark.parametrize("offset", [1, 12799])
def test_overlapping_tensors_are_rejected(weighty_copy: Path, offset: int) -> None:
    edit(weighty_copy, lambda model: place(model.graph.initializer[-1], offset=str(offset)))
    assert refusal(weighty_copy) == f"{GRAPH} positions.weight begins at offset {offset}, within {TOKENS}"


def test_overlapping_tensors_of_two_graphs_are_rejected(weighty_copy: Path) -> None:
    edit(weighty_copy, lambda model: place(model.graph.initializer[0], offset="4"), TOKEN_GRAPH)
    assert " begins at offset 4, within " in refusal(weighty_copy)


def test_tensors_sharing_bytes_are_rejected(weighty_copy: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
        model.graph.initializer[-1].name = "twin"

    edit(weighty_copy, change)
    assert refusal(weighty_copy) == f"{GRAPH} twin has the bytes of {TOKENS}, expected bytes of its own"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (TensorProto(data_type=1, dims=[2], raw_data=bytes(4)), "4 bytes, expected 8 bytes, as float32 [2] has"),
        (TensorProto(data_type=1, dims=[2**50]), f"0 bytes, expected {2**52} bytes, as float32 [{2**50}] has"),
        (TensorProto(data_type=10, dims=[3], int32_data=[1]), "2 bytes, expected 6 bytes, as float16 [3] has"),
    ],
    ids=range(3),
)
def test_inline_values_not_matching_shape_are_rejected(weighty_copy: Path, tensor: TensorProto, message: str) -> None:
    tensor.name = "inline"
    edit(weighty_copy, lambda model: model.graph.initializer.append(tensor))
    assert refusal(weighty_copy) == f"{GRAPH} inline: got {message}"
