"""Prepared requests: clients usually repeat a request with other ids or texts, as the prepared statements of databases.

A prepared request holds the constant parts of such requests and of their responses. Only the numbers or the texts of a
body are read.

Letters: B batch, L length.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from preblock.service.codecs.chunks import (
    Base64Chunks,
    Buffer,
    Part,
    base64_text,
    body_chunks,
    encode_base64,
    join,
    raw_bytes,
)
from preblock.service.codecs.native_json import read_text
from preblock.service.codecs.token_rows import read_json_rows
from preblock.service.core.auth import SERVICE, Principal, caller
from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.core.types import Int64, TextRequest, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastPath, FastRun, fast_path_of, integers, tokenize_short
from preblock.service.engine.plain_calls import Call
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.repository import Repository

MAX_CACHE_BYTES = 2**22
"""Maximum size of all keys and prepared requests, about 1,500 of usual size; one more empties the cache."""
ENTRY_BYTES = 2**11
"""Size of the objects of a key and a prepared request, without their bytes and arrays."""
IDS = re.compile(rb'"input_ids"\s*:(\s*\[[][0-9,\s-]*\]\s*)')
"""The ids in the JSON body of a valid request.

The pattern cannot match inside a string, because quotes are escaped there. Only `parts` and `placeholder` hold objects,
and a prepared request is made of a `TokenRequest` alone, never of a `PartsRequest`.
"""
STRING = rb'"(?:[^"\\]|\\.)*"'
TEXTS = rb'"%b"\s*:\s*(' + STRING + rb"|\[(?:[^]\"]|" + STRING + rb")*\])"
"""A field, `%b`, and its text or list of texts in the JSON body of a valid request without further objects.

