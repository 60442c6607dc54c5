"""Arrays, requests and results in the common form of all protocols.

Letters: B batch, T tokens of all rows, N given vectors, D output width.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid, PreblockError

Chunks = Literal["none", "buffered", "sent"]
Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
FLOAT32_BYTES = 4
"""Size of a computed value, whatever the dtype of the response."""

DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Output dtypes, by their name in every protocol except the Open Inference Protocol."""
TENSOR_DTYPES: dict[str, np.dtype[np.generic]] = DTYPES | {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int64": np.dtype(np.int64),
}
"""Dtypes of all tensors in responses, by name."""


class RowPart(NamedTuple):
    """A part of a row: ids, or a text, or vectors, or a soft prompt.

    Args:
        field: place in the request, for error messages.
        ids: int64 (N,).
        text: without the special tokens of the tokenizer.
        vectors: float32, all values one after another.
        prompt: name of a soft prompt.

    """

    field: str
    ids: Int64 | None = None
    text: str | None = None
    vectors: NDArray[np.float32] | None = None
    prompt: str | None = None


class VectorPlaceholder(NamedTuple):
    """A token id, and the vectors in place of its tokens, in order."""

    token: int
    part: RowPart


class GivenVectors(NamedTuple):
    """Vectors in place of those of some tokens.

    Args:
        tokens: int64 (N,), number of each token among the T tokens of the request, ascending.
        values: float32 (N, width of a token vector).

    """

    tokens: Int64
    values: NDArray[np.float32]

    def kept(self, tokens: Int64) -> "GivenVectors | None":
        """Return the vectors of `tokens`, ascending numbers, numbered by their places there; None without any."""
        index = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        places = np.flatnonzero(self.tokens[index] == tokens)
        return GivenVectors(places, self.values[index[places]]) if len(places) else None


# Each request creates objects of these classes. They are not frozen, because that triples the time of creation.
@dataclass(eq=False)
class TokenRows:
    """Concatenated rows of integers, of any lengths.

    Args:
        values: int64 (T,), values of all rows.
        lengths: int64 (B,), length of each row; they sum to T.
        flat: whether the request had one list of values, not a list of rows; only for error messages.
        numbers: int64 (B,), number of each row in error messages; None for 0, 1, …

    """

    values: Int64
    lengths: Int64
    flat: bool = False
    numbers: Int64 | None = None

    @classmethod
    def of_array(cls, array: Int64) -> "TokenRows":
        """Return the rows of an int64 (B, L) array, or the row of an (L,) array. A contiguous array is not copied."""
        batch, length = array.shape if array.ndim == 2 else (1, len(array))
        rows = cls(array.reshape(-1), _equal(batch, length), flat=array.ndim == 1)
        vars(rows)["length"] = length if batch else 0  # fills the cache of the property
        return rows

    @cached_property
    def length(self) -> int | None:
        """L if all rows have one length, else None."""
        if len(self.lengths) == 1:  # a comparison takes ten times as long
            return int(self.lengths[0])
        first = int(self.lengths[0]) if len(self.lengths) else 0
        return first if (self.lengths == first).all() else None

    @cached_property
    def starts(self) -> Int64:
        """Start of each row in `values`: int64 (B,)."""
        ends: Int64 = np.cumsum(self.lengths)
        return ends - self.lengths

    def spread(self, per_row: Int64) -> Int64:
        """Repeat the value of a row, (1,) or (B,), for each of its tokens: int64 (T,)."""
        return np.repeat(np.broadcast_to(per_row, self.lengths.shape), self.lengths)

    def kept(self, keep: Bools) -> "TokenRows":
        """Return the rows without the values at false `keep`, bool (T,). No row may be empty before."""
        return TokenRows(self.values[keep], np.add.reduceat(keep, self.starts, dtype=np.int64), self.flat)

    def place(self, index: int) -> str:
        """Return the place of `values[index]` for error messages: `[row][column]`, or `[column]` in a flat list."""
        if self.flat:
            return f"[{index}]"
        row = int(np.searchsorted(self.starts, index, side="right")) - 1
        return f"[{self.number(row)}][{index - int(self.starts[row])}]"

    def number(self, row: int) -> int:
        """Return the number of a row in error messages."""
        return row if self.numbers is None else int(self.numbers[row])

    def bad_rows(self, wrong: Bools) -> Int64:
        """Return the numbers of the rows with true `wrong`, bool (B,), for errors; none for the row of a flat list."""
        rows: Int64 = np.flatnonzero(wrong & (not self.flat))
        return rows if self.numbers is None else self.numbers[rows]

    def bad_items(self, index: Int64) -> Int64:
        """Return the numbers of the rows with the values at `index`, for errors; of a flat list, their indices."""
        if self.flat:
            return index
        rows = np.searchsorted(self.starts, index, side="right") - 1
        return self.bad_rows(np.bincount(rows, minlength=len(self.lengths)) > 0)

    def select(self, rows: Int64) -> "TokenRows":
        """Return some rows, in order. They keep their numbers in error messages."""
        chosen: Bools = np.zeros(len(self.lengths), np.bool_)
        chosen[rows] = True
        numbers = rows if self.numbers is None else self.numbers[rows]
        return TokenRows(self.values[np.repeat(chosen, self.lengths)], self.lengths[rows], self.flat, numbers)

    def columns(self, begin: int, end: int) -> "TokenRows":
        """Return the values from `begin` up to `end` of each row. Rows shorter than `begin` become empty."""
        lengths = np.clip(self.lengths, begin, end) - begin
        part = TokenRows(np.empty(0, np.int64), lengths, self.flat)
        index = part.spread(self.starts + begin - part.starts) + np.arange(int(lengths.sum()))
        return TokenRows(self.values[index], lengths, self.flat)


