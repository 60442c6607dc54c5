"""The reference of a proof: the values that the graphs of an artifact must compute; and its evaluation with NumPy.

The evaluation shares nothing with the writer of graphs but the config, the weights, and the derived numbers of
`preblock.models`. Sums and products of two numbers are taken in float32, as in a graph, bit for bit. Norms and
projections, whose sums may have any order, are taken in float64 and rounded once.

Letters: B batch, L length, D model width, R rotary width, H heads, Q query length, K key length.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import FrontEndData
from preblock.models.modules.bias import (
    AlibiConfig,
    RelativeSinusoidConfig,
    T5Config,
    alibi_slopes,
    relative_frequencies,
    t5_borders,
)
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.rotary_config import attention_factor, rotary_frequencies
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.models.modules.signature import Signature
from preblock.models.sinusoid_tables import exact_sinusoids, library_table
from preblock.models.steps import (
    Levels,
    Mask,
    Norm,
    Positions,
    Project,
    RmsNorm,
    Scale,
    Segments,
    Step,
    Tokens,
    Weights,
    names_of,
)
from preblock.service.artifacts.names import NGRAM_ROW_IDS, NGRAMS, PER_LAYER, PER_LAYER_TOKENS
from preblock.service.core.types import Int64

CHUNK_VALUES = 2**18
"""Values of a norm or a projection computed at once, to bound the working memory."""
Array = NDArray[Any]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Described(Protocol):
    """A front-end with the facts that decide which outputs are compared, and how closely."""

    @property
    def signature(self) -> Signature:
        """The inputs, sizes and promises of its graph."""

    @property
    def config(self) -> FrontEndConfig | None:
        """Its steps and further outputs; None for somebody's own module."""


class Reference(Described, Protocol):
    """The expected values of every output of a front-end, as float32 arrays; row ids are int64."""

    @property
    def version(self) -> str:
        """Name and version of the library that computes them, such as "numpy 2.3.1"."""

    def vectors(self, feeds: Mapping[str, Int64]) -> Float32:
        """Return the vectors (B, L, D) entering block 0 for inputs of the graph; indices and mask may be missing."""

    def look_up(self, ids: Int64, scaled: bool = True) -> Float32:
        """Return the model's own lookup of `ids` (B, L); with `scaled` false, the rows of its token table."""

    def per_layer_outputs(self, ids: Int64) -> dict[str, Float32]:
        """Return the inputs of all layers by name, (B, L, layers, width) and (B, L, layers * width)."""

    def ngram_outputs(self, ids: Int64, context: Int64) -> dict[str, Array]:
        """Return row ids int64 (B, L, layers, heads) and, with tables, embeddings (B, L, layers, width) by name."""

    def rotary_outputs(self, ids: Int64, offset: Int64) -> dict[str, Float32]:
        """Return cosines and sines by name, (1 or B, L, columns), not yet rounded to their own type."""

    def bias(self, lengths: Mapping[str, int]) -> Float32:
        """Return the attention bias (1, H, Q, K) or the rows of a relative sinusoid, for the inputs of its graph."""


class RowTable(Protocol):
    """A table in a stored type."""

    def take(self, ids: Int64) -> Float32:
        """Return the rows `ids` (...), float32 (..., D)."""


