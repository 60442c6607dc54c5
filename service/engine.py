"""The one path from request to answer; every door uses it.

Every front-end is token-wise: a token's vector depends on its id, its position and its segment alone. So rows of
unequal length, masks and explicit positions all run as T rows of length 1 whose offset is the position: no padding. So
do small requests that are ready together, whatever their lengths, offsets and doors.

Letters: B batch, L length, T tokens of all rows, D output width.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from incipit.service.batching import SMALL, TOKENIZER_COST, Scheduler
from incipit.service.control import Control
from incipit.service.errors import IncipitError, Invalid
from incipit.service.limits import Limits
from incipit.service.log import Requests
from incipit.service.manifest import (
    BIAS_GRAPH,
    EMBEDDINGS,
    GRAPH,
    TOKEN_EMBEDDINGS,
    Manifest,
)
from incipit.service.messages import (
    DTYPES,
    Answer,
    AnyRequest,
    BiasRequest,
    Int64,
    Pieces,
    Request,
    Rows,
    StemRequest,
    Tensor,
    TextRequest,
    TokenAnswer,
)
from incipit.service.metrics import Execution, Metrics, Observation
from incipit.service.pooling import pool
from incipit.service.positions import count_real, graph_counts, position_index, real_tokens
from incipit.service.repository import Model, Repository, Stem
from incipit.service.tiles import PIECE, pieces
from incipit.service.truncation import truncate
from incipit.service.validation import ZERO, check, check_bias, check_stem
from incipit.service.visit import CURRENT, current_trace

SHARED = 2**14
"""Values of vectors of a request that runs together with others; what is larger gains nothing by it."""


# Those that every request makes are not frozen: that triples the time of making one.
@dataclass(eq=False, slots=True)
class Call:
    """The inputs of one run of a graph, and the offset (B,) that continues each row."""

    feeds: dict[str, Int64]
    next_offset: Int64


@dataclass(eq=False, slots=True)
class Member:
    """What one request asks of a model in a run that it may share.

    `request` is None where every token is real and comes after the one before.
    """

    feeds: dict[str, Int64]
    execution: Execution
    request: Request | None = None


class Admission:
    """A request that is answered while the block runs, counted, timed and within the limits.

    Raises:
        TooMany: its caller asks too often.
        Unavailable: too many are answered now.

    """

    __slots__ = ("_limits", "_log", "_observation")

    def __init__(self, observation: Observation, limits: Limits, log: Requests) -> None:
        self._observation, self._limits, self._log = observation, limits, log

    def __enter__(self) -> Observation:
        """Begin the request, or refuse it."""
        self._observation.__enter__()
        try:
            self._limits.__enter__()
        except IncipitError as error:
            self._end(type(error), error)
            raise
        return self._observation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the request."""
        self._limits.__exit__(kind, error, trace)
        self._end(kind, error)

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        seen = self._observation
        seen.__exit__(kind, error, None)
        if self._log.share:
            self._log.write(CURRENT.get(), seen.door, seen.model, seen.outcome, seen.seconds)


