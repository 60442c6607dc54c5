"""HTTP protocols with one answer per request: the native API, the Open Inference Protocol, and OpenAI's API."""

import base64
import gzip
import io
import json
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import numpy as np
import safetensors.numpy

from benchmarks.soak.batches import Batch
from benchmarks.soak.common import Soak, Truth, Vectors, expect, flat
from benchmarks.soak.questions import Array, Question, Refusal

JSON, NPY, BYTES = "application/json", "application/x-npy", "application/octet-stream"
SAFETENSORS = "application/x-safetensors"
ACCEPT = {"npy": NPY, "raw": BYTES, "safetensors": SAFETENSORS}
DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
CODES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP16": np.dtype("<f2")}
HEADER = "Inference-Header-Content-Length"
MOST_FLOATS = 4096
"""Largest number of tokens for vectors as decimal text; parsing more takes seconds."""
IN_QUERY = 256
"""Largest number of tokens for fields in a query string."""
POOLING: dict[str, Callable[[Vectors], Vectors]] = {
    "first": lambda vectors: vectors[:1],
    "last": lambda vectors: vectors[-1:],
    "mean": lambda vectors: (np.cumsum(vectors, 0, np.float64)[-1:] / len(vectors)).astype(np.float32),
    "none": lambda vectors: vectors,
}


class Http:
    """An HTTP protocol.

    Args:
        soak: state shared by all clients.
        address: URL of the server.

    """

    def __init__(self, soak: Soak, address: str) -> None:
        self.soak = soak
        self._client = httpx.AsyncClient(base_url=address, timeout=None)

    async def ask(self, question: Question) -> httpx.Response:
        """Send a question, and return the answer with status 200."""
        answer = await self._client.post(question.path, content=question.body, headers=question.headers)
        if 400 <= answer.status_code < 500:
            raise Refusal(f"{answer.status_code} {answer.text}")
        expect(answer.status_code == 200, f"{question.path} {question.headers}", f"{answer.status_code} {answer.text}")
        self.soak.counts["compressed"] += "Content-Encoding" in answer.headers
        return answer

    async def leave(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def coded(question: Question, random: np.random.Generator) -> Question:
    """Return a question with a random Accept-Encoding, sometimes with a compressed body."""
    accepted = str(random.choice(("identity", "gzip", "deflate", "gzip, deflate"), p=(0.85, 0.05, 0.05, 0.05)))
    headers, body = question.headers | {"Accept-Encoding": accepted}, question.body
    if random.random() < 0.1:
        headers, body = headers | {"Content-Encoding": "gzip"}, gzip.compress(body, 1)
    return Question(body, question.expected, question.read, question.path, headers)


class Embed(Http):
    """`POST /models/{name}/embed`."""

    name, fields, rectangular = "embed", True, False

    def write(self, batch: Batch, random: np.random.Generator) -> Question:
        """Return a request with one of four body formats, for one of six answer formats."""
        answers = ["base64", "float", "prompt_embeds", *ACCEPT]
        if batch.size > MOST_FLOATS:
            answers.remove("float")
        if "attention_mask" in batch.fields:
            answers.remove("prompt_embeds")
        answer, dtype = str(random.choice(answers)), str(random.choice(list(DTYPES), p=(0.7, 0.3)))
        asked = {"dtype": dtype}
        if answer not in ACCEPT:
            asked["encoding"] = answer
        lookups = answer == "prompt_embeds"
        if lookups:
            asked["output"] = "token_embeddings"
        kinds = [JSON, SAFETENSORS]
        if batch.size <= IN_QUERY or batch.fields.keys() <= {"offset"}:
            kinds += [NPY, BYTES]
        kind = str(random.choice(kinds))
        body, query = write_body(kind, batch, asked)
        truth = self.soak.truth

        def expected() -> Array:
            if lookups:
                return truth.lookups(batch.ids).astype(DTYPES[dtype])
            return batch.shaped(truth.vectors(batch.ids, batch.places)).astype(DTYPES[dtype])

        path = str(httpx.URL(f"/models/{self.soak.model}/embed", params=query))
        headers = {"Content-Type": kind, "Accept": ACCEPT.get(answer, JSON)}
        question = Question(body, expected, lambda found: read_native(found, answer, DTYPES[dtype]), path, headers)
        return coded(question, random)


def write_body(kind: str, batch: Batch, asked: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    """Return a body in this format, and the remaining fields as a query."""
    if kind == JSON:
        return json.dumps({"input_ids": batch.ids} | batch.fields | asked).encode(), {}
    ids, lengths = flat(batch.ids), [len(row) for row in batch.ids]
    if not batch.ragged:
        ids = ids.reshape(len(lengths), -1)
    if kind == SAFETENSORS:
        tensors = {"input_ids": ids} | {
            name: np.array(value) if name == "offset" else flat(value).reshape(ids.shape)
            for name, value in batch.fields.items()
        }
        if batch.ragged:
            tensors["lengths"] = np.array(lengths)
        return safetensors.numpy.save(tensors), asked
    query = asked | {name: json.dumps(value, separators=(",", ":")) for name, value in batch.fields.items()}
    if batch.ragged:
        query["lengths"] = json.dumps(lengths)
    if kind == NPY:
        file = io.BytesIO()
        np.save(file, ids)
        return file.getvalue(), query
    if not batch.ragged:
        query["shape"] = ",".join(map(str, ids.shape))
    return ids.astype("<i8").tobytes(), query


def read_native(answer: httpx.Response, kind: str, dtype: np.dtype[Any]) -> Array:
    """Return the vectors of an answer in this format."""
    if kind == "npy":
        vectors: Array = np.load(io.BytesIO(answer.content))
    elif kind == "raw":
        shape = tuple(map(int, answer.headers["Preblock-Shape"].split(",")))
        vectors = np.frombuffer(answer.content, dtype).reshape(shape)
    elif kind == "safetensors":
        vectors = safetensors.numpy.load(answer.content)["embeddings"]
    elif kind == "prompt_embeds":
        files = answer.json()["token_embeddings"]
        found = [read_torch(file, dtype) for file in ([files] if isinstance(files, str) else files)]
        vectors = np.concatenate(found).reshape(-1, answer.json()["shape"][-1])
    else:
        document = answer.json()
        found = document["embeddings"]
        flattened = np.frombuffer(base64.b64decode(found), dtype) if kind == "base64" else np.array(found, dtype)
        vectors = flattened.reshape(document["shape"])
    return vectors


def read_torch(file: str, dtype: np.dtype[Any]) -> Array:
    """Return the values of a tensor saved by torch, in base64."""
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(file))) as archive:
        return np.frombuffer(archive.read("archive/data/0"), dtype)


