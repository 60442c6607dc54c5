"""Every parser of foreign bytes, as a function of bytes, with valid inputs."""

import io
import json
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import safetensors.numpy
from onnx import TensorProto, helper

from preblock.service.artifacts.io import MAX_JSON_BYTES as MANIFEST_BYTES
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import File, Manifest
from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST
from preblock.service.artifacts.onnx_check import MAX_GRAPH_BYTES as GRAPH_BYTES
from preblock.service.artifacts.onnx_check import check_graphs
from preblock.service.codecs.arrays import read_npy, read_raw
from preblock.service.codecs.decode_frames import read_frame
from preblock.service.codecs.decode_json import read_message
from preblock.service.codecs.native_json import read_json
from preblock.service.codecs.safetensors import read_safetensors
from preblock.service.codecs.v2.metadata import Manifests
from preblock.service.codecs.v2.requests import read_infer
from preblock.service.core.errors import PreblockError
from tests.support.manifests import tiny_manifest, tiny_stem

MOST_EACH, MOST_ALONE = 200, 2**20
"""Memory limits of a parser: a multiple of its input, and a constant for its caches, in bytes."""


ROW: list[dict[str, Any]] = [{"input_ids": [1, 2]}, {"vectors": "AACAPwAAAAAAAAAAAAAAAA=="}]
"""The parts of a row."""
PARTS = {"name": "parts", "datatype": "BYTES", "shape": [1]}


@dataclass(frozen=True)
class Parser:
    """A parser of bytes.

    Args:
        read: returns something, or raises a PreblockError.
        seeds: inputs to change.
        words: bytes with a meaning for it.
        most: limit of its memory for an empty input, in bytes.

    """

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    most: int = MOST_ALONE

    def hold(self, data: bytes) -> None:
        """Read, and raise MemoryError over the limit, or any error except a PreblockError.

        For millions of inputs, the caller traces memory all the time: each start of a trace leaks a little.
        """
        begun = not tracemalloc.is_tracing()
        if begun:
            tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        try:
            self.read(data)
        except PreblockError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1] - before
            if begun:
                tracemalloc.stop()
        if peak > self.most + MOST_EACH * len(data):
            raise MemoryError(f"{peak} bytes for an input of {len(data)}")


CALLS = (
    bytes.fromhex(
        "0a046265727422110a0b73657175656e63655f6964120210052a160a09696e7075745f6964731205494e5436341a0201033a"
        "18010000000000000002000000000000000300000000000000"
    ),
    bytes.fromhex("0a04626572742a1d0a09696e7075745f6964731205494e5436341a0201032a051a03010203"),
)
"""Messages ModelInferRequest: ids 1, 2, 3 of bert as raw bytes, with a sequence_id, and as int64_contents."""


def _npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _frame(kind: int, flags: int, rows: int, tokens: int, body: bytes) -> bytes:
    return b"PRBK" + struct.pack("<BBHIII", 2, kind, flags, 7, rows, tokens) + bytes(4) + body


