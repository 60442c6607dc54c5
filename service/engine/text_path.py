"""The fast path of short texts, with one vector for each: only their numbers are validated.

It does the work of `Engine.embed` for requests without a thread. The general path reports the errors.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from preblock.service.core.results import EmbedResult
from preblock.service.core.types import Int64, TextRequest, TokenRequest
from preblock.service.engine.engine import Engine, finish_outputs, tokenizer_cost
from preblock.service.engine.fast_path import FastPath, FastRun, fast_path_of
from preblock.service.engine.plain_calls import Bounds, Call, bounds_of, is_plain
from preblock.service.engine.planning import BatchItem, plan
from preblock.service.engine.pooling import finish_pooled, mean_of_rows, table_of_means
from preblock.service.observability.context import RequestContext
from preblock.service.observability.record import RequestRecord
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.session import INLINE_MAX_VALUES


def text_path_of(engine: Engine, model: TokenModel, request: TextRequest, as_numbers: bool) -> "TextPath | None":
    """Return the fast path for texts with the options of `request`; None if the model or an option has none.

    `as_numbers` states whether the response holds the vectors as text.
    """
    if request.pooling == "none" or request.truncate is not None or model.tokenizer is None:
        return None
    fast_path = fast_path_of(engine, model, request.outputs, request.dtype)
    bounds = bounds_of(model.manifest, request.outputs, request.dtype, request.pooling)
    return None if fast_path is None or bounds is None else TextPath(engine, fast_path, bounds, request, as_numbers)


class TextPath:
    """Computes one vector for each text.

    Args:
        engine: source of the limits.
        fast_path: of the token vectors.
        bounds: legal values of the requests.
        request: a legal request; its texts are not kept.
        as_numbers: whether the response holds the vectors as text.

    """

    def __init__(
        self, engine: Engine, fast_path: FastPath, bounds: Bounds, request: TextRequest, as_numbers: bool
    ) -> None:
        self.model, self.metrics, self.scheduler = fast_path.model, fast_path.metrics, fast_path.scheduler
        manifest = self.model.manifest
        self.options = replace(request, text=())
        self.limits = engine.limits
        self._engine, self._fast_path, self._bounds, self._as_numbers = engine, fast_path, bounds, as_numbers
        self._segments = "token_type_ids" in manifest.indices
        special = request.special_tokens
        self._special = manifest.sentence is None if special is None else special
        self._columns = request.dimensions or fast_path.width

    def start(
        self, protocol: str, texts: Sequence[str], context: RequestContext | None, started: float
    ) -> "TextRun | None":
        """Start a request of at least one text of at least one character each; see `FastPath.start`."""
        scheduler, limits = self.scheduler, self.limits
        size = len(texts) * self._columns
        if (
            not limits.admits()
            or not scheduler.is_inline(tokenizer_cost(self.model, texts))
            or not scheduler.is_inline(size, self._as_numbers)
        ):
            return None
        record = RequestRecord(protocol, context, started)
        record.select(self.model.name, self.model.version)
        try:
            request = self._tokenize(texts)
            call = Call.of(request, self.model.manifest)
            values = len(request.input_ids.values) * self._fast_path.width
            if call is None or values > INLINE_MAX_VALUES:
                return None
            if not is_plain(call, self._bounds, self.limits.of_requests, values):
                return None
            run = TextRun(self._fast_path, record, request, call.pooled)
            if not self._fast_path.admission.take_response(record, size):
                return None
            self._fast_path.admission.enter(record)
        except Exception:
            return None  # a tokenizer may raise any exception; the general path reports it
        return run

    def _tokenize(self, texts: Sequence[str]) -> TokenRequest:
        """Return the request of tokens."""
        tokenizer, options = self.model.tokenizer, self.options
        assert tokenizer is not None
        found = tokenizer.encode(texts, self._engine.max_tokens, False, self._special, self._segments)
        return TokenRequest(
            input_ids=found.input_ids,
            indices={} if found.token_type_ids is None else {"token_type_ids": found.token_type_ids},
            pooling=options.pooling,
            dimensions=options.dimensions,
            normalize=options.normalize,
            outputs=options.outputs,
        )


class TextRun(FastRun):
    """The run of one accepted request of texts.

    Args:
        fast_path: of the token vectors.
        record: of the request.
        request: legal tokens of the texts.
        real: 1 for each token with a part in its vector, int64 (T,); None if all have one.

    """

    __slots__ = ("_real", "_request", "_table")

    def __init__(self, fast_path: FastPath, record: RequestRecord, request: TokenRequest, real: Int64 | None) -> None:
        self._fast_path, self.record, self._request, self._real = fast_path, record, request, real
        self._table = table_of_means(fast_path.model, fast_path.names, request)
        ids = {"input_ids": request.input_ids.values}
        self._item = BatchItem(ids if self._table else plan(request, fast_path.model.manifest)[0], record, request)
        record.rows, record.tokens = len(request.input_ids.lengths), len(request.input_ids.values)
        self.batched = self.streamed = False
        record.checked = perf_counter()

    def result(self) -> EmbedResult:
        """Return the vectors of the texts, (B, D), as `Engine.embed` does."""
        fast_path, request, record = self._fast_path, self._request, self.record
        (output,), model = request.outputs, fast_path.model
        if self._table is None:
            (found,) = fast_path.run([self._item])
            outputs = {output: fast_path.sources[0]}
            tensors = finish_outputs(request, self._item, model.manifest, outputs, found)
        else:
            record.dequeued = perf_counter()
            means = mean_of_rows(self._table, request.input_ids, self._real)
            record.ran, record.batch = perf_counter(), record.rows
            tensors = {output: finish_pooled(means, request, model.manifest)}
        record.ended = perf_counter()
        return EmbedResult(
            model=model.name,
            version=model.version,
            dtype=request.dtype,
            tensors=tensors,
            lengths=request.input_ids.lengths,
            next_offset=request.input_ids.lengths,
        )