class NumpyReference:
    """The reference without PyTorch.

    Args:
        data: the config and the weights. Those of another type than float32 are widened at lookup.
        stored: tables in stored types, by the names of their weights; they replace those of `data`.

    """

    def __init__(self, data: FrontEndData, stored: Mapping[str, RowTable] = MappingProxyType({})) -> None:
        self.config, self._tensors, self._stored = data.config, data.tensors, stored
        self.signature, self.version = data.signature, f"numpy {np.__version__}"

    def vectors(self, feeds: Mapping[str, Int64]) -> Float32:
        """Return the vectors (B, L, D); arguments as in `Reference`."""
        return self._run(self.config.steps, feeds["input_ids"], feeds["offset"], feeds, feeds.get("attention_mask"))

    def look_up(self, ids: Int64, scaled: bool = True) -> Float32:
        """Return the model's own lookup, or the rows of its token table."""
        return self._run(self.config.steps[: self.config.lookup if scaled else 1], ids, np.zeros(1, np.int64))

    def per_layer_outputs(self, ids: Int64) -> dict[str, Float32]:
        """Return the inputs of all layers by name."""
        config = self.config.per_layer
        assert config is not None
        shape = (*ids.shape, config.layers, config.width)
        known = np.where(ids < config.rows, ids, 0)
        tokens = (self._take("per_layer.tokens.weight", known) * np.float32(config.width**0.5)).reshape(shape)
        x, weight = self.look_up(ids), self._tensors["per_layer.project.weight"].astype(np.float64)
        projected = (x.astype(np.float64) @ weight.T / np.sqrt(x.shape[-1])).reshape(shape)
        normed = projected / np.sqrt(np.square(projected).mean(-1, keepdims=True) + config.eps)
        combined = (normed * self._tensors["per_layer.norm.weight"] + tokens) / np.sqrt(2)
        flat = combined.astype(np.float32).reshape(*ids.shape, config.layers * config.width)
        return {PER_LAYER_TOKENS: tokens, PER_LAYER: flat}

    def ngram_outputs(self, ids: Int64, context: Int64) -> dict[str, Array]:
        """Return row ids and, with tables, their embeddings."""
        config = self.config.ngrams
        assert config is not None
        row_ids = ngram_row_ids(config, self.config.tokens.rows, ids, context)
        if config.referenced:
            return {NGRAM_ROW_IDS: row_ids}
        layers = [
            self._take(f"ngrams.tables.{layer}.weight", row_ids[:, :, layer]).reshape(*ids.shape, config.width)
            for layer in range(len(config.layers))
        ]
        return {NGRAM_ROW_IDS: row_ids, NGRAMS: np.stack(layers, axis=2)}

    def rotary_outputs(self, ids: Int64, offset: Int64) -> dict[str, Float32]:
        """Return cosines and sines by name."""
        position, outputs = np.arange(ids.shape[1]) + offset.reshape(-1, 1), dict[str, Float32]()
        for output, frequencies in zip(self.config.rotary, self._frequencies, strict=True):
            # The product of position and frequency is rounded to the type of the model; its cosine is not.
            angle = (position[..., None].astype(frequencies.dtype) * frequencies).astype(np.float64)
            factor = np.float32(attention_factor(output.config))
            cos, sin = (part.astype(np.float32) * factor for part in (np.cos(angle), np.sin(angle)))
            outputs |= _arrange(output, cos, sin)
        return outputs

    def bias(self, lengths: Mapping[str, int]) -> Float32:
        """Return the attention bias, or the rows of a relative sinusoid."""
        assert self.config.bias is not None
        match self.config.bias:
            case AlibiConfig() as config:
                return _alibi(config, **lengths)
            case T5Config() as config:
                return _t5(config, self._tensors["bias.weight"], **lengths)
            case RelativeSinusoidConfig() as config:
                return _relative_sinusoid(config, **lengths)

    @cached_property
    def _frequencies(self) -> list[Array]:
        return [rotary_frequencies(output.config) for output in self.config.rotary]

    @cached_property
    def _library_table(self) -> Float32:
        """The table of a sinusoid recipe, rounded as every step is."""
        step = self.config.positions
        assert step is not None
        width = self.config.widths[self.config.steps.index(step)]
        table: Float32 = self._rounded(library_table(step.table, step.rows, width, step.zero_row))
        return table

    def _run(
        self,
        steps: tuple[Step, ...],
        ids: Int64,
        offset: Int64,
        indices: Mapping[str, Int64] = MappingProxyType({}),
        mask: Int64 | None = None,
    ) -> Float32:
        """Return the vectors (B, L, width) after `steps`."""
        x: Float32 = np.empty((*ids.shape, 0), np.float32)
        with np.errstate(all="ignore"):  # a weight may be infinite: the comparison reports it
            for name, step in zip(names_of(steps), steps, strict=True):
                match step:
                    case Tokens():
                        x = self._take("tokens.weight", ids)
                    case Scale():
                        factor = np.float32(step.by)
                        x = x * (self._rounded(factor) if step.cast else factor)
                    case Weights():
                        x = x * self._take(f"{name}.weight", ids)
                    case Segments():
                        x = x + self._index_rows(step, name, ids, indices)
                    case Levels():
                        first, *rest = (
                            self._index_rows(level, f"{name}.{place}", ids, indices)
                            for place, level in enumerate(step.levels)
                        )
                        for rows in rest:
                            first = first + rows
                        x = x + first
                    case Positions():
                        x = x + self._position_rows(step, self._places(step, ids, offset, mask), x.shape[-1])
                    case Mask():
                        x = x if mask is None else x * mask[..., None].astype(np.float32)
                    case Norm() | RmsNorm() | Project():
                        x = self._sum_step(step, name, x)
                x = self._rounded(x)
        return x

    def _take(self, name: str, ids: Int64) -> Float32:
        """Return the rows `ids` of the table `name`."""
        if name in self._stored:
            return self._stored[name].take(ids)
        return np.asarray(self._tensors[name][ids], np.float32)

    def _rounded(self, x: Any) -> Any:
        """Return `x` rounded to the arithmetic of the config, in float32."""
        return _round(x, self.config.arithmetic)

    def _index_rows(self, part: Segments, name: str, ids: Int64, indices: Mapping[str, Int64]) -> Float32:
        """Return the rows of a further index; an omitted one is 0."""
        table = "tokens" if part.table == "tokens" else name
        rows = self._take(f"{table}.weight", indices.get(part.input, np.zeros_like(ids)))
        return rows if part.by == 1 else self._rounded(rows * np.float32(part.by))

    def _places(self, step: Positions, ids: Int64, offset: Int64, mask: Int64 | None) -> Int64:
        """Return the row of positions of each token, (1 or B, L)."""
        start = offset.reshape(-1, 1)
        if step.counts == "slots":
            return start + np.arange(step.first, step.first + ids.shape[1])
        if step.counts == "ids":
            real = ids != (self.config.padding_idx or 0)
        else:
            real = np.ones(ids.shape, np.bool_) if mask is None else mask != 0
        # Padding takes the row before the first.
        return np.where(real, start + np.cumsum(real, axis=1), 0) + (step.first - 1)

    def _position_rows(self, step: Positions, places: Int64, width: int) -> Float32:
        """Return the vectors of rows of positions."""
        if step.grid and step.table in ("exact", "factorised"):
            row, column = np.divmod(places, step.grid[1])
            if step.table == "factorised":
                return self._take("positions.rows.weight", row) + self._take("positions.columns.weight", column)
            return np.concatenate([exact_sinusoids(part, width // 2) for part in (row, column)], axis=-1)
        match step.table:
            case "learned":
                return self._take("positions.weight", places)
            case "exact":
                return exact_sinusoids(places, width)
            case "hybrid":
                learned = self._take("positions.weight", np.minimum(places, step.rows - 1))
                return np.where((places < step.rows)[..., None], learned, exact_sinusoids(places, width))
            case _:
                return self._library_table[places]

    def _sum_step(self, step: Norm | RmsNorm | Project, name: str, x: Float32) -> Float32:
        """Return the result of a step with long sums, computed in float64."""
        weight, bias = (self._tensors.get(f"{name}.{part}") for part in ("weight", "bias"))
        if isinstance(step, Project):
            assert weight is not None
            matrix = weight.T.astype(np.float64)
            return _by_rows(x, step.width, lambda rows: rows @ matrix + (0 if bias is None else bias))

        def normed(rows: Float64) -> Float64:
            rows = rows - rows.mean(-1, keepdims=True) if isinstance(step, Norm) else rows
            rows = rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + step.eps)
            rows = rows if weight is None else rows * weight
            return rows if bias is None else rows + bias

        return _by_rows(x, x.shape[-1], normed)


def ngram_row_ids(config: NgramConfig, vocab_size: int, ids: Int64, context: Int64) -> Int64:
    """Return the row of each head in the table of its layer, int64 (B, L, layers, heads).

    Products beyond 64 bits wrap around.

    Args:
        config: sizes and hash.
        vocab_size: number of token ids.
        ids: int64 (B, L).
        context: int64 (B, n - 1), the ids before each row.

    """
    history, length = config.history, ids.shape[1]
    whole = np.concatenate((context, ids), axis=1)
    tokens = [whole[:, history - back : history - back + length] for back in range(config.size)]
    ended = np.zeros(ids.shape, np.bool_)
    for back in range(2, config.size):  # the token before a token counts even after the end of a sequence
        ended = ended | (tokens[back - 1] == config.reset_id)
        tokens[back] = np.where(ended, config.reset_id, tokens[back])
    layers = []
    for factors, head_rows in zip(config.multipliers(vocab_size), config.head_rows, strict=True):
        begins = list(accumulate(head_rows, initial=0))
        mixed, heads = tokens[0] * np.array([factors[0]]), []
        for head, rows in enumerate(head_rows):
            if head % config.heads == 0:  # the first head of the next size
                back = head // config.heads + 1
                mixed = mixed ^ (tokens[back] * np.array([factors[back]]))
            heads.append(mixed % rows + begins[head])
        layers.append(np.stack(heads, axis=-1))
    return np.stack(layers, axis=2)


def _arrange(output: RotaryOutput, cos: Float32, sin: Float32) -> dict[str, Float32]:
    """Return the outputs by name, from cosines and sines (1 or B, L, R / 2) of each pair."""
    if output.form == "fused":
        return {output.names[0]: np.concatenate((cos, sin), axis=-1)}
    repeats = 2 if output.form == "full" else 1
    return {
        name: np.concatenate([part] * repeats, axis=-1) for name, part in zip(output.names, (cos, sin), strict=True)
    }


def _by_rows(x: Float32, width: int, compute: Callable[[Float64], Float64]) -> Float32:
    """Return `compute` of the rows of `x` (..., D) in float64, some rows at a time, rounded to float32 (..., width)."""
    rows = x.reshape(-1, x.shape[-1])
    found = np.empty((len(rows), width), np.float32)
    count = 1 + CHUNK_VALUES // max(width, x.shape[-1])
    for begin in range(0, len(rows), count):
        found[begin : begin + count] = compute(rows[begin : begin + count].astype(np.float64))
    return found.reshape(*x.shape[:-1], width)


def _round(x: Any, dtype: str) -> Any:
    """Return float32 `x` rounded to `dtype`, in float32."""
    return x.astype(dtype, copy=False).astype(np.float32, copy=False)


def _alibi(config: AlibiConfig, query_offset: int, query_length: int, key_length: int) -> Float32:
    origin: Int64 = np.arange(query_length).reshape(-1, 1) + query_offset
    if config.anchor != "query":
        origin = np.full((query_length, 1), key_length - 1 if config.anchor == "last" else 0)
    distance = _round((np.arange(key_length) - origin).astype(np.float32), config.arithmetic)
    bias: Float32 = _round(distance * alibi_slopes(config).reshape(1, -1, 1, 1), config.arithmetic)
    return bias / np.float32(config.divisor)


def _t5(config: T5Config, weight: Array, query_offset: int, query_length: int, key_length: int) -> Float32:
    relative = np.arange(key_length) - (np.arange(query_length).reshape(-1, 1) + query_offset)
    distance = np.abs(relative) if config.bidirectional else np.maximum(-relative, 0)
    bucket = np.searchsorted(t5_borders(config), distance, side="right")
    if config.bidirectional:
        bucket = bucket + np.where(relative > 0, config.buckets // 2, 0)
    return np.asarray(weight[bucket], np.float32).transpose(2, 0, 1)[None]


def _relative_sinusoid(config: RelativeSinusoidConfig, query_length: int, key_length: int) -> Float32:
    last = query_length if config.bidirectional else 1
    distance = np.arange(key_length, -last, -1)
    if config.clamp_len is not None:
        distance = distance.clip(-config.clamp_len, config.clamp_len)
    angle = (distance.reshape(-1, 1).astype(np.float32) * relative_frequencies(config.width)).astype(np.float64)
    return np.concatenate((np.sin(angle), np.cos(angle)), axis=-1).astype(np.float32)
