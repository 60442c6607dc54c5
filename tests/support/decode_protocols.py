"""Requests to decode streams: JSON messages and frames over a WebSocket."""

import base64
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from websockets import InvalidStatus
from websockets.sync.client import connect as connect_socket

from tests.support.protocols import ERROR, STEP, Clients, Fields, RequestRefused, Vectors

FRAME = struct.Struct("<4sBBHIIIB3s")


def decode_json(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Send one row as one step of a new stream."""
    step = {name: value for name, value in fields.items() if name != "offset"}
    with open_stream(clients, model, fields) as stream:
        stream.send(json.dumps(step))
        answer = json.loads(stream.recv())
    if "error" in answer:
        raise RequestRefused(answer["error"]["status"], answer["error"]["detail"])
    return np.frombuffer(base64.b64decode(answer["embeddings"]), "<f4").reshape(-1, answer["shape"][-1])


def decode_frame(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Send one row as one binary step of a new stream."""
    with open_stream(clients, model, fields) as stream:
        stream.send(step_frame(fields["input_ids"][0]))
        frame = stream.recv()
    assert isinstance(frame, bytes)
    if frame[5] == ERROR:
        problem = json.loads(frame[FRAME.size :])
        raise RequestRefused(problem["status"], problem["detail"])
    return read_vectors(frame)


@contextmanager
def open_stream(clients: Clients, model: str, options: Fields) -> Iterator[Any]:
    query = "".join(f"?{name}={options[name]}" for name in ("offset",) if name in options)
    try:
        with connect_socket(f"{clients.socket}/models/{model}/decode{query}", max_size=None) as stream:
            yield stream
    except InvalidStatus as error:
        raise RequestRefused(error.response.status_code, json.loads(error.response.body or b"{}")["detail"]) from error


def step_frame(ids: list[int], number: int = 0) -> bytes:
    """Write a step as `docs/decode.md` describes it."""
    header = FRAME.pack(b"PRBK", 2, STEP, 0, number, 1, len(ids), 0, bytes(3))
    return header + np.array(ids, "<i8").tobytes() + np.array([len(ids)], "<u4").tobytes()


def read_vectors(frame: bytes) -> Vectors:
    """Return the vectors (T, D) of the answer to a step of one row, with one output in float32."""
    (width,) = struct.unpack_from("<I", frame, FRAME.size + 12)
    return np.frombuffer(frame, "<f4", offset=FRAME.size + 16).reshape(-1, width)