class Engine:
    """Answers requests.

    Args:
        repository: the models.
        scheduler: runs what takes long.
        metrics: counts.
        max_tokens: most tokens of one request.
        control: what changes the models; by default nothing does.
        limits: how much may be asked; by default anything.
        log: writes lines about requests; by default about none.

    """

    def __init__(
        self,
        repository: Repository,
        scheduler: Scheduler,
        metrics: Metrics,
        max_tokens: int,
        control: Control | None = None,
        limits: Limits | None = None,
        log: Requests | None = None,
    ) -> None:
        self.repository = repository
        self.control = control or Control(repository, "none", 1)
        self.scheduler = scheduler
        self.metrics = metrics
        self.max_tokens = max_tokens
        self.limits = limits or Limits()
        self.log = log or Requests()
        self.ready = True

    def request(self, door: str) -> "Admission":
        """Return what counts and times one request of `door`, a step of a stream included, within the limits."""
        return Admission(self.metrics.request(door), self.limits, self.log)

    async def answer(self, model: Model | Stem, request: AnyRequest) -> Answer:
        """Return what `request`, of a kind that `model` takes, asks for; raises as the methods for each kind."""
        match model, request:
            case Model(), Request():
                return await self.embed(model, request)
            case Model(), BiasRequest():
                return await self.bias(model, request)
            case Stem(), StemRequest():
                return await self.stem(model, request)
        raise TypeError(f"{type(model).__name__} takes no {type(request).__name__}")

    async def embed(self, model: Model, wanted: Request | TextRequest) -> TokenAnswer:
        """Return the vectors of ids, or of text.

        Raises:
            ClientFault: the request is not allowed.
            ArtifactError: of text, the tokenizer is broken.
            Unavailable: too much work waits.

        """
        with self.metrics.execution(model.name, model.version) as execution:
            sent = await self._tokenize(model, wanted) if isinstance(wanted, TextRequest) else wanted
            check(sent, model.manifest, self.max_tokens)
            self.limits.check_rows("input_ids", len(sent.input_ids.lengths))
            request = truncate(sent, model.manifest)
            call = plan(request, model.manifest)
            outputs, names, width = sources(request.outputs, model.manifest)
            tokens = len(request.input_ids.values)
            size = tokens * width
            execution.rows = len(request.input_ids.lengths)
            execution.passed()
            member = Member(call.feeds, execution, request)
            run = partial(run_members, model, names)
            most = PIECE // width
            alone = size <= SMALL or not _in_pieces(request, call, model.manifest, most)
            tensors: Mapping[str, Tensor]
            if size <= SHARED and model.manifest.exact_rows:
                found = await self.scheduler.share((id(model), names), size, member, run)
                tensors = _finish(request, member, model.manifest, outputs, found)
            elif alone or (request.pooling == "none" and not request.in_pieces):
                tensors = await self.scheduler.run(
                    size, lambda: _finish(request, member, model.manifest, outputs, *run([member]))
                )
            elif request.pooling != "none":
                tensors = await self.scheduler.run(size, lambda: {request.outputs[0]: _pooled(model, names, member)})
            else:
                if (
                    request.dtype != "float32" or request.check
                ):  # once the answer has begun, it is too late to refuse it
                    await self.scheduler.run(size, lambda: _check_values(model, names, call.feeds, most, request))
                shape = (tokens,) if request.input_ids.length is None else (execution.rows, request.input_ids.length)
                parts = _computed(model, names, call.feeds, most, request.dtype, execution)
                tensors = {request.outputs[0]: Pieces((*shape, width), request.dtype, parts)}
                execution.goes_on = True
        self._count(model.name, execution.rows, tokens)
        return TokenAnswer(
            model=model.name,
            version=model.version,
            dtype=request.dtype,
            tensors=tensors,
            lengths=request.input_ids.lengths,
            next_offset=call.next_offset,
            truncated=sent.input_ids.lengths - request.input_ids.lengths if request.truncate else None,
            input_ids=None if request.spans is None else request.input_ids,
            spans=request.spans,
        )

    async def _tokenize(self, model: Model, request: TextRequest) -> Request:
        """Return the request of ids that a text is, by the model's tokenizer."""
        tokenizer, text = model.tokenizer, request.text
        if tokenizer is None:
            raise Invalid("text", repr(text[0]), "token ids, since this model has no tokenizer")
        self.limits.check_rows("text", len(text))
        size = TOKENIZER_COST * (sum(map(len, text)) + len(text)) if tokenizer.opened else SMALL + 1
        tokens = await self.scheduler.run(size, lambda: tokenizer.encode(text, self.max_tokens, request.spans))
        segments = {"token_type_ids": tokens.token_type_ids}
        return Request(
            input_ids=tokens.input_ids,
            indices={name: rows for name, rows in segments.items() if name in model.manifest.indices},
            special=tokens.special,
            spans=tokens.spans,
            offset=request.offset,
            truncate=request.truncate,
            pooling=request.pooling,
            outputs=request.outputs,
            dtype=request.dtype,
            in_pieces=request.in_pieces,
            check=request.check,
        )

    async def bias(self, model: Model, request: BiasRequest) -> Answer:
        """Return what the attention of `model` adds for the distance between a query and a key.

        Raises:
            ClientFault: the request is not allowed.
            Unavailable: too much work waits.

        """
        with self.metrics.execution(model.name, model.version) as execution:
            shape = check_bias(request, model.manifest, self.max_tokens)
            lengths = (request.query_offset or 0, request.query_length, request.key_length)
            feeds = dict(zip(("query_offset", "query_length", "key_length"), map(_single, lengths), strict=True))
            execution.rows = execution.batch = 1
            execution.passed()
            tensors = await self.scheduler.run(
                math.prod(shape), lambda: _run_graph(model, BIAS_GRAPH, feeds, request.dtype, execution)
            )
        return Answer(model=model.name, version=model.version, dtype=request.dtype, tensors=tensors)

    async def stem(self, stem: Stem, request: StemRequest) -> Answer:
        """Return the vectors that enter block 0 of an encoder of images or spectrograms.

        Raises:
            ClientFault: the request is not allowed.
            Unavailable: too much work waits.

        """
        with self.metrics.execution(stem.name, stem.version) as execution:
            check_stem(request, stem.manifest, self.max_tokens)
            self.limits.check_rows(request.input, len(request.values))
            feeds = {request.input: request.values}
            execution.rows = execution.batch = len(request.values)
            execution.passed()
            # A convolution is never small.
            tensors = await self.scheduler.run(
                SMALL + 1, lambda: _run_graph(stem, GRAPH, feeds, request.dtype, execution)
            )
        self._count(stem.name, execution.rows, math.prod(tensors[EMBEDDINGS].shape[:2]))
        return Answer(model=stem.name, version=stem.version, dtype=request.dtype, tensors=tensors)

    def _count(self, model: str, rows: int, tokens: int) -> None:
        """Count tokens that were embedded."""
        self.metrics.tokens(model, tokens)
        if (trace := current_trace()) is not None:
            trace.ran(model, rows, tokens)


