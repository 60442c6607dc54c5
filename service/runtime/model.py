"""Loaded models: their manifests and their runners, and the chunks of large calls.

Letters: B batch, L length, P width of a row of positions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from preblock.service.artifacts.graphs import build_position_graph
from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.names import (
    CONTEXT,
    EMBEDDINGS,
    LAYER_TOKENS_GRAPH,
    NGRAM_IDS_GRAPH,
    NGRAM_OUTPUTS,
    NGRAMS,
    NGRAMS_GRAPH,
    STORED_NGRAMS,
)
from preblock.service.artifacts.parity import ParityReport
from preblock.service.core.types import GpuTarget, Int64
from preblock.service.runtime.cuda_embedding import CudaLookup
from preblock.service.runtime.fused_embedding import FusedLookup, KernelTables, covers
from preblock.service.runtime.means import LookupTable
from preblock.service.runtime.ngram_rows import NgramRows
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.runner import Feeds, FlatRunner, Float32, Runner
from preblock.service.runtime.session import CudaSession, Session
from preblock.service.runtime.tokenizer import Tokenizer

CHUNK_VALUES = 3 * 2**16
"""Values of a chunk of a large response. A chunk blocks other requests, and is sent from the processor's cache."""


def split_feeds(feeds: Mapping[str, Int64], max_tokens: int) -> Iterator[dict[str, Int64]]:
    """Split `feeds` (B, L) into the fewest feeds of at most `max_tokens` tokens, all about equally large.

    Each gets its own part of `context` (B, H), if there is one.

    Their vectors, in order, equal the vectors of `feeds`. Rows over `max_tokens` tokens are cut too; this requires a
    model with `counts` of "slots".
    """
    batch, length = feeds["input_ids"].shape
    offset = feeds["offset"]
    if length <= max_tokens:
        rows = _part_size(batch, max_tokens // length)
        for row in range(0, batch, rows):
            chunk = {name: values[row : row + rows] for name, values in feeds.items()}
            yield chunk if len(offset) > 1 else chunk | {"offset": offset}
        return
    max_tokens = _part_size(length, max_tokens)
    tokens = {name: values for name, values in feeds.items() if name not in ("offset", CONTEXT)}
    history = feeds[CONTEXT].shape[1] if CONTEXT in feeds else 0
    ids = np.concatenate((feeds[CONTEXT], feeds["input_ids"]), axis=1) if history else feeds["input_ids"]
    for row in range(batch):
        start = offset[row : row + 1] if len(offset) > 1 else offset
        for begin in range(0, length, max_tokens):
            chunk = {name: values[row : row + 1, begin : begin + max_tokens] for name, values in tokens.items()}
            if history:
                chunk[CONTEXT] = ids[row : row + 1, begin : begin + history]
            yield chunk | {"offset": start + begin}


def _part_size(whole: int, most: int) -> int:
    """Return the size of equal parts of `whole`: as few parts as possible, of at most `most` each."""
    return -(-whole // -(-whole // most))


class PositionRows:
    """Computes the vectors that a model adds for its positions, on the CPU.

    Args:
        session: runs the graph of `build_position_graph`.
        manifest: of the model.

    """

    def __init__(self, session: Session, manifest: Manifest) -> None:
        self._session = session
        self._real_id = int(manifest.padding_id == 0)
        """An id other than padding, which has no position."""
        self.width: int = self._compute(0, 1).shape[1]
        """P."""

    def compute(self, first: int, count: int) -> Float32:
        """Return the rows of the positions `first` to `first + count - 1`, float32 (count, P), of validated numbers.

        They are computed in chunks, because onnxruntime keeps the memory of its largest run.
        """
        rows, most = np.empty((count, self.width), np.float32), max(1, CHUNK_VALUES // self.width)
        for begin in range(0, count, most):
            end = min(begin + most, count)
            rows[begin:end] = self._compute(first + begin, end - begin)
        return rows

    def _compute(self, first: int, count: int) -> Float32:
        feeds = {tensor.name: np.zeros((1, count), np.int64) for tensor in self._session.inputs}
        feeds["input_ids"][:] = self._real_id
        if "attention_mask" in feeds:
            feeds["attention_mask"][:] = 1
        feeds["offset"] = np.array([first])
        (rows,) = self._session.run(feeds).values()
        return rows.reshape(count, -1)


def open_position_rows(folder: Path, manifest: Manifest) -> PositionRows | None:
    """Open the position rows of the artifact in `folder`; None if its graph adds no positions to the token rows.

    The additions of a custom module have no known meaning: None, too.

    Raises:
        ArtifactError: onnxruntime cannot load the graph.

    """
    content = None if manifest.front_end is None else build_position_graph(folder, manifest)
    if content is None:
        return None
    return PositionRows(Session(folder, CPU, 1, manifest.plain, content=content), manifest)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """One version of a model, ready to run.

    Args:
        name: of the model.
        version: of the model.
        identity: of the artifact.
        parity: the comparison with its source.
        provider: onnxruntime name of the provider; a few graphs may run on the CPU nevertheless.
        sessions: by graph.
        created: time of export, in seconds since 1970.

    """

    name: str
    version: int
    identity: str
    parity: ParityReport
    provider: str
    sessions: dict[str, Session]
    created: int


@dataclass(frozen=True, kw_only=True)
class EncoderStem(LoadedModel):
    """A model of images or spectrograms."""

    manifest: StemManifest


@dataclass(frozen=True, kw_only=True)
class TokenModel(LoadedModel):
    """A model of token ids, and the tokenizer of its artifact, if it has one."""

    manifest: Manifest
    tokenizer: Tokenizer | None
    tables: KernelTables | None = field(repr=False, compare=False)
    """Tables of the fused kernel on the CPU; None if onnxruntime or a GPU runs all calls."""
    gpu_lookup: CudaLookup | None
    """Computes `embeddings` alone on a GPU; None if onnxruntime or the CPU computes them."""
    lookup_table: LookupTable | None = field(repr=False, compare=False)
    """Averages rows of the table of `embeddings`; None if they are no rows of one, or the kernel was not built."""
    ngrams: NgramRows | None = field(repr=False, compare=False)
    """Computes the outputs of n-gram tables; None if graphs compute them."""
    soft_prompts: Mapping[str, Float32] = field(repr=False, compare=False)
    """Vectors (N, width of a token vector) of each soft prompt by name."""
    position_rows: PositionRows | None = field(repr=False, compare=False)
    """Computes the vectors of positions; None if the model adds none."""
    _runners: dict[tuple[str, ...], list[tuple[Runner, list[str]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def widths(self) -> dict[str, int]:
        """Values of a token in each output of `run`, by name."""
        widths = self.manifest.widths
        return widths | {STORED_NGRAMS: widths[NGRAMS]} if self.ngrams else widths

    def run(self, feeds: Feeds, outputs: tuple[str, ...]) -> dict[str, Float32]:
        """Return outputs of tokens by name, each (B, L, width), or (1, L, width) if it is the same for all rows.

        `feeds` hold every input of the model, validated.
        """
        runners = self._runners.get(outputs) or self._choose(outputs)
        if len(runners) == 1:  # saves a dictionary: a call of one token takes only five microseconds
            runner, names = runners[0]
            return runner.run(feeds, names)
        found: dict[str, Float32] = {}
        for runner, names in runners:
            found |= runner.run(feeds, names)
        return found

    def look_up(self, ids: Int64) -> Float32:
        """Return the model's own lookup of validated ids (N,): float32 (N, width). Its manifest names the output."""
        assert self.manifest.token_embeddings is not None
        output = self.manifest.token_embeddings.output
        (graph,) = self.manifest.graphs_for((output,))
        shape = (1, len(ids))
        feeds: dict[str, Int64] = {tensor.name: np.zeros(shape, np.int64) for tensor in self.sessions[graph].inputs}
        feeds |= {"input_ids": ids.reshape(shape), "offset": np.zeros(1, np.int64)}
        vectors = self.sessions[graph].run(feeds, (output,))[output]
        return vectors.reshape(len(ids), -1)

    def run_in_chunks(self, feeds: dict[str, Int64], output: str, max_tokens: int) -> Iterator[Float32]:
        """Yield one output of tokens in chunks of at most `max_tokens` tokens."""
        # All feeds are cut first, because a run evicts them from the processor's caches.
        return (self.run(chunk, (output,))[output] for chunk in list(split_feeds(feeds, max_tokens)))

    def writes_into(self, feeds: Feeds, output: str) -> bool:
        """Return whether `run_into_chunks` supports these feeds and this output."""
        return output == EMBEDDINGS and self.tables is not None and covers(feeds)

    def run_into_chunks(self, feeds: dict[str, Int64], max_tokens: int, vectors: Float32) -> Iterator[Float32]:
        """Write `embeddings` into `vectors`, (T, width), and yield each chunk of at most `max_tokens` tokens.

        Raises:
            BufferError: `vectors` is a mapped file that has become shorter.

        """
        ((lookup, _),) = self._runners.get((EMBEDDINGS,)) or self._choose((EMBEDDINGS,))
        assert isinstance(lookup, FusedLookup)
        begin = 0
        for chunk in list(split_feeds(feeds, max_tokens)):
            shape = chunk["input_ids"].shape
            part = vectors[begin : begin + chunk["input_ids"].size]
            lookup.run_into(chunk, part.reshape(*shape, -1))
            yield part
            begin += len(part)

    @cached_property
    def exact_rows(self) -> bool:
        """Whether a vector has the same bits in a call of any shape."""
        return self.manifest.exact_rows if self.provider == CPU else self.manifest.exact_rows_on_gpu

    @property
    def batches_freely(self) -> bool:
        """Whether more tokens hardly lengthen a call, as on a GPU."""
        return self.provider != CPU

    def runs_on_gpu(self, output: str) -> bool:
        """Return whether `write_on_gpu` supports this output: one runner computes it in float32 on a GPU."""
        runner, _ = (self._runners.get((output,)) or self._choose((output,)))[0]
        return isinstance(runner, CudaLookup) or (isinstance(runner, CudaSession) and runner.is_float32(output))

    def write_on_gpu(self, feeds: dict[str, Int64], output: str, max_tokens: int, target: GpuTarget) -> Iterator[None]:
        """Write an output to memory of the GPU, and yield after each call.

        A call of a graph takes at most `max_tokens` tokens, and the kernel takes all of them.

        Raises:
            Unavailable: the driver fails.

        """
        ((runner, _),) = self._runners.get((output,)) or self._choose((output,))
        if isinstance(runner, CudaLookup):  # 16,384 tokens of width 768 take less than 100 us
            runner.run_into(feeds, target.address)
            yield
            return
        assert isinstance(runner, CudaSession)
        position = 0
        for chunk in list(split_feeds(feeds, max_tokens)):
            with runner.run_on_gpu(chunk, output) as (address, size):
                target.copy(position, address, size)
            position += size
            yield

    def _choose(self, outputs: tuple[str, ...]) -> list[tuple[Runner, list[str]]]:
        """Choose the runners of `outputs`, and cache them."""
        runners: list[tuple[Runner, list[str]]] = []
        gathered = [name for name in outputs if name in (*NGRAM_OUTPUTS, STORED_NGRAMS)] if self.ngrams else []
        others = tuple(name for name in outputs if name not in gathered)
        if self.ngrams and gathered:
            runners.append((self.ngrams, gathered))
        for graph, names in self.manifest.graphs_for(others).items() if others else ():
            runner: Runner = self.sessions[graph]
            if outputs == (EMBEDDINGS,) and self.tables is not None:
                runner = FusedLookup(self.tables, runner)
            if names == [EMBEDDINGS] and self.gpu_lookup is not None:
                runner = self.gpu_lookup
            if graph in (LAYER_TOKENS_GRAPH, NGRAMS_GRAPH, NGRAM_IDS_GRAPH):
                runner = FlatRunner(runner)
            runners.append((runner, names))
        self._runners[outputs] = runners
        return runners


ServedModel = TokenModel | EncoderStem
