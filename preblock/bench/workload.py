"""Where the load goes, and what is sent: a request of every protocol, as the bytes of HTTP or of a message."""

import io
import ssl
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

from preblock import __version__
from preblock.client.errors import invalid
from preblock.client.frames import REWIND, Move, Step, write_frame
from preblock.client.results import Model
from preblock.client.transport import authorization, options

Ids = NDArray[np.int64]
NPY, BYTES, JSON = "application/x-npy", "application/octet-stream", "application/json"


@dataclass(frozen=True)
class Target:
    """A model of a server.

    Args:
        url: of the server, http://… or https://…, as the client takes it.
        model: name of the model.
        key: that the server asks for.
        grpc_port: of its gRPC.

    Raises:
        Invalid: the address or the key cannot be one.

    """

    url: str
    model: str
    key: str | None = None
    grpc_port: int | None = None

    def __post_init__(self) -> None:
        options(self.url, 0, self.key)

    @property
    def address(self) -> httpx.URL:
        """The address in its parts."""
        return httpx.URL(self.url)

    @property
    def host(self) -> str:
        """Name or number of the host."""
        return self.address.host

    @property
    def port(self) -> int:
        """Port of HTTP and WebSocket."""
        return self.address.port or (443 if self.address.scheme == "https" else 80)

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """What checks the server's certificate; None without TLS."""
        return ssl.create_default_context() if self.address.scheme == "https" else None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"User-Agent": f"preblock/{__version__}", **authorization(self.key)}

    def path(self, *parts: str) -> str:
        """Return the path of what lies below the address."""
        return "/".join((self.address.raw_path.decode().rstrip("/"), *(quote(part, safe="") for part in parts)))

    def post(self, path: str, headers: dict[str, str], body: bytes) -> bytes:
        """Return a request of HTTP/1.1."""
        own = {"Host": self.address.netloc.decode(), "Content-Length": str(len(body))}
        stated = own | self.headers | headers
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in stated.items())]
        return "\r\n".join((*lines, "\r\n")).encode() + body


def npy(target: Target, ids: Ids) -> bytes:
    """Ask for `.npy` with `.npy`."""
    body = io.BytesIO()
    np.save(body, ids)
    headers = {"Content-Type": NPY, "Accept": NPY}
    return target.post(target.path("models", target.model, "embed"), headers, body.getvalue())


def v2(target: Target, ids: Ids) -> bytes:
    """Ask by the Open Inference Protocol, for binary tensors with such."""
    tensor = {"name": "input_ids", "shape": ids.shape, "datatype": "INT64"}
    head = orjson.dumps(
        {
            "inputs": [tensor | {"parameters": {"binary_data_size": ids.nbytes}}],
            "outputs": [{"name": "embeddings", "parameters": {"binary_data": True}}],
        }
    )
    headers = {"Content-Type": BYTES, "Inference-Header-Content-Length": str(len(head))}
    return target.post(target.path("v2", "models", target.model, "infer"), headers, head + ids.tobytes())


def json(target: Target, ids: Ids) -> bytes:
    """Ask with JSON, for JSON that holds the vectors in base64."""
    headers = {"Content-Type": JSON, "Accept": JSON}
    return target.post(target.path("models", target.model, "embed"), headers, orjson.dumps({"input_ids": ids.tolist()}))


def step(ids: Ids) -> bytes:
    """Return the frame that feeds each row its next tokens."""
    return write_frame(Step({"input_ids": ids.ravel()}, np.full(len(ids), ids.shape[1])), 0, (), ())


def rewind() -> bytes:
    """Return the frame that takes all rows back to the beginning."""
    return write_frame(Move(REWIND, np.zeros(1, np.int64)), 0, (), ())


def random_ids(model: Model, shape: tuple[int, int]) -> Ids:
    """Return ids of a model, the same every time.

    Raises:
        Invalid: the model takes none, or none of that shape.

    """
    vocabulary = model.manifest.get("vocab_size")
    if vocabulary is None:
        raise invalid("model", f"{model.name}, of {model.manifest.get('kind')}", "a model of token ids")
    rows, length = shape
    if model.max_len is not None and length > model.max_len:
        raise invalid("shape", f"{rows},{length}", f"at most {model.max_len} tokens of a row")
    if rows * length > model.max_tokens:
        raise invalid("shape", f"{rows},{length}", f"at most {model.max_tokens} tokens")
    return np.random.default_rng(0).integers(0, vocabulary, shape)