def _v2(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(2, "little") + text + data


def _read_v2(body: bytes, manifest: Manifests) -> object:
    """The first two bytes are the header with the length of the JSON; all ones for none."""
    end = int.from_bytes(body[:2], "little")
    return read_infer(body[2:], None if end == 0xFFFF else str(end), manifest)


def _read_call(message: bytes, manifest: Manifest) -> object:
    # In a process of its own: tritonclient registers messages of the same names.
    from preblock.service.codecs.v2.protobuf import read_infer, read_request

    return read_infer(read_request(message), manifest)


def _graph() -> onnx.ModelProto:
    """Return a graph with a lookup table of 11 rows in the data file, and an inline tensor."""
    table = TensorProto(name="table", data_type=1, dims=[11, 4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", DATA), ("offset", "0"), ("length", "176")):
        table.external_data.add(key=key, value=value)
    inline = helper.make_tensor("inline", TensorProto.INT64, [2], [1, 2])
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
    out = helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["batch", "length", 4])
    node = helper.make_node("Gather", ["table", "input_ids"], ["embeddings"])
    return helper.make_model(helper.make_graph([node], "graph", [ids], [out], [table, inline]))


def _files(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return a function to read bytes as the file `name` of `folder`."""

    def read_file(content: bytes) -> object:
        (folder / name).write_bytes(content)
        return read(folder)

    return read_file


def parsers(folder: Path) -> dict[str, Parser]:
    """Return all, by name; `folder` is for readers of files."""
    manifest = tiny_manifest()
    artifact = manifest.model_copy(
        update={
            "graphs": {GRAPH: manifest.graphs[GRAPH]},
            "files": {DATA: File(sha256="0" * 64, bytes=176), GRAPH: File(sha256="0" * 64, bytes=1)},
        }
    )
    ids = np.array([[1, 2, 3]])
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3]}
    step = ids.astype("<i8").tobytes()
    image = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 1, 2, 4]}
    pixels = np.linspace(-1, 1, 8, dtype="<f4")
    return {
        "v2": Parser(
            partial(_read_v2, manifest=manifest),
            (
                b"\xff\xff" + json.dumps({"inputs": [tensor | {"data": [1, 2, 3]}], "id": "a"}).encode(),
                _v2({"inputs": [tensor | {"parameters": {"binary_data_size": 24}}], "outputs": []}, step),
                _v2({"inputs": [tensor | {"data": [[1, 2, 3]]}], "outputs": [{"name": "embeddings"}]}),
                b"\0\0" + step,
                b"\xff\xff" + json.dumps({"inputs": [PARTS | {"data": [json.dumps(ROW)]}]}).encode(),
                _v2({"inputs": [PARTS | {"parameters": {"binary_data_size": 18}}]}, b'\x0e\0\0\0[{"text":"a"}]'),
            ),
            (b'"offset"', b'"binary_data_size":', b'"sequence_id"', b"-1", b"1e999", b"[[", b'"FP16"', b"null"),
        ),
        "stem": Parser(
            partial(_read_v2, manifest=tiny_stem()),
            (
                b"\xff\xff" + json.dumps({"inputs": [image | {"data": pixels.tolist()}]}).encode(),
                _v2({"inputs": [image | {"parameters": {"binary_data_size": 32}}]}, pixels.tobytes()),
            ),
            (b'"binary_data_size":', b'"embeddings"', b"1e39", b"1e999", b'"FP16"', b"[[", b"null"),
        ),
        "message": Parser(
            lambda data: read_message(read_json(data), 0, data, ("token_type_ids",)),
            (
                b'{"input_ids": [[1, 2], []], "offset": [3, 4]}',
                json.dumps({"parts": [ROW, []], "placeholder": {"token_id": 1, **ROW[1]}}).encode(),
                b'{"append": [1], "context": [[1, 2]]}',
            ),
            (b'"parts":', b'"soft_prompt":', b'{"text":', b"[[", b"null", b"AADAfw=="),
        ),
        "json": Parser(read_json, (b'{"input_ids": [[1, 2]], "offset": 0}', b'{"text": "a", "a": {"a": 1}}')),
        "frames": Parser(
            partial(read_frame, indices=("token_type_ids", "word")),
            (
                _frame(1, 0, 1, 3, step + struct.pack("<I", 3)),
                _frame(1, 7, 1, 3, 3 * step + struct.pack("<qI", 0, 3)),
                _frame(4, 0, 2, 0, bytes(16)),
                _frame(8, 0, 0, 0, b""),
            ),
        ),
        "npy": Parser(
            read_npy,
            (_npy(ids), _npy(ids.T), _npy(ids.astype(">u2")), _npy(np.zeros((0, 3)))),
            (b"'|O'",),
            2**22,  # a name in a header may grow Python's table of interned names
        ),
        "raw": Parser(
            lambda data: read_raw(data[1:], [None, "1,3", "3", "0,1", "9" * 18 + ",9"][data[0] % 5] if data else None),
            (b"\0" + step, b"\1" + step, b"\2" + step),
        ),
        "safetensors": Parser(
            read_safetensors,
            (
                safetensors.numpy.save({"input_ids": ids, "offset": np.zeros(1, np.int64)}),
                safetensors.numpy.save({"input_ids": ids}, {"a": "b"}),
            ),
            (b'"__metadata__"', b'"BF16"', b'"shape":[', b"18446744073709551616", b"\\ud800"),
        ),
        "protobuf": Parser(partial(_read_call, manifest=manifest), CALLS),
        "manifest": Parser(
            _files(folder, MANIFEST, read_manifest),
            (artifact.model_dump_json().encode(),),
            (b'"stem"', b"NaN", b"1e400", b"9" * 5000, b"[" * 300, b'"../x"', b"\\ud800"),
            2 * MANIFEST_BYTES,
        ),
        "graphs": Parser(
            _files(folder, GRAPH, partial(check_graphs, manifest=artifact)),
            (_graph().SerializeToString(),),
            (b"176",),
            2 * GRAPH_BYTES,
        ),
    }