@lru_cache
def _equal(batch: int, length: int) -> Int64:
    """Return `length` for each row: int64 (B,), read-only."""
    lengths = np.full(batch, length, np.int64)
    lengths.flags.writeable = False
    return lengths


def per_row(field: str, offset: Int64, rows: int) -> Int64:
    """Return an offset for each of `rows` rows.

    Raises:
        Invalid: there is neither one value nor one for each row.

    """
    if len(offset) not in (1, rows):
        raise Invalid(field, f"{len(offset)} values", f"one value, or one for each of {rows} rows")
    return np.broadcast_to(offset, rows).copy()


POSITION_ROWS = "position_rows"
"""The name in `indices` of rows of the position table, in place of `position_ids`; the engine converts them."""
SPECIAL_TOKENS_IN_TEXT = ("allow", "refuse", "plain")
"""Choices for a text that contains a special token: it becomes the token, is an error, or stays ordinary text."""


@dataclass(eq=False, kw_only=True)
class EmbedOptions:
    """The common options of requests of token ids and of text.

    Args:
        offset: int64 (1,) or (B,), the number of real tokens already fed; None for 0 or with `position_ids`.
        context: the last ids before each row, as many as the history of the model has; None for none.
        truncate: side of a long row to remove tokens from, "left" or "right"; None rejects long rows.
        max_length: most real tokens of a row after truncation; None for the limit of the model.
        pooling: "none", or one vector per row: "mean", "first" or "last".
        dimensions: number of leading columns of a pooled vector in the response; None for all of them.
        normalize: whether a pooled vector is divided by its Euclidean norm; None as the model states it.
        special_tokens_in_text: one of `SPECIAL_TOKENS_IN_TEXT`; without effect on token ids.
        outputs: names of the requested tensors.
        dtype: of the response, a key of DTYPES, or `STORED` for the type of n-gram tables.
        chunks: of a large response: "sent" one by one, "buffered" as for a gRPC message, or "none".
        check: raises a PreblockError for values without a representation in the response. With chunks, it checks all
            values before the first chunk is sent. Default None: all values have one.

    """

    offset: Int64 | None = None
    context: TokenRows | None = None
    truncate: str | None = None
    max_length: int | None = None
    pooling: str = "none"
    dimensions: int | None = None
    normalize: bool | None = None
    special_tokens_in_text: str = "allow"
    outputs: tuple[str, ...] = ("embeddings",)
    dtype: str = "float32"
    chunks: Chunks = "none"
    check: Callable[[NDArray[np.generic]], object] | None = None


@dataclass(frozen=True)
class SequenceRef:
    """The sequence of a request.

    Args:
        id: name from the client: 1 to 2^64 - 1, or text; 5 and "5" differ.
        start: whether the request is the first of the sequence.
        end: whether the request is the last.

    """

    id: int | str
    start: bool = False
    end: bool = False


