"""Repeated requests: a client sends the same request again and again, with other numbers.

Their constant parts, and those of their answers, are read and written once.

Letters: B batch, L length.
"""

import re
from collections.abc import AsyncGenerator, Hashable
from dataclasses import dataclass

import numpy as np
import orjson

from preblock.service.api.http.response import ChunkedResponse, lines_of
from preblock.service.codecs.chunks import Buffer, encoded, joined, raw_bytes
from preblock.service.codecs.token_rows import rows_of_json
from preblock.service.core.auth import SERVICE, caller
from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.core.types import Int64, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastPath, FastRun, integers

MAX_TEMPLATES = 1024
"""Templates of all models together; one more empties the cache."""
IDS = re.compile(rb'"input_ids"\s*:(\s*\[[][0-9,\s-]*\]\s*)')
"""The ids in the JSON of an answered request, up to the next quote or brace.

In a string the quotes would be escaped, and no other field holds an object.
"""


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
        if self.tail is not None:
            ids = self._read_json(body, self.tail)
            return None if ids is None else (ids, self.offset)
        return self.read_binary(body)

    def read_binary(self, body: bytes) -> tuple[Int64, Int64]:
        """Return the ids (B, L) and the offset of a binary body."""
        batch, length = self.shape
        ids = integers(body, batch * length, self.ids_at).reshape(self.shape)
        if self.offset_at is None:
            return ids, self.offset
        return ids, integers(body, len(self.offset), self.offset_at)

    def _read_json(self, body: bytes, tail: bytes) -> Int64 | None:
        begin, end = len(self.head), len(body) - len(tail)
        if end < begin or not body.endswith(tail):
            return None
        try:
            rows = rows_of_json("input_ids", orjson.loads(body[begin:end]))
        except (orjson.JSONDecodeError, Invalid):
            return None
        if (len(rows.lengths), rows.length) != self.shape:
            return None
        return rows.values.reshape(self.shape)

    async def packets(self, run: FastRun) -> AsyncGenerator[Buffer, None]:
        """Yield the body of a large answer, computed chunk by chunk."""
        yield self.prefix
        chunks = map(raw_bytes, run.chunks())  # map keeps no chunk, so that the next may reuse its memory
        for chunk in chunks if self.suffix is None else encoded(chunks):
            yield chunk
            del chunk
        if self.suffix is not None:
            yield self.suffix


def template_of(
    protocol: str,
    fast_path: FastPath,
    request: TokenRequest,
    reply: ChunkedResponse,
    head: bytes,
    ids_at: int,
    offset_at: int | None = None,
) -> RequestTemplate:
    """Return the template of a request with the answer `reply`: bytes behind others, or base64 between them.

    The other arguments are those of `RequestTemplate`.
    """
    rows = request.input_ids
    assert rows.length is not None
    offset = np.zeros(1, np.int64) if request.offset is None else request.offset
    *prefix, last = reply.parts
    suffix = None
    if isinstance(last, bytes):
        suffix, _ = last, prefix.pop()
    shape = len(rows.lengths), rows.length
    assert reply.size is not None
    known = lines_of(reply.raw_headers), joined(prefix), reply.size
    return RequestTemplate(protocol, fast_path, head, shape, ids_at, offset, offset_at, *known, suffix=suffix)


def json_template_of(
    protocol: str, fast_path: FastPath, request: TokenRequest, reply: ChunkedResponse, body: bytes
) -> RequestTemplate | None:
    """Return the template of a JSON request with such a `body`, as `template_of`; None where its ids are not found."""
    found = IDS.search(body)
    if found is None:  # the name of the field is written in another way
        return None
    template = template_of(protocol, fast_path, request, reply, body[: found.start(1)], found.start(1))
    template.tail = body[found.end(1) :]
    return template


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
        if template is None:
            return None
        try:
            model = self._engine.repository.find(template.name, template.version, caller=caller())
        except PreblockError:
            return None
        if model is not template.fast_path.model:
            return None
        self.hits += 1
        return template

    def keep(self, key: Hashable, template: RequestTemplate) -> None:
        """Answer requests of the same `key` by `template` from now on, unless the present limits forbid it."""
        (batch, length), repository = template.shape, self._engine.repository
        if batch * length > self._engine.max_tokens or batch > self._engine.limits.max_rows:
            return
        try:
            model = repository.find(template.name, template.version, caller=SERVICE)
        except PreblockError:
            return
        if model is not template.fast_path.model:  # it was replaced while it answered
            return
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        self._templates[key] = template

    def clear(self) -> None:
        """Forget all templates: models or limits have changed."""
        self._templates.clear()
