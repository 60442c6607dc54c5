"""Messages of decode streams as `docs/decode.md` describes them: frames, JSON and answers of either kind."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.sync.client import ClientConnection, connect

from tests.service.api.http.native_requests import vectors_of
from tests.support.decode_protocols import FRAME
from tests.support.protocols import ERROR, STEP, VECTORS, Clients, Vectors

REWIND, REORDER, APPEND, DROP, PING, CLOSE, STATE, CLOSING = 4, 5, 6, 7, 8, 9, 10, 11
KINDS = {"rewind": REWIND, "reorder": REORDER, "append": APPEND, "drop": DROP, "ping": PING, "close": CLOSE}
FLAGS = {"input_ids": 0, "position_ids": 1, "attention_mask": 2, "token_type_ids": 256, "offset": 4}
"""Fields of a step in order, and the flag of each."""


def head(kind: int, rows: int = 0, tokens: int = 0, number: int = 0, flags: int = 0, version: int = 2) -> bytes:
    return FRAME.pack(b"PRBK", version, kind, flags, number, rows, tokens, 0, bytes(3))


def operation(kind: int, *values: int, number: int = 0, flags: int = 0, context: tuple[int, ...] = ()) -> bytes:
    return head(kind, len(values), 0, number, flags) + np.array((*values, *context), "<i8").tobytes()


def step(ids: list[list[int]], number: int = 0, version: int = 2, **fields: Any) -> bytes:
    """Return a step of rows, with further fields."""
    values = {"input_ids": ids} | fields
    body = b"".join(np.array(flat(values[name]), "<i8").tobytes() for name in FLAGS if name in values)
    lengths = np.array([len(row) for row in ids], "<u4")
    flags = sum(FLAGS[name] for name in values)
    return head(STEP, len(ids), int(lengths.sum()), number, flags, version) + body + lengths.tobytes()


def flat(values: list[Any]) -> list[int]:
    return [value for row in values for value in (row if isinstance(row, list) else [row])]


@dataclass
class StreamAnswer:
    """An answer of either format."""

    kind: str
    offset: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tensors: list[Vectors] = field(default_factory=list)
    step: int = 0
    detail: str = ""
    status: int = 0


def read_frame(answer: Any) -> StreamAnswer:
    magic, version, kind, flags, number, rows, tokens, dtype, last = FRAME.unpack_from(answer)
    assert (magic, version, flags) == (b"PRBK", 2, 0)
    body = answer[FRAME.size :]
    if kind == ERROR:
        problem = json.loads(body)
        return StreamAnswer("error", step=number, detail=problem["detail"], status=problem["status"])
    offset = list(struct.unpack_from(f"<{rows}q", body))
    body = body[8 * rows :]
    if kind != VECTORS:
        return StreamAnswer({STATE: "state", CLOSING: "closing"}[kind], offset, step=number, detail=body.decode())
    assert dtype == 1
    lengths = list(struct.unpack_from(f"<{rows}I", body))
    widths = struct.unpack_from(f"<{last[0]}I", body, 4 * rows)
    values = np.frombuffer(body, "<f4", offset=4 * (rows + len(widths)))
    assert (sum(lengths), len(values)) == (tokens, tokens * sum(widths))
    parts = np.split(values, np.cumsum(widths)[:-1] * tokens)
    tensors = [part.reshape(tokens, width) for part, width in zip(parts, widths, strict=True)]
    return StreamAnswer("vectors", offset, lengths, tensors, number)


def read_document(document: Any) -> StreamAnswer:
    number = document.get("step", 0)
    if error := document.get("error"):
        return StreamAnswer("error", step=number, detail=error["detail"], status=error["status"])
    offset, names = document["next_offset"], document.get("outputs", {"embeddings": None})
    if "shape" not in document and "outputs" not in document:
        return StreamAnswer("closing" if "closing" in document else "state", offset, step=number)
    found = [vectors_of(document, name) for name in names]
    lengths = document.get("lengths", [found[0].shape[1]] * len(offset))
    return StreamAnswer("vectors", offset, lengths, [part.reshape(-1, part.shape[-1]) for part in found], number)


Ask = Callable[..., StreamAnswer]


def as_text(stream: ClientConnection, **fields: Any) -> StreamAnswer:
    """Send a message of JSON, and read its answer."""
    return read_document(tell(stream, **fields))


def tell(stream: ClientConnection, **fields: Any) -> Any:
    """Send a message of JSON, and return its answer as a document."""
    stream.send(json.dumps(fields))
    return json.loads(stream.recv())


def as_frame(stream: ClientConnection, **fields: Any) -> StreamAnswer:
    """Send a frame, and read its answer."""
    number = fields.pop("step", 0)
    if "input_ids" in fields:
        stream.send(step(fields.pop("input_ids"), number, **fields))
    else:
        ((name, value),) = fields.items()
        stream.send(operation(KINDS[name], *([] if value is True else value), number=number))
    return read_frame(stream.recv())


def stream_of(clients: Clients, path: str) -> ClientConnection:
    """Open a stream; `path` is a model with a query, or `model/versions/number`."""
    model, _, query = path.partition("?")
    return connect(f"{clients.socket}/models/{model}/decode?{query}", max_size=None)
