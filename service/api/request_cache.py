"""Cache of request templates: clients usually repeat a request with different ids.

A template holds the constant parts of such requests and of their responses.

Letters: B batch, L length.
"""

from collections.abc import AsyncGenerator, Hashable
from dataclasses import dataclass, fields

import numpy as np
import orjson

from preblock.service.api.http.response import ChunkedResponse, lines_of
from preblock.service.api.text_template import TextTemplate
from preblock.service.codecs.chunks import Buffer, base64_text, encode_base64, join, raw_bytes
from preblock.service.codecs.token_rows import read_json_rows
from preblock.service.core.auth import SERVICE, Principal, caller
from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.core.types import Int64, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastPath, FastRun, fast_path_of, has_fast_form, integers
from preblock.service.engine.plain_calls import Call
from preblock.service.observability.context import RequestContext
from preblock.service.runtime.model import TokenModel

MAX_CACHE_BYTES = 2**22
"""Maximum size of all keys and templates, about 1,500 of usual size; one more empties the cache."""
ENTRY_BYTES = 2**11
"""Size of the objects of a key and a template, without their bytes and arrays."""


@dataclass(eq=False, slots=True)
class RequestTemplate:
    """The constant parts of requests with the same URL, headers and body layout, and of their responses.

    Args:
        protocol: protocol of the requests.
        fast_path: runs the requests.
        head: first bytes of a request body.
        shape: shape of the ids, (B, L).
        ids_at: position of the ids in a request body, in bytes.
        offset: offset of the first request, int64 (1,) or (B,). It holds for all requests without `offset_at`.
        offset_at: position of the offset in a request body, in bytes; None if bodies hold no offset.
        headers: response headers, as HTTP/1.1 lines.
        prefix: response body before the vectors.
        size: size of a response body, in bytes.
        tail: JSON after the ids in a request body; None if the ids are bytes.
        suffix: JSON after the base64 vectors in a response body; None if the vectors are bytes.
        path: path of the URL.
        name: model name in the requests.
        version: model version in the requests; None for the highest version.

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

    def start(self, body: bytes, context: RequestContext) -> FastRun | None:
        """Start the request with this body; None if it has another layout, or fails a check."""
        call = self.read(body) if body.startswith(self.head) else None
        if call is None:
            return None
        return self.fast_path.start(self.protocol, call, context, context.began + context.read)

    def write(self, run: FastRun) -> tuple[bytes, list[Buffer]]:
        """Finish a run, and return header lines and body of its response."""
        (vectors,) = run.finish()
        if self.suffix is None:
            return self.headers, [self.prefix, raw_bytes(vectors)]
        return self.headers, [self.prefix, base64_text(vectors), self.suffix]

    def read(self, body: bytes) -> Call | None:
        """Return the call of a request body; None if the template does not match."""
        if self.tail is None:
            return self.read_binary(body)
        begin, end = len(self.head), len(body) - len(self.tail)
        if end < begin or not body.endswith(self.tail):
            return None
        try:
            rows = read_json_rows("input_ids", orjson.loads(body[begin:end]))
        except (orjson.JSONDecodeError, Invalid):
            return None
        if (len(rows.lengths), rows.length) != self.shape:
            return None
        return Call(rows.values.reshape(self.shape), *self.shape, self.offset)

    def read_binary(self, body: bytes) -> Call:
        """Return the call of a binary request body."""
        batch, length = self.shape
        ids = integers(body, batch * length, self.ids_at).reshape(self.shape)
        offset = self.offset if self.offset_at is None else integers(body, len(self.offset), self.offset_at)
        return Call(ids, batch, length, offset)

    async def packets(self, run: FastRun) -> AsyncGenerator[Buffer, None]:
        """Yield the body of a large response, computed chunk by chunk."""
        yield self.prefix
        chunks = map(raw_bytes, run.chunks())  # map keeps no chunk, so the next chunk can reuse its buffer
        for chunk in chunks if self.suffix is None else encode_base64(chunks):
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
    """Return the template of an answered request; None if the fast path cannot run such requests.

    The content of `response` ends with the vectors as bytes, or with their base64 text and a suffix. `RequestTemplate`
    describes the other arguments.
    """
    if not has_fast_form(request, model.manifest):
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
    return RequestTemplate(
        protocol=protocol,
        fast_path=fast_path,
        head=head,
        shape=shape,
        ids_at=ids_at,
        offset=offset,
        offset_at=offset_at,
        headers=lines_of(response.raw_headers),
        prefix=join(prefix),
        size=response.size,
        tail=tail,
        suffix=suffix,
    )


Template = RequestTemplate | TextTemplate


class TemplateCache:
    """Cache of request templates, for all protocols.

    A change of the repository empties the cache. A key holds no credential, so the cache checks the
    access of every caller.

    Args:
        engine: runs the requests.

    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._templates: dict[Hashable, Template] = {}
        self._size = 0
        engine.repository.listeners.append(self.clear)

    def find(self, key: Hashable) -> Template | None:
        """Return the template of `key`; None if its model is no longer served or the caller has no access."""
        template = self._templates.get(key)
        return template if template is not None and self._is_served(template, caller()) else None

    def __contains__(self, key: Hashable) -> bool:
        """Return whether there is a template of `key`, perhaps of a model that is no longer served."""
        return key in self._templates

    def keep(self, key: Hashable, template: Template) -> None:
        """Cache `template` for requests with the same `key`."""
        if not self._is_served(template, SERVICE):  # the model may have been replaced meanwhile
            return
        self._size -= _size_of(key, self._templates.pop(key, None))
        size = _size_of(key, template)
        if self._size + size > MAX_CACHE_BYTES:
            self.clear()
        if size <= MAX_CACHE_BYTES:
            self._templates[key] = template
            self._size += size

    def _is_served(self, template: Template, principal: Principal) -> bool:
        """Return whether the repository still serves the same model, and the caller has access."""
        try:
            model = self._engine.repository.find(template.name, template.version, caller=principal)
        except PreblockError:
            return False
        return model is template.fast_path.model

    def clear(self) -> None:
        """Empty the cache, because models have changed."""
        self._templates.clear()
        self._size = 0


def _size_of(key: Hashable, template: Template | None) -> int:
    """Return the bytes of a cache entry; 0 without a template."""
    if template is None:
        return 0
    return (
        ENTRY_BYTES
        + _content_size(key)
        + sum(_content_size(getattr(template, field.name)) for field in fields(template))
    )


def _content_size(value: object) -> int:
    """Return the bytes of a value without its objects."""
    if isinstance(value, tuple):
        return sum(map(_content_size, value))
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, bytes | str) else 0
