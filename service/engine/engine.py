"""The engine: turns requests of every protocol into results.

Every front-end is token-wise: the vector of a token depends on its id, its position and its segment alone. So rows of
unequal length, masks and explicit positions run as T rows of length 1 with the position as offset, without padding.
N-gram embeddings depend on earlier ids too, so each of these rows has the ids before its token as context.
Small requests of one event-loop iteration run together in the same way, with any lengths, offsets and protocols.

Letters: B batch, L length, T tokens of all rows, D output width.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import BIAS_GRAPH, GRAPH, STORED
from preblock.service.core.errors import Invalid
from preblock.service.core.settings import LiveSettings
from preblock.service.core.types import (
    AnyRequest,
    EmbedResult,
    Int64,
    PairwiseBiasRequest,
    PartsRequest,
    Result,
    RowsRequest,
    StemRequest,
    Tensor,
    TextRequest,
    TokenRequest,
)
from preblock.service.engine import chunking, planning
from preblock.service.engine.admission import Admission, Limits
from preblock.service.engine.history import next_context
from preblock.service.engine.parts import assemble, cost_of_parts, place_vectors, vectors_of_outputs
from preblock.service.engine.plain_calls import check_size
from preblock.service.engine.planning import BatchItem, Outputs
from preblock.service.engine.positions import next_positions, pooled_tokens
from preblock.service.engine.scheduler import TOKEN_COST, TOKENIZER_COST, Scheduler
from preblock.service.engine.truncation import truncate
from preblock.service.engine.validation import check, check_bias, check_pooled, check_stem, to_position_ids
from preblock.service.engine.vectors import average_in_place, cast, finish_pooled, pool, table_of_means
from preblock.service.observability.context import RequestRecord
from preblock.service.observability.logs import AccessLog
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.model import EncoderStem, LoadedModel, TokenModel
from preblock.service.runtime.model_control import ModelControl
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.runner import Feeds
from preblock.service.runtime.session import INLINE_MAX_VALUES, free_memory
from preblock.service.runtime.shared_memory import SharedMemory


class Engine:
    """Computes the results of requests.

    Args:
        repository: the models.
        scheduler: runs small work inline, and large work in threads.
        metrics: counts the requests.
        settings: the limits, and the share of requests in the access log.
        control: loads and unloads models; default: models stay as they are.

    """

    def __init__(
        self,
        repository: Repository,
        scheduler: Scheduler,
        metrics: Metrics,
        settings: LiveSettings,
        control: ModelControl | None = None,
    ) -> None:
        self.repository = repository
        self.control = control or ModelControl(repository, "none", 1)
        self.scheduler = scheduler
        self.metrics = metrics
        metrics.queue_depth = scheduler.queue_depth
        self.settings = settings
        self.limits = Limits(settings, free_memory)
        self.shared_memory = SharedMemory(settings)
        self.admission = Admission(self.limits, metrics, AccessLog(settings))

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request."""
        return self.settings.requests.tokens

    async def answer(self, model: TokenModel | EncoderStem, request: AnyRequest, record: RequestRecord) -> Result:
        """Return the result of `embed`, `bias` or `stem`, by the kind of request."""
        match model, request:
            case TokenModel(), TokenRequest() | TextRequest() | PartsRequest():
                return await self.embed(model, request, record)
            case TokenModel(), PairwiseBiasRequest():
                return await self.bias(model, request, record)
            case EncoderStem(), StemRequest():
                return await self.stem(model, request, record)
        raise TypeError(f"{type(model).__name__} takes no {type(request).__name__}")

    async def embed(self, model: TokenModel, wanted: RowsRequest, record: RequestRecord) -> EmbedResult:
        """Return the vectors of token ids, of text, or of rows made of parts.

        A large response is computed while it is sent. Its record is deferred, and ends after the last chunk.

        Raises:
            ClientFault: the request is not allowed.
            ArtifactError: the tokenizer is broken.
            Unavailable: the work queue is full.

        """
        record.select(model.name, model.version)
        sent = wanted if isinstance(wanted, TokenRequest) else await self.to_tokens(model, wanted)
        record.ids = sent.input_ids
        cost = TOKEN_COST * len(sent.input_ids.values)
        request, feeds, next_offset = await self.scheduler.run(cost, lambda: self._prepare(sent, model.manifest))
        record.rows, record.tokens = len(request.input_ids.lengths), len(request.input_ids.values)
        tensors = await self._compute(model, request, BatchItem(feeds, record, request))
        return EmbedResult(
            model=model.name,
            version=model.version,
            dtype=request.dtype,
            tensors=tensors,
            lookup_use=model.manifest.lookup_use,
            lengths=request.input_ids.lengths,
            next_offset=next_offset,
            next_context=None if model.manifest.history is None else next_context(request, model.manifest),
            position_delta=next_positions(request, model.manifest) - next_offset if request.further_positions else None,
            truncated=sent.input_ids.lengths - request.input_ids.lengths if request.truncate else None,
            input_ids=None if request.spans is None else request.input_ids,
            spans=request.spans,
        )

    async def _compute(self, model: TokenModel, request: TokenRequest, item: BatchItem) -> Mapping[str, Tensor]:
        """Return the outputs of a validated request: pooled, from a micro-batch, in one run, or in chunks."""
        record = item.record
        outputs, names, width = planning.resolve_outputs(request.outputs, model.manifest, request.dtype)
        size = item.feeds["input_ids"].size * width
        streamed = chunking.is_streamed(request, model.manifest, size)
        table = table_of_means(model, names, request)
        pooled = table is not None or (streamed and request.pooling != "none")
        values = (record.rows if pooled else record.tokens) * width
        if request.chunks == "buffered" or pooled or not streamed:
            check_size(self.settings.requests, "input_ids", values=values)
        else:
            values = min(values, planning.MAX_SENT_VALUES)
        record.checked = perf_counter()
        await self.admission.reserve_response(record, values)
        if request.given is not None:
            item.given = await self.scheduler.run(size, lambda: vectors_of_outputs(request, model, names))
        finish = partial(finish_outputs, request, item, model.manifest, outputs)
        if table is not None:
            real = pooled_tokens(request, model.manifest)
            average = partial(average_in_place, table, request, model.manifest, real, record)
            return dict.fromkeys(outputs, await self.scheduler.run(size, average))
        if pooled:
            return await self.scheduler.run(size, lambda: chunking.compute_pooled(model, outputs, item, request))
        if size <= planning.max_batched_values(model):
            run = partial(planning.run_batch, model, names)
            return finish(await self.scheduler.run_batched((id(model), names), size, item, run))
        if not streamed:
            return await self.scheduler.run(size, lambda: finish(chunking.compute_buffered(model, names, item)))
        cost = TOKEN_COST * record.tokens
        await self.scheduler.run(cost, lambda: chunking.to_token_rows(model, names, item))
        record.dequeued = perf_counter()
        # After the first chunk is sent, the request can no longer be rejected.
        if request.dtype not in ("float32", STORED) or request.check is not None:
            await self.scheduler.run(size, lambda: chunking.check_values(model, names, item, request))
        tensors = chunking.stream_chunks(model, outputs, item, request, self.admission)
        record.deferred = True
        return tensors

    def _prepare(self, sent: TokenRequest, manifest: Manifest) -> tuple[TokenRequest, dict[str, Int64], Int64]:
        """Validate and truncate a request, and return it with its feeds and next offsets."""
        sent = to_position_ids(sent, manifest)
        check(sent, manifest, self.settings.requests)
        request = sent
        if sent.truncate is not None:
            request = truncate(sent, manifest)
            check_pooled(request, manifest)
        return request, *planning.plan(request, manifest)

    async def to_tokens(self, model: TokenModel, request: TextRequest | PartsRequest) -> TokenRequest:
        """Return the tokens of text, or of parts; the request is not validated further.

        Raises:
            ClientFault: the request is not allowed.
            Unavailable: the work queue is full.

        """
        if isinstance(request, TextRequest):
            return await self._tokenize(model, request)
        check_size(self.settings.requests, "parts", rows=len(request.rows))
        texts = [part.text for row in request.rows for part in row if part.text is not None]
        cost = tokenizer_cost(model, texts) + cost_of_parts(request, model)
        return await self.scheduler.run(cost, lambda: assemble(request, model, self.max_tokens))

    async def _tokenize(self, model: TokenModel, request: TextRequest) -> TokenRequest:
        """Return the tokens of texts."""
        text = request.text
        if model.tokenizer is None:
            raise Invalid("text", repr(text[0]), "token ids, since this model has no tokenizer")
        check_size(self.settings.requests, "text", rows=len(text))
        work = partial(tokenize, model, text, request, self.max_tokens)
        return await self.scheduler.run(tokenizer_cost(model, text), work)

    async def bias(self, model: TokenModel, request: PairwiseBiasRequest, record: RequestRecord) -> Result:
        """Return the attention bias by the distance between query and key.

        Raises:
            ClientFault: the request is not allowed.
            Unavailable: the work queue is full.

        """
        record.select(model.name, model.version)
        shape = check_bias(request, model.manifest, self.max_tokens)
        check_size(self.settings.requests, "query_length and key_length", values=math.prod(shape))
        offset = request.query_offset or 0
        lengths = {"query_offset": offset, "query_length": request.query_length, "key_length": request.key_length}
        feeds = {name: np.array([length], np.int64) for name, length in lengths.items()}
        record.rows = record.batch = 1
        await self.admission.reserve_response(record, math.prod(shape))
        return await self._run_graph(model, BIAS_GRAPH, feeds, request.dtype, record, math.prod(shape))

    async def stem(self, stem: EncoderStem, request: StemRequest, record: RequestRecord) -> Result:
        """Return the embeddings of images or spectrograms for block 0.

        Raises:
            ClientFault: the request is not allowed.
            Unavailable: the work queue is full.

        """
        record.select(stem.name, stem.version)
        vectors = check_stem(request, stem.manifest, self.max_tokens)
        values = vectors * stem.manifest.width
        name = stem.manifest.input.name
        check_size(self.settings.requests, name, rows=len(request.values), values=values)
        record.rows = record.batch = len(request.values)
        feeds = {name: request.values}
        await self.admission.reserve_response(record, values)
        # Always in a thread, because a convolution is slow at any size.
        result = await self._run_graph(stem, GRAPH, feeds, request.dtype, record, INLINE_MAX_VALUES + 1)
        record.tokens = vectors
        return result

    async def _run_graph(
        self, model: LoadedModel, graph: str, feeds: Feeds, dtype: str, record: RequestRecord, size: int
    ) -> Result:
        """Run a graph, and return all its outputs in the type `dtype`; `size` is their number of values."""
        record.checked = perf_counter()

        def run() -> dict[str, NDArray[np.generic]]:
            record.dequeued = perf_counter()
            found = model.sessions[graph].run(feeds)
            record.ran = perf_counter()
            return {name: cast(tensor, dtype) for name, tensor in found.items()}

        tensors = await self.scheduler.run(size, run)
        return Result(model=model.name, version=model.version, dtype=dtype, tensors=tensors)