@dataclass(eq=False, kw_only=True)
class TokenRequest(EmbedOptions):
    """Token ids and their other inputs, from any protocol.

    Args:
        input_ids: T ids in B rows.
        position_ids: position index of each token; excludes `offset`. With `further_positions`, on the axis of time.
        further_positions: positions on the axes of height and of width, beside `offset`; empty for one axis.
        attention_mask: 1 for a real token, 0 for padding; None if all are real.
        indices: extra integers per token, by input, such as the segments `token_type_ids`; default 0.
        special: bool (T,), special tokens of the tokenizer, kept by truncation; None without a text.
        spans: int64 (T, 2), first character of each token in its text, and the one after its last; equal for a special
            token. None unless requested.
        sequence: sequence of the request; None without one.
        given: vectors in place of those of some tokens; None without any.
        new_rows: bool (B,), rows without earlier tokens, with a `context` that stands for none; None for no such row.

    """

    input_ids: TokenRows
    position_ids: TokenRows | None = None
    further_positions: tuple[TokenRows, ...] = ()
    attention_mask: TokenRows | None = None
    indices: Mapping[str, TokenRows] = field(default_factory=dict)
    special: Bools | None = None
    spans: Int64 | None = None
    sequence: SequenceRef | None = None
    given: GivenVectors | None = None
    new_rows: Bools | None = None

    @property
    def further_inputs(self) -> dict[str, TokenRows]:
        """The inputs beside the ids with a value for each token, by their names in error messages."""
        axes = () if self.position_ids is None else (self.position_ids, *self.further_positions)
        names = ["position_ids"] if len(axes) == 1 else [f"position_ids[{axis}]" for axis in range(len(axes))]
        mask = {} if self.attention_mask is None else {"attention_mask": self.attention_mask}
        return {**dict(zip(names, axes, strict=True)), **mask, **self.indices}

    def change_rows(self, change: Callable[[TokenRows], TokenRows], **others: Any) -> "TokenRequest":
        """Return the request with `change` of each input that has a value for each token, and with `others`."""
        position, mask = self.position_ids, self.attention_mask
        return replace(
            self,
            input_ids=change(self.input_ids),
            position_ids=None if position is None else change(position),
            further_positions=tuple(map(change, self.further_positions)),
            attention_mask=None if mask is None else change(mask),
            indices={name: change(rows) for name, rows in self.indices.items()},
            **others,
        )

    def columns(self, begin: int, end: int) -> "TokenRequest":
        """Return the tokens from `begin` up to `end` of each row, without an offset."""
        ids, given = self.input_ids, self.given
        if given is not None:
            given = given.kept(TokenRows(np.arange(len(ids.values)), ids.lengths).columns(begin, end).values)
        return self.change_rows(lambda rows: rows.columns(begin, end), offset=None, given=given)


