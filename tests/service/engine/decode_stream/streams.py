"""Streams, their operations, and the same vectors by one request."""

import asyncio
from typing import Any

import numpy as np

from preblock.service.codecs.native_json import read_embed
from preblock.service.core.decode_ops import DecodeMessage, DecodeOptions, Operation
from preblock.service.core.types import EmbedResult, TokenRequest, TokenRows
from preblock.service.engine.decode_stream import DecodeState
from preblock.service.engine.engine import Engine
from preblock.service.observability.context import RequestRecord
from tests.support.engines import ask_engine


def rows(*each: list[int]) -> TokenRows:
    values = [value for row in each for value in row]
    return TokenRows(np.array(values, np.int64), np.array([len(row) for row in each], np.int64))


def row(*ids: int) -> TokenRows:
    return rows(list(ids))


def array(*values: int) -> Any:
    return np.array(values, np.int64)


def stream_of(engine: Engine, name: str = "bert", offset: tuple[int, ...] = (0,), **options: Any) -> DecodeState:
    wanted = DecodeOptions(offset=array(*offset), **{"rows": len(offset)} | options)
    return DecodeState(engine, engine.repository.get(name), wanted)


def do(stream: DecodeState, operation: Operation, number: int = 0, digest: bytes = b"") -> EmbedResult | None:
    return asyncio.run(stream.do(DecodeMessage(operation, number, digest), RequestRecord("decode")))


def feed(stream: DecodeState, ids: TokenRows, number: int = 0, digest: bytes = b"", **parts: Any) -> EmbedResult:
    answer = do(stream, TokenRequest(input_ids=ids, **parts), number, digest)
    assert answer is not None
    return answer


def whole(stream: DecodeState, **fields: Any) -> bytes:
    """Return the vectors of one request, the rows one after another."""
    request = read_embed(fields, indices=stream.model.manifest.indices).request
    return asyncio.run(ask_engine(stream._engine, stream.model, request)).arrays["embeddings"].tobytes()