def _single(value: int) -> Int64:
    return np.array([value], np.int64)


def _run_graph(
    model: Model | Stem, graph: str, feeds: Mapping[str, NDArray[Any]], dtype: str, execution: Execution
) -> dict[str, NDArray[np.generic]]:
    """Return every output of a graph, in the type `dtype`."""
    execution.passed()
    found = model.sessions[graph].run(feeds)
    execution.passed()
    tensors = {name: cast(tensor, dtype) for name, tensor in found.items()}
    execution.passed()
    return tensors


@lru_cache
def sources(outputs: tuple[str, ...], manifest: Manifest) -> tuple[Mapping[str, str], tuple[str, ...], int]:
    """Return for each output that is wanted the output of a graph that it is, those, and the width of all wanted."""
    # Where the model's own lookup is what enters block 0, it has no output of its own.
    same = manifest.token_embeddings is not None and manifest.token_embeddings.output == EMBEDDINGS
    sources = {name: EMBEDDINGS if same and name == TOKEN_EMBEDDINGS else name for name in outputs}
    return sources, tuple(dict.fromkeys(sources.values())), sum(manifest.widths[name] for name in outputs)


def run_members(model: Model, outputs: tuple[str, ...], members: list[Member]) -> list[dict[str, NDArray[np.float32]]]:
    """Return the outputs of each member; several share one run, as rows of one token."""
    if len(members) == 1:
        execution = members[0].execution
        execution.passed()
        found = model.run(members[0].feeds, outputs)
        execution.passed()
        execution.batch = execution.rows
        return [found]
    for member in members:
        member.execution.passed()
    rows = [_rows_of_one(member, model.manifest) for member in members]
    feeds = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    answers = _parts(model.run(feeds, outputs), members)
    for member in members:
        member.execution.passed()
        member.execution.batch = 0
    members[0].execution.batch = sum(member.execution.rows for member in members)
    return answers


def _rows_of_one(member: Member, manifest: Manifest) -> dict[str, Int64]:
    """Return the inputs of a call as rows of one token, each at its position."""
    feeds, offset = member.feeds, member.feeds["offset"]
    batch, length = feeds["input_ids"].shape
    if length == 1:
        return feeds if len(offset) == batch else feeds | {"offset": np.repeat(offset, batch)}
    feeds = {name: values.reshape(-1, 1) for name, values in feeds.items() if name != "offset"}
    if member.request is None:
        positions = np.broadcast_to(offset.reshape(-1, 1) + np.arange(length), (batch, length)).reshape(-1)
    else:
        positions = position_index(member.request, manifest, offset)
    return feeds | {"offset": positions}


def _parts(found: Mapping[str, NDArray[np.float32]], members: list[Member]) -> list[dict[str, NDArray[np.float32]]]:
    """Return what each member has of vectors (T, 1, width), in the shape that it called for."""
    parts, begin = [], 0
    for member in members:
        shape = member.feeds["input_ids"].shape
        end = begin + math.prod(shape)
        parts.append({name: vectors[begin:end].reshape(*shape, -1) for name, vectors in found.items()})
        begin = end
    return parts


def _in_pieces(request: Request, call: Call, manifest: Manifest, most: int) -> bool:
    """Return whether pieces of `most` tokens give the vectors of a call."""
    return (
        len(request.outputs) == 1
        and not manifest.rotary
        and (manifest.counts == "slots" or call.feeds["input_ids"].shape[1] <= most)
    )


def _vectors(
    model: Model, names: tuple[str, ...], feeds: Mapping[str, Int64], most: int
) -> Iterator[NDArray[np.float32]]:
    """Yield the vectors of a call in pieces of at most `most` tokens."""
    for piece in pieces(feeds, most):
        (vectors,) = model.run(piece, names).values()
        yield vectors


def _check_values(
    model: Model, names: tuple[str, ...], feeds: Mapping[str, Int64], most: int, request: Request
) -> None:
    """Raise Invalid where a value of a call is too large for the type of the answer, or one that it cannot hold."""
    for vectors in _vectors(model, names, feeds, most):
        narrow = cast(vectors, request.dtype)
        if request.check is not None:
            request.check(narrow)


