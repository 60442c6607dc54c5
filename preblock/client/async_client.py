"""The asynchronous client. `sync_client.py` is generated from this file."""

from __future__ import annotations  # help() then shows the names of types, not their unions

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import httpx

from preblock.client import calls
from preblock.client.access import Certificate, Verify, read_replicas
from preblock.client.async_retry import retry
from preblock.client.async_stream import AsyncDecodeStream
from preblock.client.calls import Call, Dtype, InText, Pooling, Side, TableDtype
from preblock.client.errors import NoAnswer, ServiceError, invalid
from preblock.client.parts import Parts, Placeholder
from preblock.client.results import Embeddings, Model, Vectors
from preblock.client.retry import read_retries
from preblock.client.token_ids import Row, Rows, add_indices, list_rows, read_integers
from preblock.client.transport import AsyncTransport, model_path

T = TypeVar("T")


class AsyncClient:
    """A client of a service, for `async with`; tasks and threads may share it.

    Every method raises `ServiceError` if the service refuses the request or cannot answer it, and `NoAnswer` if no
    answer comes.

    Args:
        url: http://… or https://…, with the path prefix of the service, if any. Several are replicas with the same
            models: the client stays with one, and turns to the next when it fails or is busy. A Unix socket is
            http+unix://PATH with %2F for each slash of the path, such as http+unix://%2Frun%2Fpreblock.sock.
        timeout: seconds for connecting, and for each read and write.
        retries: most further attempts of a call, after a broken connection or while the service is too busy.
        key: API key; default none.
        verify: certificates to trust: True for the usual ones, False for any, a file or folder in PEM, or a context.
        cert: the client's own certificate in PEM: a file with its key, or a tuple (certificate, key[, password]).
        http_client: an own httpx client for the calls, with proxies or a transport. It is not closed. Streams do not
            use it, and `verify` and `cert` then apply to them only.

    Raises:
        RequestError: an argument cannot be used, or a certificate cannot be read.

    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        timeout: float = 30.0,
        retries: int = 3,
        key: str | None = None,
        verify: Verify = True,
        cert: Certificate | None = None,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        if not isinstance(http_client, httpx.AsyncClient | None):
            raise invalid("http_client", f"a {type(http_client).__name__}", "an httpx.AsyncClient")
        self._replicas = read_replicas(url, timeout, key, verify, cert)
        self._transport = AsyncTransport(self._replicas, http_client)
        self._retries = read_retries(retries)

    async def embed(
        self,
        ids: Rows | None = None,
        *,
        model: str,
        version: int | None = None,
        parts: Parts | None = None,
        placeholder: Placeholder | None = None,
        offset: int | Row | None = None,
        context: Rows | None = None,
        position_ids: Rows | Sequence[Rows] | None = None,
        position_rows: Rows | None = None,
        attention_mask: Rows | None = None,
        token_type_ids: Rows | None = None,
        indices: Mapping[str, Rows] | None = None,
        truncate: Side | None = None,
        pooling: Pooling | None = None,
        output: str = "embeddings",
        dtype: TableDtype = "float32",
        special_tokens_in_text: InText | None = None,
    ) -> Embeddings:
        """Return the vectors of token ids, or of rows made of parts: the input of block 0, or another output.

        Args:
            ids: rows of token ids: lists, an integer array (B, L), or tensors. Rows may differ in length; a flat list
                is one row. Arrays and tensors of one length are fastest.
            model: name of the model.
            version: version of the model; default the highest.
            parts: instead of `ids`: the parts of one row, or a list of parts for each row.
            placeholder: with `parts`: a token id, and the vectors in place of its tokens.
            offset: real tokens fed before, one number or one for each row; default 0.
            context: the last ids before each row, `next_context` of the answer before; needed for "ngram_embeddings" at
                an offset above 0.
            position_ids: position index of each token, like `ids`; excludes `offset`. Positions of three axes,
                (3, B, L), stand beside it.
            position_rows: instead of `position_ids`: row of the position table of each token, as some models of
                transformers take them, such as RoBERTa.
            attention_mask: 1 for a real token, 0 for padding, like `ids`; default 1.
            token_type_ids: segment of each token, like `ids`; default 0.
            indices: further inputs in `Model.indices`, by name, each like `ids`.
            truncate: "left" or "right", the side to cut of a row over the limit; default is an error.
            pooling: "mean", "first" or "last", for one vector (D,) of each row; default one of each token.
            output: "embeddings" to feed block 0 directly. "token_embeddings" for `inputs_embeds` or `prompt_embeds`:
                the model adds positions itself, so "embeddings" would hold them twice, without an error.
            dtype: "float32", "float16", "bfloat16" (with the package ml_dtypes), or "stored": the type of n-gram
                tables.
            special_tokens_in_text: for the texts of `parts`, as for `text`.

        """
        positions = {"position_ids": position_ids, "position_rows": position_rows}
        inputs = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        given = add_indices({"input_ids": ids, "offset": offset, "context": context, **positions, **inputs}, indices)
        options: dict[str, Any] = {"truncate": truncate, "pooling": pooling, "dtype": dtype}
        options["special_tokens_in_text"] = special_tokens_in_text
        return await self._send(calls.embed(model, version, given, parts, placeholder, output, **options))

    async def text(
        self,
        text: str | Sequence[str],
        *,
        model: str,
        version: int | None = None,
        offset: int | Row | None = None,
        context: Rows | None = None,
        truncate: Side | None = None,
        pooling: Pooling | None = None,
        output: str = "embeddings",
        dtype: TableDtype = "float32",
        return_tokens: bool = False,
        special_tokens: bool | None = None,
        special_tokens_in_text: InText | None = None,
    ) -> Embeddings:
        """Return the vectors of texts, for a model with a tokenizer.

        Args:
            text: one text for each row, or a single text.
            model: name of the model.
            version: version of the model; default the highest.
            offset: real tokens fed before, one number or one for each row; default 0.
            context: the last ids before each row, as for `embed`.
            truncate: "left" or "right", the side to cut of a row over the limit; default is an error.
            pooling: "mean", "first" or "last", for one vector (D,) of each row; default one of each token.
            output: name of the output, as for `embed`.
            dtype: "float32", "float16", "bfloat16" (with the package ml_dtypes), or "stored": the type of n-gram
                tables.
            return_tokens: whether the result has `input_ids` and `spans`.
            special_tokens: whether the tokenizer adds its special tokens; default True, False in a static model.
            special_tokens_in_text: "allow" (default) if a special token in a text, such as [SEP], becomes that token;
                "refuse" for an error; "plain" to encode its characters as ordinary text. For text of strangers.

        """
        options: dict[str, Any] = {"offset": offset, "truncate": truncate, "pooling": pooling, "dtype": dtype}
        options |= {"context": context, "return_tokens": return_tokens, "special_tokens": special_tokens}
        options["special_tokens_in_text"] = special_tokens_in_text
        return await self._send(calls.text(model, version, output, text=text, **options))

    async def prompt_embeds(
        self,
        ids: Rows | None = None,
        *,
        text: str | Sequence[str] | None = None,
        model: str,
        version: int | None = None,
        parts: Parts | None = None,
        placeholder: Placeholder | None = None,
        output: str = "token_embeddings",
        dtype: Dtype = "float32",
        special_tokens: bool | None = None,
        special_tokens_in_text: InText | None = None,
    ) -> list[str]:
        """Return each row for the field `prompt_embeds` of vLLM: a tensor saved by torch, in base64.

        Args:
            ids: rows of token ids, as for `embed`; or else `text` or `parts`.
            text: one text for each row, or a single text, for a model with a tokenizer.
            model: name of the model.
            version: version of the model; default the highest.
            parts, placeholder: as for `embed`.
            output: the output for your version of vLLM in `Model.consumers`; default "token_embeddings".
            dtype: "float32", "float16" or "bfloat16"; vLLM needs its own.
            special_tokens: with `text`, as for `text`; False for a part of a chat message.
            special_tokens_in_text: as for `text`, also for the texts of `parts`.

        """
        options: dict[str, Any] = {"dtype": dtype, "special_tokens": special_tokens, "input_ids": ids, "text": text}
        options["special_tokens_in_text"] = special_tokens_in_text
        return await self._send(calls.prompt_embeds(model, version, output, parts, placeholder, **options))

    async def bias(
        self,
        query_length: int,
        key_length: int,
        *,
        model: str,
        version: int | None = None,
        query_offset: int | None = None,
        dtype: Dtype = "float32",
    ) -> Vectors:
        """Return the attention bias for distances between queries and keys: (1, heads, Q, K); of a sinusoid (rows, D).

        Args:
            query_length: queries, Q.
            key_length: keys, K, at positions 0 to K - 1.
            model: name of a model with an attention bias.
            version: version of the model; default the highest.
            query_offset: keys fed before the first query; default 0.
            dtype: "float32", "float16" or "bfloat16" (with the package ml_dtypes).

        """
        lengths = {"query_length": query_length, "key_length": key_length, "query_offset": query_offset}
        return await self._send(calls.bias(model, version, dtype=dtype, **lengths))

    async def models(self) -> list[Model]:
        """Return every model, in its highest version, with one request for the list and one for each model."""
        return [await self.model(name) for name in await self._send(calls.list_names())]

    async def model(self, name: str, version: int | None = None) -> Model:
        """Return one model, by default in its highest version. An unknown name is a `RequestError`, kind "NotFound"."""
        return await self._send(calls.describe(name, version))

    async def ready(self, model: str | None = None, version: int | None = None) -> bool:
        """Return whether the service, or one of its models, answers requests. The call is not retried.

        A starting service refuses connections, so a failed connection or a missing answer means False.
        """
        path = "/readyz" if model is None else model_path(model, version)
        try:
            await self._transport.request("GET", path, b"", {})
        except NoAnswer:
            return False
        except ServiceError as error:
            if error.status in (404, 503):
                return False
            raise
        return True

    async def load(self, name: str) -> None:
        """Load the new versions of a model, even after an unload; the service needs `--model-control explicit`."""
        await self._send(calls.control(name, "load"))

    async def unload(self, name: str) -> None:
        """Unload every version of a model after its last request; the service needs `--model-control explicit`."""
        await self._send(calls.control(name, "unload"))

    def decode(
        self,
        model: str,
        *,
        version: int | None = None,
        offset: int | Row = 0,
        context: Rows | None = None,
        rows: int | None = None,
        output: str = "embeddings",
        companions: Sequence[str] = (),
        dtype: TableDtype = "float32",
        special_tokens_in_text: InText | None = None,
        resume: bool = False,
    ) -> AsyncDecodeStream:
        """Return a decode stream. `async with` opens and closes it; without, the first message opens it.

        Args:
            model: name of the model.
            version: version of the model; default the highest at the first opening.
            offset: real tokens fed before, one number or one for each row.
            context: the last ids before each row, as for `embed`; `stream.context` of an earlier stream.
            rows: number of rows, if `offset` is one number; default 1. May be 0.
            output: name of the output of a step, as for `embed`.
            companions: further outputs, such as "rotary_cos"; `stream.companions` has them after a step.
            dtype: "float32", "float16", "bfloat16" (with the package ml_dtypes), or "stored": the type of n-gram
                tables.
            special_tokens_in_text: for the texts of parts, as for `text`.
            resume: whether to continue over a new connection after one breaks, perhaps to another replica, with the
                retries and pauses of a call.

        """
        from preblock.client.sockets import AsyncSocket

        calls.check_names(output, dtype, companions)
        given = read_integers("offset", offset).tolist()
        count = len(given) if rows is None else rows
        # The service rejects an empty list of offsets.
        opening = {"offset": given if count else 0, "rows": count, "output": [output, *companions], "dtype": dtype}
        if context is not None:
            opening["context"] = list_rows("context", context)
        if special_tokens_in_text is not None:
            opening["special_tokens_in_text"] = special_tokens_in_text
        return AsyncDecodeStream(AsyncSocket(self._replicas), model, version, opening, self._retries, resume)

    async def aclose(self) -> None:
        """Close the connections of the calls; streams stay open, and so does an own httpx client."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _send(self, call: Call[T]) -> T:
        async def attempt() -> bytearray:
            return await self._transport.request(call.method, call.path, call.body, call.headers)

        return call.read(await retry(attempt, self._retries, self._transport.sleep))
