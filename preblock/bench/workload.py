"""The target of the load, and its requests as bytes: one builder for each protocol."""

import io
import ssl

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

from preblock import __version__
from preblock.client.access import authorization, read_access
from preblock.client.errors import invalid
from preblock.client.results import Model
from preblock.client.transport import model_path

Ids = NDArray[np.int64]
NPY, BYTES, JSON = "application/x-npy", "application/octet-stream", "application/json"


class LoadTarget:
    """A model of a server.

    Args:
        url: URL of the server, http://… or https://….
        model: name of the model.
        key: API key.
        grpc_port: gRPC port of the server.
        version: version of the model; default the highest.

    Raises:
        RequestError: `url` is not an HTTP URL of TCP, or `key` cannot be sent.

    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None = None,
        grpc_port: int | None = None,
        version: int | None = None,
    ) -> None:
        if read_access(url, None, key).uds is not None:
            raise invalid("url", url, "an address of TCP, http://… or https://…")
        self.url, self.model, self.key, self.grpc_port, self.version = url, model, key, grpc_port, version
        self.address = httpx.URL(url)
        secure = self.address.scheme == "https"
        self.host, self.port = self.address.host, self.address.port or (443 if secure else 80)
        self.tls = ssl.create_default_context() if secure else None
        self.headers = {"User-Agent": f"preblock/{__version__}", **authorization(key)}

    def path(self, action: str, prefix: str = "") -> str:
        """Return the path of an action on the model, such as "embed", below the URL and `prefix`."""
        return self.address.raw_path.decode().rstrip("/") + prefix + model_path(self.model, self.version, action)

    def post(self, path: str, headers: dict[str, str], body: bytes) -> bytes:
        """Return an HTTP/1.1 request."""
        own = {"Host": self.address.netloc.decode(), "Content-Length": str(len(body))}
        stated = own | self.headers | headers
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in stated.items())]
        return "\r\n".join((*lines, "\r\n")).encode() + body


def npy(target: LoadTarget, ids: Ids) -> bytes:
    """Return a request with `.npy` in both directions."""
    body = io.BytesIO()
    np.save(body, ids)
    headers = {"Content-Type": NPY, "Accept": NPY}
    return target.post(target.path("embed"), headers, body.getvalue())


def v2(target: LoadTarget, ids: Ids) -> bytes:
    """Return a request of the Open Inference Protocol, with binary tensors in both directions."""
    tensor = {"name": "input_ids", "shape": ids.shape, "datatype": "INT64"}
    head = orjson.dumps(
        {
            "inputs": [tensor | {"parameters": {"binary_data_size": ids.nbytes}}],
            "outputs": [{"name": "embeddings", "parameters": {"binary_data": True}}],
        }
    )
    headers = {"Content-Type": BYTES, "Inference-Header-Content-Length": str(len(head))}
    return target.post(target.path("infer", "/v2"), headers, head + ids.tobytes())


def json(target: LoadTarget, ids: Ids) -> bytes:
    """Return a request with JSON in both directions, the vectors in base64."""
    headers = {"Content-Type": JSON, "Accept": JSON}
    return target.post(target.path("embed"), headers, orjson.dumps({"input_ids": ids.tolist()}))


def random_ids(model: Model, shape: tuple[int, int]) -> Ids:
    """Return random ids for a model, the same in every run.

    Raises:
        RequestError: the model takes no ids, or not of that shape.

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