class Infer(Http):
    """`POST /v2/models/{name}/infer`, in JSON and with binary tensors."""

    name, fields, rectangular = "infer", True, True

    def write(self, batch: Batch, random: np.random.Generator) -> Question:
        """Return a request with JSON or binary data for each input; the answer is JSON or binary."""
        binary = batch.size > MOST_FLOATS or bool(random.random() < 0.5)
        code = "FP16" if binary and random.random() < 0.3 else "FP32"
        inputs, parts = [], []
        for name, values in tensors_of(batch).items():
            tensor: dict[str, Any] = {"name": name, "shape": values.shape, "datatype": "INT64"}
            if random.random() < 0.5:
                parts.append(values.tobytes())
                tensor["parameters"] = {"binary_data_size": values.nbytes}
            else:
                tensor["data"] = (values if random.random() < 0.5 else values.ravel()).tolist()
            inputs.append(tensor)
        parameters = batch.parameters | {"binary_data_output": binary, "dtype": code}
        outputs = [{"name": "embeddings"}]
        head = json.dumps({"inputs": inputs, "outputs": outputs, "parameters": parameters}).encode()
        headers = {"Content-Type": BYTES, HEADER: str(len(head))} if parts else {"Content-Type": JSON}
        body, path = b"".join((head, *parts)), f"/v2/models/{self.soak.model}/infer"
        return coded(Question(body, partial(vectors_of, batch, self.soak.truth, code), read_v2, path, headers), random)


def tensors_of(batch: Batch) -> dict[str, Array]:
    """Return the inputs of a batch by name. The ids come last, so a truncated gRPC message lacks them."""
    return {name: np.array(values, "<i8") for name, values in (batch.fields | {"input_ids": batch.ids}).items()}


def vectors_of(batch: Batch, truth: Truth, code: str) -> Array:
    """Return the vectors of a batch in a type of the protocol."""
    return batch.shaped(truth.vectors(batch.ids, batch.places)).astype(CODES[code])


def read_v2(answer: httpx.Response) -> Array:
    """Return the vectors of an answer of the Open Inference Protocol."""
    size = int(answer.headers.get(HEADER, len(answer.content)))
    (output,) = json.loads(answer.content[:size])["outputs"]
    kind = CODES[output["datatype"]]
    values: Array = np.array(output["data"], kind) if "data" in output else np.frombuffer(answer.content[size:], kind)
    return values.reshape(output["shape"])


class OpenAIEmbeddings(Http):
    """`POST /v1/embeddings`, of ids alone; rows begin at position 0."""

    name, fields, rectangular = "embeddings", False, False

    def write(self, batch: Batch, random: np.random.Generator) -> Question:
        """Return a request for one pooled vector per row, or for all vectors."""
        pooling = str(random.choice(list(POOLING)))
        few = pooling != "none" or batch.size <= MOST_FLOATS
        encoding = str(random.choice(("float", "base64"))) if few else "base64"
        asked = {"model": self.soak.model, "input": batch.ids, "encoding_format": encoding, "pooling": pooling}
        truth = self.soak.truth

        def expected() -> Array:
            rows = [truth.vectors([ids], [places]) for ids, places in zip(batch.ids, batch.places, strict=True)]
            return np.concatenate([POOLING[pooling](row) for row in rows]).ravel()

        body = json.dumps(asked | batch.fields).encode()
        return coded(Question(body, expected, read_openai, "/v1/embeddings", {"Content-Type": JSON}), random)


def read_openai(answer: httpx.Response) -> Array:
    """Return the embeddings of all rows as one flat array."""
    found = [one["embedding"] for one in answer.json()["data"]]
    rows = [
        np.frombuffer(base64.b64decode(one), "<f4") if isinstance(one, str) else np.array(one, "<f4") for one in found
    ]
    return np.concatenate([row.ravel() for row in rows])