def _computed(
    model: Model, names: tuple[str, ...], feeds: Mapping[str, Int64], most: int, dtype: str, execution: Execution
) -> Iterator[NDArray[np.generic]]:
    """Yield the vectors of a call in pieces of at most `most` tokens, and count it."""
    execution.passed()
    success = False
    try:
        for vectors in _vectors(model, names, feeds, most):
            yield cast(vectors, dtype)
        execution.passed()
        execution.passed()
        execution.batch, success = execution.rows, True
    finally:
        execution.end(success)


def _pooled(model: Model, names: tuple[str, ...], member: Member) -> NDArray[np.generic]:
    """Return one vector for each row, (B, width), of which only a few are computed at a time."""
    request, feeds, execution = member.request, member.feeds, member.execution
    assert request is not None
    rows, real = request.input_ids, real_tokens(request, model.manifest)
    length = feeds["input_ids"].shape[1]
    most = max(1, SMALL // model.manifest.widths[request.outputs[0]])
    execution.passed()
    found: list[NDArray[np.float32]] = []
    for first, last in _groups(rows.lengths, most):
        begin, end = int(rows.starts[first]), int(rows.starts[last - 1] + rows.lengths[last - 1])
        part = {name: values[begin // length : end // length] for name, values in feeds.items()}
        if len(feeds["offset"]) == 1:
            part["offset"] = feeds["offset"]
        (vectors,) = model.run(part, names).values()
        some = Rows(rows.values[begin:end], rows.lengths[first:last])
        kept = None if real is None else real[begin:end]
        found.append(pool(vectors.reshape(end - begin, -1), some, kept, request.pooling))
    execution.passed()
    pooled = cast(np.concatenate(found), request.dtype)
    execution.passed()
    execution.batch = execution.rows
    return pooled


def _groups(lengths: Int64, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each group, and the one after its last, which have at most `most` tokens, or one row."""
    first, tokens = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > first and tokens + length > most:
            yield first, row
            first, tokens = row, 0
        tokens += length
    yield first, len(lengths)


def _finish(
    request: Request,
    member: Member,
    manifest: Manifest,
    outputs: Mapping[str, str],
    found: Mapping[str, NDArray[np.float32]],
) -> dict[str, NDArray[np.generic]]:
    """Return the outputs that a request wants, in its type and shape."""
    rows, called = request.input_ids, member.feeds["input_ids"].shape
    shape = (len(rows.values),) if rows.length is None else (len(rows.lengths), rows.length)
    tensors: dict[str, NDArray[np.generic]] = {}
    for output, name in outputs.items():
        vectors = found[name]
        if vectors.shape[0] != called[0]:  # rotary angles, computed once for rows that begin at one offset
            vectors = np.ascontiguousarray(np.broadcast_to(vectors, (*called, vectors.shape[-1])))
        width = vectors.shape[-1]
        if request.pooling == "none":
            tensors[output] = cast(vectors, request.dtype).reshape(*shape, width)
        else:
            pooled = pool(vectors.reshape(-1, width), rows, real_tokens(request, manifest), request.pooling)
            tensors[output] = cast(pooled, request.dtype)
    member.execution.passed()
    return tensors


def plan(request: Request, manifest: Manifest) -> Call:
    """Choose the shape of the call for a request that was checked, and the positions in it."""
    rows = request.input_ids
    offset = ZERO if request.offset is None else request.offset
    next_offset: Int64 = offset + count_real(request, manifest)
    shape: tuple[int, int]
    if graph_counts(request, manifest):
        shape, positions = (len(rows.lengths), len(rows.values) // len(rows.lengths)), offset
    else:
        shape = (len(rows.values), 1)
        if request.position_ids is None:
            positions = position_index(request, manifest, offset)
        else:
            positions = request.position_ids.values
            real = real_tokens(request, manifest)
            next_offset = np.maximum.reduceat((positions + 1) * (1 if real is None else real), rows.starts)
    feeds = {"input_ids": rows.values.reshape(shape), "offset": positions}
    for name in manifest.indices:
        feeds[name] = (request.indices[name].values if name in request.indices else np.zeros_like(rows.values)).reshape(
            shape
        )
    if manifest.needs_mask:
        mask = request.attention_mask
        feeds["attention_mask"] = (np.ones_like(rows.values) if mask is None else mask.values).reshape(shape)
    return Call(feeds, next_offset)


def cast(vectors: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Return `vectors` in an output type, rounded to nearest, ties to even.

    Raises:
        Invalid: a value is too large for the type.

    """
    if dtype == "float32":
        return vectors
    with np.errstate(over="ignore"):
        narrow = vectors.astype(DTYPES[dtype])
    if not np.isfinite(narrow).all() and np.isfinite(vectors).all():
        raise Invalid("dtype", dtype, f"float32, since a value of {float(np.abs(vectors).max()):g} does not fit")
    return narrow
