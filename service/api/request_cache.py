"""Repeated requests: a client sends the same request again and again, with other numbers.

Their constant parts, and those of their answers, are read and written once.

Letters: B batch, L length.
"""

from collections.abc import AsyncGenerator, Hashable
from dataclasses import dataclass

import numpy as np
import orjson

from preblock.service.api.http.response import ChunkedResponse, lines_of
from preblock.service.codecs.chunks import Buffer, encoded, joined, raw_bytes
from preblock.service.codecs.token_rows import rows_of_json
from preblock.service.core.auth import SERVICE, Principal, caller
from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.core.types import Int64, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastPath, FastRun, fast_path_of, integers, is_simple
from preblock.service.runtime.model import TokenModel

MAX_TEMPLATES = 1024
"""Templates of all models together; one more empties the cache."""


@dataclass(eq=False, slots=True)
class RequestTemplate:
    """Requests of one address and the same headers, with bodies of one beginning and one length.

    The JSON around the ids is the same in all of them, too.

    Args:
        protocol: of the requests.
        fast_path: answers them.
        head: first bytes of their bodies.
        shape: of the ids, (B, L).
        ids_at: where the ids begin in a body.
        offset: int64 (1,) or (B,), the offset of all of them, or of the first one, where it stands in the body.
        offset_at: where the offset begins in a body; None where that holds none.
        headers: of an answer, as lines of HTTP/1.1.
        prefix: what stands before the vectors in the body of an answer.
        size: of the body of an answer, in bytes.
        tail: what bodies of JSON end with, behind the ids, which begin behind the `head`; None where ids are bytes.
        suffix: what stands behind the vectors where these are base64; None where they are bytes.
        path: of the address.
        name: of the model, as requests name it.
        version: of the model, as requests name it; None where they name none.

    """

    protocol: str
    fast_path: FastPath
    head: bytes
    shape: tuple[int, int]
    ids_at: int
    offset: Int64
    offset_at: int | None
    headers: bytes
    prefix: bytes
    size: int
    tail: bytes | None = None
    suffix: bytes | None = None
    path: str = ""
    name: str = ""
    version: str | None = None

    def read(self, body: bytes) -> tuple[Int64, Int64] | None:
        """Return the ids (B, L) and the offset of a body; None where the template does not fit."""
        if self.tail is None:
            return self.read_binary(body)
        begin, end = len(self.head), len(body) - len(self.tail)
        if end < begin or not body.endswith(self.tail):
            return None
        try:
            rows = rows_of_json("input_ids", orjson.loads(body[begin:end]))
        except (orjson.JSONDecodeError, Invalid):
            return None
        if (len(rows.lengths), rows.length) != self.shape:
            return None
        return rows.values.reshape(self.shape), self.offset

    def read_binary(self, body: bytes) -> tuple[Int64, Int64]:
        """Return the ids (B, L) and the offset of a binary body."""
        batch, length = self.shape
        ids = integers(body, batch * length, self.ids_at).reshape(self.shape)
        if self.offset_at is None:
            return ids, self.offset
        return ids, integers(body, len(self.offset), self.offset_at)

    async def packets(self, run: FastRun) -> AsyncGenerator[Buffer, None]:
        """Yield the body of a large answer, computed chunk by chunk."""
        yield self.prefix
        chunks = map(raw_bytes, run.pieces())  # map keeps no chunk, so that the next may reuse its memory
        for chunk in chunks if self.suffix is None else encoded(chunks):
            yield chunk
            del chunk
        if self.suffix is not None:
            yield self.suffix


def template_of(
    engine: Engine,
    model: TokenModel,
    protocol: str,
    request: TokenRequest,
    response: ChunkedResponse,
    head: bytes,
    ids_at: int,
    offset_at: int | None = None,
    tail: bytes | None = None,
) -> RequestTemplate | None:
    """Return the template of an answered request; None if the fast path does not take such requests.

    The content of `response` ends with the vectors as bytes, or with their base64 text and a suffix. The last four
    arguments are those of `RequestTemplate`.
    """
    if not is_simple(request):
        return None
    fast_path, rows = fast_path_of(engine, model, request.outputs, request.dtype), request.input_ids
    if fast_path is None:
        return None
    assert rows.length is not None
    assert response.size is not None
    shape = len(rows.lengths), rows.length
    offset = np.zeros(1, np.int64) if request.offset is None else request.offset
    *prefix, last = response.parts
    suffix = last if isinstance(last, bytes) else None
    if suffix is not None:
        prefix.pop()
    known = lines_of(response.raw_headers), joined(prefix), response.size
    return RequestTemplate(protocol, fast_path, head, shape, ids_at, offset, offset_at, *known, tail, suffix)


class TemplateCache:
    """Templates of answered requests, for all protocols.

    The cache is emptied when the repository or the settings change. A key holds no credential: the caller of each
    request is authorized anew.

    Args:
        engine: answers the requests.

    Attributes:
        hits: requests answered by a template.

    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._settings = engine, engine.settings.current
        self._templates: dict[Hashable, RequestTemplate] = {}
        self.hits = 0
        engine.repository.listeners.append(self.clear)

    def find(self, key: Hashable) -> RequestTemplate | None:
        """Return the template of `key`, if its model is still served and the caller may use it."""
        if self._settings is not self._engine.settings.current:  # these requests were checked by other limits
            self._settings = self._engine.settings.current
            self.clear()
        template = self._templates.get(key)
        if template is None or not self._is_served(template, caller()):
            return None
        self.hits += 1
        return template

    def keep(self, key: Hashable, template: RequestTemplate) -> None:
        """Answer requests of the same `key` by `template` from now on, unless the present limits forbid it."""
        batch, length = template.shape
        fits = batch * length <= self._engine.max_tokens and batch <= self._engine.limits.max_rows
        if not fits or not self._is_served(template, SERVICE):  # the model may have been replaced by now
            return
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        self._templates[key] = template

    def _is_served(self, template: RequestTemplate, principal: Principal) -> bool:
        """Return whether the repository has the same model as before, and the caller may use it."""
        try:
            model = self._engine.repository.find(template.name, template.version, caller=principal)
        except PreblockError:
            return False
        return model is template.fast_path.model

    def clear(self) -> None:
        """Forget all templates: models or limits have changed."""
        self._templates.clear()