@dataclass(eq=False, kw_only=True)
class TextRequest(EmbedOptions):
    """Texts, one for each row.

    Args:
        text: the texts.
        spans: whether the response has the character span of each token.
        special_tokens: whether the tokenizer adds its special tokens; None for the model's default: not in a static
            embedding model.

    """

    text: tuple[str, ...]
    spans: bool = False
    special_tokens: bool | None = None

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options in common with a request of token ids."""
        return {name: value for name, value in vars(self).items() if name not in ("text", "spans", "special_tokens")}


@dataclass(eq=False, kw_only=True)
class PartsRequest(EmbedOptions):
    """Rows made of parts.

    Args:
        rows: at least one part for each row.
        placeholder: token that stands for vectors in ids and texts; None without one.
        sequence: as in `TokenRequest`.

    """

    rows: tuple[tuple[RowPart, ...], ...]
    placeholder: VectorPlaceholder | None = None
    sequence: SequenceRef | None = None


@dataclass(frozen=True, kw_only=True)
class PairwiseBiasRequest:
    """The queries and keys of an attention bias: Q queries from position `query_offset`, and K keys from position 0.

    Args:
        query_length: Q.
        key_length: K.
        query_offset: number of keys before the first query; None if the request has none.
        dtype: of the response, a key of DTYPES.

    """

    query_length: int
    key_length: int
    query_offset: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class StemRequest:
    """An image or a spectrogram for each row.

    Args:
        values: float32, (B, …).
        dtype: of the response, a key of DTYPES.

    """

    values: NDArray[np.float32]
    dtype: str = "float32"


RowsRequest = TokenRequest | TextRequest | PartsRequest
AnyRequest = RowsRequest | PairwiseBiasRequest | StemRequest


class GpuTarget(NamedTuple):
    """Memory of a GPU for the vectors of an output.

    Args:
        address: of the first byte.
        copy: copies bytes within the GPU; it takes their position in the output, their address and their number.

    """

    address: int
    copy: Callable[[int, int, int], None]


@dataclass
class OutputMemory:
    """Memory of a client for the vectors of an output, in place of memory of the server.

    Args:
        on_gpu: whether the model computes the vectors on a GPU; then `target` may be set, else `vectors`.
        vectors: float32 (T, width), set before the first chunk is computed; None leaves the vectors with the server.
        lost: returns the error for memory that has become shorter.
        target: set before the first chunk is computed; None leaves the vectors with the server.

    """

    on_gpu: bool = False
    vectors: NDArray[np.float32] | None = None
    lost: Callable[[], PreblockError] | None = None
    target: GpuTarget | None = None


class ChunkedTensor:
    """A tensor computed in chunks while it is sent. It can be read only once.

    Args:
        shape: of the tensor.
        dtype: a key of TENSOR_DTYPES.
        chunks: C-contiguous arrays of this dtype, in order.
        memory: receives the chunks once it is set; None if they are always computed in memory of the server.

    """

    size: ClassVar[int] = 0
    """Number of values in memory."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        chunks: Iterator[NDArray[np.generic]],
        memory: OutputMemory | None = None,
    ) -> None:
        self.shape = shape
        self.memory = memory
        self.dtype = TENSOR_DTYPES[dtype]
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.itemsize * math.prod(shape)
        self._chunks = chunks

    def __len__(self) -> int:
        """Size of the tensor in bytes."""
        return self.nbytes

    def __iter__(self) -> Iterator[NDArray[np.generic]]:
        """Compute the chunks."""
        return self._chunks


Tensor = NDArray[np.generic] | ChunkedTensor


@dataclass(eq=False, kw_only=True)
class Result:
    """The tensors of a response.

    Args:
        model: name of the model.
        version: its version.
        dtype: type of the request. Some outputs have another type.
        tensors: by output, C-contiguous; chunked only if the request allows it.
        lookup_use: use of the model's own lookup, in words; "" if no tensor is one.

    """

    model: str
    version: int
    dtype: str
    tensors: Mapping[str, Tensor]
    lookup_use: str = ""

    @property
    def size(self) -> int:
        """Number of values in memory."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The buffered tensors."""
        return {name: tensor for name, tensor in self.tensors.items() if not isinstance(tensor, ChunkedTensor)}


@dataclass(eq=False, kw_only=True)
class EmbedResult(Result):
    """The tensors of tokens.

    Their shape is (B, L, width) if all rows have the length L, (T, width) for ragged rows, and (B, width) with pooling.

    Args:
        lengths: int64 (B,), tokens of each row.
        next_offset: int64 (B,), the offset for the next tokens of each row.
        next_context: int64 (B, H), the ids before the next tokens of each row; None if no output depends on them.
        position_delta: int64 (B,), next position - `next_offset`; None without positions of three axes.
        truncated: int64 (B,), number of removed tokens of each row; None without `truncate`.
        input_ids: embedded ids; None unless requested.
        spans: int64 (T, 2), characters of each token, as in `TokenRequest`; None unless requested.

    """

    lengths: Int64
    next_offset: Int64
    next_context: Int64 | None = None
    position_delta: Int64 | None = None
    truncated: Int64 | None = None
    input_ids: TokenRows | None = None
    spans: Int64 | None = None

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return bool((self.lengths != self.lengths[0]).any())

    @property
    def row_values(self) -> dict[str, Int64]:
        """The integers of each row that the result has, by their names in every protocol."""
        names = "next_offset", "next_context", "position_delta", "lengths", "truncated"
        return {name: values for name in names if (values := getattr(self, name)) is not None}
