"""Contents of requests and answers of each format: ids in, the vectors' bytes out."""

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from tests.support.open_inference import HEADER_LENGTH, binary_infer

BYTES, NPY = "application/octet-stream", "application/x-npy"
BINARY = {"Content-Type": BYTES, "Accept": BYTES}
JSON = {"Content-Type": "application/json"}
LONG_BYTES = 2**16
"""Length of a JSON body that a thread parses."""
Ids = NDArray[np.int64]
Request = tuple[str, dict[str, str], bytes]
Write = Callable[[Ids, int, str], Request]
"""Makes path, headers and body of a request from ids, offset and model."""
Read = Callable[[httpx.Response], bytes]
"""Returns the vectors of an answer of status 200."""


class ProblemError(Exception):
    """An error within the body of an answer of status 200, as a line or an event."""

    def __init__(self, document: Any) -> None:
        super().__init__(document)
        self.status = int(document["error"]["status"])
        self.message = message_of(document)


def message_of(document: Any) -> bytes:
    """Return the message of an error, in the form of the native API, V2 or OpenAI."""
    error = document.get("error", document)
    return str(error if isinstance(error, str) else error.get("detail") or error["message"]).encode()


def write_native(ids: Ids, offset: int, model: str) -> Request:
    query = f"offset={offset}&shape={ids.shape[0]},{ids.shape[1]}"
    return f"/models/{model}/embed?{query}", BINARY, ids.astype("<i8").tobytes()


def write_json(ids: Ids, offset: int, model: str, length: int = 0) -> Request:
    """Write a native request of at least `length` bytes."""
    body = json.dumps({"input_ids": ids.tolist(), "offset": offset}).encode()
    return f"/models/{model}/embed", JSON, body[:-1].ljust(length) + body[-1:]


def write_npy(ids: Ids, offset: int, model: str) -> Request:
    body = io.BytesIO()
    np.save(body, ids)
    return f"/models/{model}/embed?offset={offset}", {"Content-Type": NPY, "Accept": NPY}, body.getvalue()


def write_v2_binary(ids: Ids, offset: int, model: str) -> Request:
    tensors = {"input_ids": ids, "offset": np.array([offset])}
    return f"/v2/models/{model}/infer", *binary_infer(tensors, parameters={"binary_data_output": True})


def write_openai(ids: Ids, offset: int, model: str) -> Request:
    document = {"model": model, "input": ids.tolist(), "encoding_format": "base64", "pooling": "none"}
    assert offset == 0
    return "/v1/embeddings", JSON, json.dumps(document).encode()


def write_ndjson(ids: Ids, offset: int, model: str) -> Request:
    path = f"/models/{model}/decode?rows={len(ids)}&offset={offset}"
    body = json.dumps({"input_ids": ids.tolist()}).encode() + b"\n"
    return path, {"Content-Type": "application/x-ndjson"}, body


def write_events(ids: Ids, offset: int, model: str) -> Request:
    document = {"input_ids": ids.tolist(), "offset": offset, "chunk": max(1, ids.shape[1])}
    return f"/models/{model}/decode", JSON | {"Accept": "text/event-stream"}, json.dumps(document).encode()


def read_bytes(answer: httpx.Response) -> bytes:
    return answer.content


def read_npy(answer: httpx.Response) -> bytes:
    return bytes(np.load(io.BytesIO(answer.content)).tobytes())


def read_base64(answer: httpx.Response) -> bytes:
    return read_step(answer.json())


def read_v2_binary(answer: httpx.Response) -> bytes:
    return answer.content[int(answer.headers[HEADER_LENGTH]) :]


def read_openai(answer: httpx.Response) -> bytes:
    return b"".join(base64.b64decode(item["embedding"]) for item in answer.json()["data"])


def read_ndjson(answer: httpx.Response) -> bytes:
    return read_step(json.loads(answer.text.splitlines()[0]))


def read_event(answer: httpx.Response) -> bytes:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return read_step(json.loads(lines[0]))


def read_step(document: Any) -> bytes:
    """Return the vectors of a JSON answer, a line, an event or a message."""
    if "error" in document:
        raise ProblemError(document)
    return base64.b64decode(document["embeddings"])
