"""The calls of a client, as coroutines over either transport."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode

import numpy as np

from preblock.client.async_stream import AsyncDecodeStream
from preblock.client.errors import ServerError, invalid, needed
from preblock.client.results import Embeddings, Model, Vectors
from preblock.client.retry import retry
from preblock.client.safetensors import read_safetensors, write_safetensors
from preblock.client.token_ids import Row, Rows, from_torch, read_integers
from preblock.client.transport import AsyncTransport, SyncTransport, model_path

T = TypeVar("T")

JSON, SAFETENSORS = "application/json", "application/x-safetensors"


class ModelApi:
    """The calls to one server.

    Args:
        transport: the connections to the server.
        retries: most further attempts of a call.

    """

    def __init__(self, transport: AsyncTransport | SyncTransport, retries: int) -> None:
        self._transport, self._retries = transport, retries

    async def embed(
        self,
        /,
        ids: Rows,
        *,
        model: str,
        version: int | None = None,
        offset: int | Row | None = None,
        position_ids: Rows | None = None,
        attention_mask: Rows | None = None,
        truncate: str | None = None,
        output: str = "embeddings",
        dtype: str = "float32",
        **indices: Rows,
    ) -> Embeddings:
        """Return the vectors that enter block 0.

        Args:
            ids: rows of token ids: lists, an integer array (B, L), or tensors. Rows may differ in length; a flat list
                is one row. Arrays and tensors of one length are fastest.
            model: name of the model.
            version: version of the model; default the highest.
            offset: real tokens fed before, one number or one for each row; default 0.
            position_ids: position index of each token, like `ids`; excludes `offset`.
            attention_mask: 1 for a real token, 0 for padding, like `ids`; default 1.
            truncate: "left" or "right", the side to cut of a row over the limit; default is an error.
            output: name of the output.
            dtype: "float32", "float16" or "bfloat16".
            indices: `token_type_ids` and further inputs of the model, like `ids`.

        Raises:
            ServiceError: the service refuses the request, or cannot answer it.
            NoAnswer: no answer came.

        """
        rows = _given(input_ids=ids, offset=offset, position_ids=position_ids, attention_mask=attention_mask, **indices)
        names = _given(truncate=truncate, output=output, dtype=dtype)
        path, read = model_path(model, version, "embed"), partial(_read_embeddings, output)
        if isinstance(offset, int):
            rows["offset"] = np.array([offset])
        if not all(isinstance(value, np.ndarray) and value.dtype.kind in "iu" for value in rows.values()):
            return await self._post(path, rows | _given(offset=offset) | names, SAFETENSORS, read)
        headers = {"Accept": SAFETENSORS, "Content-Type": SAFETENSORS}
        return await self._send("POST", f"{path}?{urlencode(names)}", read, write_safetensors(rows), headers)

    async def text(
        self,
        text: str | Sequence[str],
        *,
        model: str,
        version: int | None = None,
        offset: int | Row | None = None,
        truncate: str | None = None,
        output: str = "embeddings",
        dtype: str = "float32",
        return_tokens: bool = False,
    ) -> Embeddings:
        """Return the vectors of texts, for a model with a tokenizer.

        Args:
            text: one text for each row, or a single text.
            model: name of the model.
            version: version of the model; default the highest.
            offset: real tokens fed before, one number or one for each row; default 0.
            truncate: "left" or "right", the side to cut of a row over the limit; default is an error.
            output: name of the output.
            dtype: "float32", "float16" or "bfloat16".
            return_tokens: whether the result has `input_ids` and `spans`.

        Raises:
            ServiceError: the service refuses the request, or cannot answer it.
            NoAnswer: no answer came.

        """
        options = _given(offset=offset, truncate=truncate, output=output, dtype=dtype, return_tokens=return_tokens)
        path, read = model_path(model, version, "embed"), partial(_read_embeddings, output)
        return await self._post(path, {"text": text, **options}, SAFETENSORS, read)

    async def prompt_embeds(
        self, ids: Rows, *, model: str, version: int | None = None, dtype: str = "float32"
    ) -> list[str]:
        """Return each row for the field `prompt_embeds` of vLLM: a tensor saved by torch, in base64.

        Args:
            ids: rows of token ids, as for `embed`.
            model: name of the model; its manifest must say who applies the embedding scale.
            version: version of the model; default the highest.
            dtype: "float32", "float16" or "bfloat16".

        Raises:
            ServiceError: the service refuses the request, or cannot answer it.
            NoAnswer: no answer came.

        """
        document = {"input_ids": ids, "dtype": dtype, "encoding": "prompt_embeds"}
        return await self._post(model_path(model, version, "embed"), document, JSON, _read_prompts)

    async def bias(
        self,
        query_length: int,
        key_length: int,
        *,
        model: str,
        version: int | None = None,
        query_offset: int | None = None,
        dtype: str = "float32",
    ) -> Vectors:
        """Return the attention bias for distances between queries and keys: (1, heads, Q, K); of a sinusoid (rows, D).

        Args:
            query_length: queries, Q.
            key_length: keys, K, at positions 0 to K - 1.
            model: name of a model with an attention bias.
            version: version of the model; default the highest.
            query_offset: keys fed before the first query; default 0.
            dtype: "float32", "float16" or "bfloat16".

        Raises:
            ServiceError: the service refuses the request, or cannot answer it.
            NoAnswer: no answer came.

        """
        lengths = {"query_length": query_length, "key_length": key_length}
        options = _given(query_offset=query_offset, dtype=dtype)
        return await self._post(model_path(model, version, "bias"), lengths | options, SAFETENSORS, _read_only_tensor)

    async def models(self) -> list[Model]:
        """Return every model, in its highest version.

        Raises:
            ServiceError: the service cannot answer.
            NoAnswer: no answer came.

        """
        return await self._send("GET", "/models", lambda body: list(map(_read_model, json.loads(body))))

    async def model(self, name: str, version: int | None = None) -> Model:
        """Return one model; default in its highest version.

        Raises:
            ServiceError: no such model or version (kind "NotFound"), or the service cannot answer.
            NoAnswer: no answer came.

        """
        return await self._send("GET", model_path(name, version), lambda body: _read_model(json.loads(body)))

    def decode(
        self,
        model: str,
        *,
        version: int | None = None,
        offset: int | Row = 0,
        rows: int | None = None,
        output: str = "embeddings",
        companions: Sequence[str] = (),
        dtype: str = "float32",
        resume: bool = False,
    ) -> AsyncDecodeStream:
        """Open a decode stream, for a `with` block; with an `AsyncClient`, `async with` and `await`.

        Args:
            model: name of the model.
            version: version of the model; default the highest at the first opening.
            offset: real tokens fed before, one number or one for each row.
            rows: number of rows, if `offset` is one number; default 1. May be 0.
            output: name of the output of a step.
            companions: further outputs, such as "rotary_cos" and "rotary_sin", found in `stream.companions` after a
                step.
            dtype: "float32", "float16" or "bfloat16".
            resume: whether to continue over a new connection after one breaks, with the retries and pauses of a call.

        Raises:
            ServiceError: the service refuses the stream.
            NoAnswer: no connection, or no answer in time.

        """
        with needed("a decode stream", "websockets"):
            from preblock.client.sockets import make_socket
        given = read_integers("offset", offset).tolist()
        count = len(given) if rows is None else rows
        # The service rejects an empty list of offsets.
        opening = {"offset": given if count else 0, "rows": count, "output": [output, *companions], "dtype": dtype}
        retries = self._retries if resume else None
        return AsyncDecodeStream(make_socket(self._transport.http), model, version, opening, retries)

    async def _post(self, path: str, document: Mapping[str, Any], accept: str, read: Callable[[bytearray], T]) -> T:
        body = json.dumps(document, default=_listed).encode()
        return await self._send("POST", path, read, body, {"Accept": accept, "Content-Type": JSON})

    async def _send(
        self, method: str, path: str, read: Callable[[bytearray], T], body: bytes = b"", headers: Mapping[str, str] = {}
    ) -> T:
        """Send a request, and return its answer as `read` returns it."""
        request = partial(self._transport.request, method, path, body, headers)
        answer = await retry(request, self._retries, self._transport.sleep)
        try:
            return read(answer)
        except (KeyError, TypeError, ValueError) as error:
            detail = f"{path}: the answer is not from Preblock ({error!r})"
            raise ServerError({"status": 200, "detail": detail}) from error


def _given(**options: Any) -> dict[str, Any]:
    """Return the options other than None, tensors as arrays."""
    return {name: from_torch(value) for name, value in options.items() if value is not None}


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array, a tensor, or one of their scalars
        return value.tolist()
    raise invalid("request", f"a {type(value).__name__}", "numbers, and lists, arrays or tensors of them")


def _read_embeddings(output: str, body: bytearray) -> Embeddings:
    tensors, metadata = read_safetensors(body)
    lengths = tensors["lengths"]
    input_ids, spans = (
        np.split(tensors[name], np.cumsum(lengths)[:-1]) if name in tensors else None for name in ("input_ids", "spans")
    )
    return Embeddings(
        model=metadata["model"],
        version=int(metadata["version"]),
        vectors=tensors[output],
        lengths=lengths,
        next_offset=tensors["next_offset"],
        truncated=tensors.get("truncated"),
        input_ids=input_ids,
        spans=spans,
    )


def _read_only_tensor(body: bytearray) -> Vectors:
    tensors, _ = read_safetensors(body)
    (tensor,) = tensors.values()
    return tensor


def _read_prompts(body: bytearray) -> list[str]:
    prompts = json.loads(body)["token_embeddings"]
    return [prompts] if isinstance(prompts, str) else list(prompts)


def _read_model(document: Mapping[str, Any]) -> Model:
    """Read a model. Unknown fields, of a later service, are ignored."""
    return Model(**{known.name: document[known.name] for known in fields(Model)})
