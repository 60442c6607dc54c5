"""The one path from request to answer; every door uses it.

Every front-end is token-wise: a token's vector depends on its id, its position and its segment alone. So rows of
unequal length, masks and explicit positions all run as T rows of length 1 whose offset is the position: no padding.

Letters: B batch, L length, T tokens of all rows, D output width.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from incipit.service.batching import Scheduler
from incipit.service.errors import Invalid
from incipit.service.manifest import Manifest
from incipit.service.messages import DTYPES, Answer, Int64, Request
from incipit.service.metrics import Metrics
from incipit.service.positions import count_real, graph_counts, position_index, real_tokens
from incipit.service.repository import Model, Repository
from incipit.service.validation import check


@dataclass(frozen=True)
class Call:
    """The inputs of one run of a graph, and the offset (B,) that continues each row."""

    feeds: dict[str, Int64]
    next_offset: Int64


class Engine:
    """Answers requests.

    Args:
        repository: the models.
        scheduler: runs what takes long.
        metrics: counts.
        max_tokens: most tokens of one request.

    """

    def __init__(self, repository: Repository, scheduler: Scheduler, metrics: Metrics, max_tokens: int) -> None:
        self.repository = repository
        self.scheduler = scheduler
        self.metrics = metrics
        self.max_tokens = max_tokens
        self.ready = False

    async def embed(self, model: Model, request: Request) -> Answer:
        """Return the vectors of `request`.

        Raises:
            ClientFault: the request is not allowed.
            Unavailable: too much work waits.

        """
        check(request, model.manifest, self.max_tokens)
        call = plan(request, model.manifest)
        width, rows = model.manifest.width, request.input_ids
        tokens = len(rows.values)
        vectors = await self.scheduler.run(
            tokens * width, lambda: cast(model.session.run(call.feeds).reshape(tokens, width), request.dtype)
        )
        self.metrics.tokens(model.name, tokens)
        return Answer(
            model=model.name,
            version=model.version,
            dtype=request.dtype,
            embeddings=vectors,
            lengths=rows.lengths,
            shape=(tokens, width) if rows.length is None else (len(rows.lengths), rows.length, width),
            next_offset=call.next_offset,
        )

    def warm_up(self) -> None:
        """Run each model once; the engine is ready afterwards."""
        for model in self.repository.all():
            model.session.run(
                {tensor.name: np.zeros((1,) * len(tensor.shape), np.int64) for tensor in model.manifest.inputs}
            )
        self.ready = True


def plan(request: Request, manifest: Manifest) -> Call:
    """Choose the shape of the call for a request that was checked, and the positions in it."""
    rows, mask, segments = request.input_ids, request.attention_mask, request.token_type_ids
    offset = np.zeros(1, np.int64) if request.offset is None else request.offset
    next_offset: Int64 = np.broadcast_to(offset, rows.lengths.shape) + count_real(request, manifest)
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
    feeds = {"input_ids": rows.values, "offset": positions}
    for name, given, default in (("token_type_ids", segments, np.zeros_like), ("attention_mask", mask, np.ones_like)):
        if name in manifest.input_names:
            feeds[name] = default(rows.values) if given is None else given.values
    return Call(
        {name: values if name == "offset" else values.reshape(shape) for name, values in feeds.items()}, next_offset
    )


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