def tokenizer_cost(model: TokenModel, texts: Sequence[str]) -> int:
    """Return the cost of tokenizing texts, in values. The first texts also open the tokenizer."""
    if texts and model.tokenizer is not None and not model.tokenizer.opened:
        return INLINE_MAX_VALUES + 1
    return TOKENIZER_COST * (sum(map(len, texts)) + len(texts))


def tokenize(model: TokenModel, texts: Sequence[str], request: TextRequest, max_tokens: int) -> TokenRequest:
    """Return the tokens of texts, with the options of a request, for a model with a tokenizer.

    Raises:
        ClientFault: a text has no tokens, the tokenizer refuses it, or there are more than `max_tokens` tokens.
        ArtifactError: the tokenizer is broken.

    """
    assert model.tokenizer is not None
    special = model.manifest.sentence is None if request.special_tokens is None else request.special_tokens
    segments, marks = "token_type_ids" in model.manifest.indices, request.truncate is not None
    spans, in_text = request.spans, request.special_tokens_in_text
    return model.tokenizer.encode(
        texts, max_tokens, spans, special, segments, marks, in_text=in_text, options=request.options
    )


def finish_outputs(
    request: TokenRequest, item: BatchItem, manifest: Manifest, outputs: Mapping[str, str], found: Outputs
) -> dict[str, NDArray[np.generic]]:
    """Pool the outputs of a run on request, and return them in the type and shape of the response."""
    rows, called = request.input_ids, item.feeds["input_ids"].shape
    shape = (len(rows.values),) if rows.length is None else (len(rows.lengths), rows.length)
    tensors: dict[str, NDArray[np.generic]] = {}
    for output, name in outputs.items():
        vectors = found[name]
        width = vectors.shape[-1]
        if name in item.given and request.given is not None:
            vectors = place_vectors(vectors.reshape(-1, width), 0, request.given.tokens, item.given[name])
            vectors = vectors.reshape(*called, width)
        if vectors.shape[0] != called[0]:  # rotary angles, computed once for rows with one offset
            vectors = np.ascontiguousarray(np.broadcast_to(vectors, (*called, width)))
        if called[0] > len(rows.values):
            vectors = planning.join_axes(vectors, output, manifest)
        if request.pooling == "none":
            vectors = vectors.reshape(*shape, *manifest.shapes[output])
        else:
            pooled = pool(vectors.reshape(-1, width), rows, pooled_tokens(request, manifest), request.pooling)
            vectors = finish_pooled(pooled, request, manifest)
        tensors[output] = cast(vectors, manifest.dtype_of(output, request.dtype))
    return tensors