The pattern cannot match inside a string, because quotes are escaped there.
"""


Content = tuple[int, Iterable[Buffer]]
"""The content of a response: number of bytes, and the bytes in order. A streamed run computes them as they are read."""


class Prepared(Protocol):
    """A request whose protocol, options and layout were seen before.

    Attributes:
        path: runs such requests.

    """

    path: FastPath

    def bind(self, body: bytes) -> Call | None:
        """Return the call of a body; None if it has another layout."""

    def respond(self, run: FastRun) -> Content:
        """Compute the content of the response to a started call."""


@dataclass(eq=False, slots=True)
class PreparedIds:
    """Requests of ids (B, L), after which a response has their vectors.

    Args:
        path: runs the requests.
        head: first bytes of a body, until the ids or the offset.
        shape: of the ids, (B, L).
        offset: of the first request, int64 (1,) or (B,). It holds for all bodies without an offset.
        prefix: content of a response before the vectors.
        suffix: JSON after the base64 vectors; None if the vectors are bytes.

    """

    path: FastPath
    head: bytes
    shape: tuple[int, int]
    offset: Int64
    prefix: bytes
    suffix: bytes | None

    def respond(self, run: FastRun) -> Content:
        """Compute the content of the response to a started call."""
        if run.streamed:
            tensor = run.chunks()
            if self.suffix is None:
                return len(self.prefix) + len(tensor), chain((self.prefix,), map(raw_bytes, tensor))
            size = len(self.prefix) + len(Base64Chunks((tensor,))) + len(self.suffix)
            return size, chain((self.prefix,), encode_base64((tensor,)), (self.suffix,))
        (vectors,) = run.result()
        if self.suffix is None:
            return len(self.prefix) + vectors.nbytes, (self.prefix, raw_bytes(vectors))
        encoded = base64_text(vectors)
        return len(self.prefix) + len(encoded) + len(self.suffix), (self.prefix, encoded, self.suffix)


@dataclass(eq=False, slots=True)
class PreparedBinary(PreparedIds):
    """Requests of ids as little-endian int64.

    Args:
        ids_at: position of the ids in a body, in bytes.
        offset_at: position of the offset in a body, in bytes; None if bodies hold no offset.

    """

    ids_at: int
    offset_at: int | None

    def bind(self, body: bytes) -> Call | None:
        """Return the call of a body as long as that of the first request; None if it begins otherwise."""
        if not body.startswith(self.head):
            return None
        offset = self.offset if self.offset_at is None else integers(body, self.offset.shape, self.offset_at)
        return Call(integers(body, self.shape, self.ids_at), *self.shape, offset)


@dataclass(eq=False, slots=True)
class PreparedJson(PreparedIds):
    """Requests of ids as JSON; `tail` is the JSON after the ids."""

    tail: bytes

    def bind(self, body: bytes) -> Call | None:
        """Return the call of a body; None if it has other fields, or ids of another shape."""
        rows = None if (value := _between(body, self.head, self.tail)) is None else _read_rows(value)
        if rows is None or (len(rows.lengths), rows.length) != self.shape:
            return None
        return Call(rows.values.reshape(self.shape), *self.shape, self.offset)


@dataclass(eq=False, slots=True, kw_only=True)
class PreparedTexts:
    """Requests of short texts in JSON, after which a response has one vector for each.

    Args:
        path: runs the requests.
        options: of the requests, without texts.
        head: body before the texts.
        tail: body after the texts.
        as_numbers: whether the response holds the vectors as text.
        write: writes the content of a response with these vectors of this number of tokens.

    """

    path: FastPath
    options: TextRequest
    head: bytes
    tail: bytes
    as_numbers: bool
    write: Callable[[NDArray[Any], int], list[Part]]

    def bind(self, body: bytes) -> Call | None:
        """Return the call of a body; None if it has other options, or its texts are long."""
        value, is_inline = _between(body, self.head, self.tail), self.path.engine.scheduler.is_inline
        if value is None or not is_inline(len(body), text=True):
            return None
        try:
            # The whole body is valid, with each field once, because these bytes are one value of JSON.
            texts = read_text("input", orjson.loads(value))
        except (orjson.JSONDecodeError, Invalid):
            return None
        if not is_inline(len(texts) * (self.options.dimensions or self.path.width), self.as_numbers):
            return None
        return tokenize_short(self.path.engine, self.path.model, texts, self.options, len(body))

    def respond(self, run: FastRun) -> Content:
        """Compute the content of the response to a started call."""
        (vectors,) = run.result()
        buffers = [*body_chunks(self.write(vectors, run.record.tokens))]
        return sum(map(len, buffers)), buffers


def _between(body: bytes, head: bytes, tail: bytes) -> bytes | None:
    """Return the bytes between head and tail; None for a body with others."""
    begin, end = len(head), len(body) - len(tail)
    return body[begin:end] if begin <= end and body.startswith(head) and body.endswith(tail) else None


def _read_rows(value: bytes) -> TokenRows | None:
    try:
        return read_json_rows("input_ids", orjson.loads(value))
    except (orjson.JSONDecodeError, Invalid):
        return None


class Layout(NamedTuple):
    """Where the numbers of a request stand in its body.

    Args:
        head: bytes before them.
        ids_at: position of the ids, in bytes.
        offset_at: position of the offset, in bytes; None if the body holds no offset.
        tail: JSON after the ids; None if the ids are bytes.

    """

    head: bytes
    ids_at: int
    offset_at: int | None = None
    tail: bytes | None = None


def find_json_ids(body: bytes) -> Layout | None:
    """Return the layout of a valid request in JSON; None if it escapes the name of the field."""
    found = IDS.search(body)
    return None if found is None else Layout(body[: found.start(1)], found.start(1), tail=body[found.end(1) :])


def prepare_ids(
    engine: Engine,
    model: TokenModel,
    protocol: str,
    request: TokenRequest,
    layout: Layout,
    content: Sequence[Part],
    copies: int = 0,
) -> Prepared | None:
    """Prepare requests of ids; None if the fast path cannot run them.

    Args:
        engine: runs the requests.
        model: of the first request.
        protocol: of the requests.
        request: the first request.
        layout: of its body.
        content: of its response: some bytes, and then the vectors as bytes, or their base64 text and a suffix.
        copies: as in `FastPath`.

    """
    call = Call.of(request, model.manifest) if request.input_ids.length and request.pooling == "none" else None
    if call is None or call.context is not None or call.indices or request.sequence is not None:
        return None
    path = fast_path_of(engine, model, request.outputs, request.dtype, protocol, copies=copies)
    if path is None:
        return None
    *prefix, last = content
    suffix = last if isinstance(last, bytes) else None
    if suffix is not None:
        prefix.pop()
    begin, shape = join(prefix), (call.rows, call.longest)
    if layout.tail is not None:
        return PreparedJson(path, layout.head, shape, call.offset, begin, suffix, layout.tail)
    return PreparedBinary(path, layout.head, shape, call.offset, begin, suffix, layout.ids_at, layout.offset_at)


def prepare_texts(
    engine: Engine,
    model: TokenModel,
    request: TextRequest,
    body: bytes,
    as_numbers: bool,
    write: Callable[[NDArray[Any], int], list[Part]],
) -> Prepared | None:
    """Prepare requests of texts in the field `input`; None if the fast path cannot run them.

    `PreparedTexts` describes the last two arguments.
    """
    found = re.search(TEXTS % b"input", body)  # None if the name is escaped
    if found is None or request.pooling == "none" or request.truncate is not None or model.tokenizer is None:
        return None
    path = fast_path_of(engine, model, request.outputs, request.dtype, "openai", pooling=request.pooling)
    if path is None:
        return None
    return PreparedTexts(
        path=path,
        options=replace(request, text=()),
        head=body[: found.start(1)],
        tail=body[found.end(1) :],
        as_numbers=as_numbers,
        write=write,
    )


@dataclass(eq=False, slots=True)
class KnownRequest:
    """A prepared request, with the model that it names.

    Args:
        prepared: the request.
        name: of the model.
        version: of the model; None for the highest one.

    """

    prepared: Prepared
    name: str
    version: str | None

    def start(self, body: bytes, began: float) -> FastRun | None:
        """Start a request that was complete at `began`; None for another layout, or if the general path must answer."""
        call = self.prepared.bind(body)
        return None if call is None else self.prepared.path.start(call, began)


KnownT = TypeVar("KnownT", bound=KnownRequest)


class PreparedRequests(Generic[KnownT]):
    """Cache of prepared requests.

    A change of the repository empties it. A key holds no credential, so the cache checks the access of every caller.

    Args:
        repository: of the models.

    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._known: dict[Hashable, KnownT] = {}
        self._size = 0
        repository.listeners.append(self.clear)

    def find(self, key: Hashable) -> KnownT | None:
        """Return the request of `key`; None if its model is no longer served or the caller has no access."""
        known = self._known.get(key)
        return known if known is not None and self._is_served(known, caller()) else None

    def __contains__(self, key: Hashable) -> bool:
        """Return whether there is a request of `key`, perhaps of a model that is no longer served."""
        return key in self._known

    def keep(self, key: Hashable, known: KnownT) -> None:
        """Keep a request for others with the same `key`."""
        if not self._is_served(known, SERVICE):  # the model may have been replaced meanwhile
            return
        self._size -= _size_of(key, self._known.pop(key, None))
        size = _size_of(key, known)
        if self._size + size > MAX_CACHE_BYTES:
            self.clear()
        if size <= MAX_CACHE_BYTES:
            self._known[key] = known
            self._size += size

    def _is_served(self, known: KnownT, principal: Principal) -> bool:
        """Return whether the repository still serves the same model, and the caller has access."""
        try:
            model = self._repository.find(known.name, known.version, caller=principal)
        except PreblockError:
            return False
        return model is known.prepared.path.model

    def clear(self) -> None:
        """Empty the cache, because models have changed."""
        self._known.clear()
        self._size = 0


def _size_of(key: Hashable, known: KnownRequest | None) -> int:
    """Return the bytes of a cache entry; 0 without a request."""
    if known is None:
        return 0
    values = [getattr(known, field.name) for field in fields(known)]
    values += [getattr(known.prepared, field.name) for field in fields(known.prepared)]  # type: ignore[arg-type]
    return ENTRY_BYTES + _content_size(key) + sum(map(_content_size, values))


def _content_size(value: object) -> int:
    """Return the bytes of a value without its objects."""
    if isinstance(value, tuple):
        return sum(map(_content_size, value))
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, bytes | str) else 0
