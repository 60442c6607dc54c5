"""The native request and answer: JSON, raw bytes and .npy, little-endian."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from incipit.service.errors import Invalid, Malformed
from incipit.service.messages import Answer, Request, Rows
from incipit.service.wire.rows import offset_of_json, refuse_unknown, rows_of_array, rows_of_json

ENCODINGS = ("base64", "float")
ROWS = ("input_ids", "position_ids", "token_type_ids", "attention_mask")
FIELDS = (*ROWS, "offset", "dtype", "encoding")


@dataclass(frozen=True)
class Embed:
    """A request, and how its vectors are written where the answer is JSON."""

    request: Request
    encoding: str


def read_json(body: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        Malformed: anything else.

    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Malformed("body", f"no JSON: {error}", "a JSON object") from error
    if not isinstance(document, dict):
        raise Malformed("body", f"a JSON {type(document).__name__}", "a JSON object")
    return document


def read_query(query: Mapping[str, str]) -> dict[str, Any]:
    """Read fields of query parameters: dtype and encoding as they are, the others as JSON.

    Raises:
        Malformed: a value is no JSON.

    """
    fields: dict[str, Any] = {}
    for name, text in query.items():
        try:
            fields[name] = text if name in ("dtype", "encoding") else orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise Malformed(name, text, "JSON, such as 5 or [[0,1]]") from error
    return fields


def read_npy(body: bytes) -> NDArray[Any]:
    """Read an array in .npy format, without pickles (numpy.lib.format, versions 1 and 2).

    Raises:
        Malformed: anything else, or another number of bytes than the header declares.

    """
    stream = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read_header(stream)
        data = memoryview(body)[stream.tell() :]
        if dtype.hasobject or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("objects, or a shape that is none")
        # Python's integers: no product of declared sizes can wrap.
        declared = dtype.itemsize
        for size in shape:
            declared *= size
        if declared != len(data):
            raise ValueError(f"{len(data)} bytes of data, where the header declares {declared}")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # the header is parsed as Python, which fails in every way that Python's parser knows
        raise Malformed("body", f"no .npy: {error}", "an integer array in .npy format") from error


def read_embed(fields: Mapping[str, Any], input_ids: NDArray[Any] | None = None) -> Embed:
    """Read the fields of an embed request; `input_ids` may come beside them, as an array.

    Raises:
        Invalid: a field is missing, unknown, given twice, or of the wrong type.

    """
    refuse_unknown(fields, FIELDS)
    rows: dict[str, Rows] = {name: rows_of_json(name, fields[name]) for name in ROWS if fields.get(name) is not None}
    if input_ids is not None:
        if "input_ids" in rows:
            raise Invalid("input_ids", "one in the query and one in the body", "one of them")
        rows["input_ids"] = rows_of_array("input_ids", input_ids)
    if "input_ids" not in rows:
        raise Invalid("input_ids", "nothing", "rows of token ids")
    offset, dtype, encoding = (
        fields.get("offset"),
        fields.get("dtype", "float32"),
        fields.get("encoding", "base64"),
    )
    if encoding not in ENCODINGS:
        raise Invalid("encoding", encoding, ", ".join(ENCODINGS))
    if not isinstance(dtype, str):
        raise Invalid("dtype", dtype, "a name")
    request = Request(offset=None if offset is None else offset_of_json(offset), dtype=dtype, **rows)
    return Embed(request, encoding)


def answer_json(answer: Answer, encoding: str) -> dict[str, Any]:
    """Return the answer as a document for `write_json`."""
    document: dict[str, Any] = {
        "model": answer.model,
        "version": answer.version,
        "dtype": answer.dtype,
        "encoding": encoding,
        "shape": answer.shape,
        "embeddings": _base64(answer) if encoding == "base64" else _floats(answer),
        "next_offset": answer.next_offset,
    }
    if len(answer.shape) == 2:
        document["lengths"] = answer.lengths
    return document


def write_json(document: dict[str, Any]) -> bytes:
    """Write a document, arrays included."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def raw_bytes(answer: Answer) -> memoryview:
    """Return the vectors as little-endian bytes, without a copy."""
    return answer.embeddings.view(np.uint8).reshape(-1).data


def write_npy(answer: Answer) -> bytes:
    """Write the vectors in .npy format.

    Raises:
        Invalid: bfloat16, which .npy does not have.

    """
    if answer.dtype == "bfloat16":
        raise Invalid("dtype", "bfloat16", "float32 or float16 in .npy, or another format")
    stream = io.BytesIO()
    np.lib.format.write_array(stream, answer.embeddings.reshape(answer.shape), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def _base64(answer: Answer) -> orjson.Fragment:
    return orjson.Fragment(b'"' + pybase64.b64encode(raw_bytes(answer)) + b'"')


def _floats(answer: Answer) -> NDArray[np.float32]:
    """Return the vectors as float32, which holds the narrower types exactly."""
    floats = answer.embeddings.astype(np.float32, copy=False).reshape(answer.shape)
    if not np.isfinite(floats).all():
        raise Invalid("encoding", "float", "base64, since a value is infinite or no number, which JSON cannot hold")
    return floats
