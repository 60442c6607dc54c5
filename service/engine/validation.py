"""Checks a request against a model before the session runs.

onnxruntime wraps negative ids without a word, and on CUDA reads rows of zeros for ids beyond the table.
"""

import math

import numpy as np

from preblock.service.artifacts.manifest import BIAS_GRAPH, Manifest, StemManifest
from preblock.service.core.errors import Invalid, TooLarge
from preblock.service.core.types import DTYPES, Int64, PairwiseBiasRequest, StemRequest, TokenRequest, TokenRows
from preblock.service.engine.pooling import POOLINGS
from preblock.service.engine.positions import count_real, position_limit
from preblock.service.engine.truncation import SIDES, min_row_tokens

ZERO = np.zeros(1, np.int64)
ZERO.flags.writeable = False
_INPUT_TITLES = {"token_type_ids": "segments"}


def check(request: TokenRequest, manifest: Manifest, max_tokens: int) -> None:
    """Check ids, segments, masks, positions, offsets, lengths and the output type.

    Raises:
        Invalid: a value is not allowed for this model; the error names the first.
        TooLarge: more than `max_tokens` tokens.

    """
    if _is_simple_and_valid(request, manifest, max_tokens):
        return
    if request.dtype not in DTYPES:
        raise Invalid("dtype", request.dtype, ", ".join(DTYPES))
    if request.truncate not in (None, *SIDES):
        raise Invalid("truncate", request.truncate, ", ".join(SIDES))
    if request.pooling not in POOLINGS:
        raise Invalid("pooling", request.pooling, ", ".join(POOLINGS))
    ids = request.input_ids
    if not len(ids.lengths):
        raise Invalid("input_ids", "an empty batch", "at least one row")
    if not ids.length and not ids.lengths.all():
        row = int(np.flatnonzero(ids.lengths == 0)[0])
        raise Invalid(f"input_ids[{row}]", "an empty row", "at least one id")
    if len(ids.values) > max_tokens:
        raise TooLarge("input_ids", f"{len(ids.values)} tokens", f"at most {max_tokens} tokens in a request")
    _check_range("input_ids", ids, manifest.vocab_size)
    for refused in manifest.refused_ids:
        if len(index := np.flatnonzero(ids.values == refused)):
            allowed = f"any other id, since this model scales the other tokens of a row that holds {refused}"
            raise Invalid("input_ids" + ids.place(int(index[0])), refused, allowed)
    for output in request.outputs:
        if output not in manifest.widths:
            raise Invalid("output", output, ", ".join(manifest.widths))
    for name, rows in request.indices.items():
        if name not in manifest.indices:
            raise Invalid(name, "a value", f"nothing, since this model has no {_INPUT_TITLES.get(name, name)}")
        check_same_lengths(name, rows, ids)
        _check_range(name, rows, manifest.indices[name])
    for name in manifest.needed:
        if name not in request.indices:
            raise Invalid(name, "nothing", "one for each token, since none is not 0 for this model")
    if request.attention_mask is not None:
        check_same_lengths("attention_mask", request.attention_mask, ids)
        _check_range("attention_mask", request.attention_mask, 2)
    if request.pooling != "none" and not (real := count_real(request, manifest)).all():
        row = int(np.flatnonzero(real == 0)[0])
        raise Invalid(f"input_ids[{row}]", "no real token", f"at least one, of which to take the {request.pooling}")
    limit = position_limit(request, manifest)
    if request.position_ids is not None:
        if request.offset is not None:
            raise Invalid("offset", "offset and position_ids", "one of them: position_ids say every position already")
        if request.truncate is not None:
            raise Invalid(
                "truncate", "truncate and position_ids", "one of them: no length is too long for position_ids"
            )
        check_same_lengths("position_ids", request.position_ids, ids)
        _check_range("position_ids", request.position_ids, limit)
    else:
        _check_offset(request, manifest, limit)


def _is_simple_and_valid(request: TokenRequest, manifest: Manifest, max_tokens: int) -> bool:
    """Return True for most requests that `check` allows: rows of one length, and an offset at most.

    A small answer is computed in less time than the whole check takes.
    """
    rows, offset = request.input_ids, request.offset
    length, tokens = rows.length, len(rows.values)
    if (
        not length
        or tokens > max_tokens
        or request.indices
        or request.attention_mask is not None
        or request.position_ids is not None
        or request.truncate is not None
        or request.pooling != "none"
        or request.dtype not in DTYPES
        or manifest.counts == "ids"
        or manifest.needed
        or manifest.refused_ids
        or manifest.rotary_of(request.outputs)
        or not manifest.widths.keys() >= set(request.outputs)
        or _max_unsigned(rows.values) >= manifest.vocab_size
    ):
        return False
    room = manifest.limit - length
    if offset is None:
        return room >= 0
    return len(offset) in (1, len(rows.lengths)) and room >= 0 and _max_unsigned(offset) <= room


def check_bias(request: PairwiseBiasRequest, manifest: Manifest, max_tokens: int) -> tuple[int, ...]:
    """Check the lengths of a bias and the output type, and return the shape of the answer.

    Raises:
        Invalid: the model has no bias, or a value is not allowed.
        TooLarge: more values than `max_tokens` vectors of the model have.

    """
    if request.dtype not in DTYPES:
        raise Invalid("dtype", request.dtype, ", ".join(DTYPES))
    if manifest.bias is None:
        raise Invalid("bias", "a request for it", "none, since the attention of this model adds nothing for distances")
    takes_offset = any(tensor.name == "query_offset" for tensor in manifest.graphs[BIAS_GRAPH].inputs)
    if request.query_offset is not None and not takes_offset:
        raise Invalid("query_offset", request.query_offset, "nothing, since the last query is at the last key")
    offset = request.query_offset or 0
    if offset < 0:
        raise Invalid("query_offset", offset, "0 or more")
    for name, length, before in (("query", request.query_length, offset), ("key", request.key_length, 0)):
        if not 1 <= length <= manifest.limit - before:
            allowed = f"1 to {manifest.limit - before}" if manifest.max_len else "1 or more"
            raise Invalid(f"{name}_length", length, allowed)
    sizes = {"query_length": request.query_length, "key_length": request.key_length}
    sizes["rows"] = sum(sizes.values())  # of a sinusoid, at most
    shape = tuple(sizes[size] if isinstance(size, str) else size for size in manifest.bias.shape)
    values, most = math.prod(shape), max_tokens * manifest.width
    if values > most:
        raise TooLarge("query_length and key_length", f"{values} values", f"at most {most}")
    return shape


def check_stem(request: StemRequest, manifest: StemManifest, max_tokens: int) -> int:
    """Check the shape of the input and the output type, and return how many vectors the answer has.

    Raises:
        Invalid: the name, a size or the type is not allowed.
        TooLarge: the answer would have more than `max_tokens` vectors.

    """
    if request.dtype not in DTYPES:
        raise Invalid("dtype", request.dtype, ", ".join(DTYPES))
    expected, shape = manifest.input, request.values.shape
    if request.input != expected.name:
        raise Invalid("inputs.name", request.input, expected.name)
    fits = len(shape) == len(expected.shape) and all(
        got == size if isinstance(size, int) else got > 0 for got, size in zip(shape, expected.shape, strict=True)
    )
    if not fits:
        raise Invalid(f"{expected.name}.shape", list(shape), f"[{', '.join(map(str, expected.shape))}]")
    native, patch = manifest.image_size, manifest.patch_size
    if patch is not None and shape[2:] != (native, native) and (shape[2] % patch or shape[3] % patch):
        raise Invalid(f"{expected.name}.shape", list(shape), f"multiples of {patch}, or {native} by {native}")
    tokens: int = shape[0] * manifest.length(shape)
    if tokens > max_tokens:
        raise TooLarge(expected.name, f"{tokens} vectors", f"at most {max_tokens} vectors in an answer")
    return tokens


def check_same_lengths(field: str, rows: TokenRows, ids: TokenRows) -> None:
    """Compare the number and the lengths of `rows` with those of the ids.

    Raises:
        Invalid: another number of rows, or of values in a row.

    """
    if len(rows.lengths) != len(ids.lengths):
        raise Invalid(field, f"{len(rows.lengths)} rows", f"{len(ids.lengths)} rows, as input_ids has")
    differing = np.flatnonzero(rows.lengths != ids.lengths)
    if len(differing):
        row = int(differing[0])
        got, allowed = int(rows.lengths[row]), int(ids.lengths[row])
        raise Invalid(f"{field}[{row}]", f"{got} values", f"{allowed} values, as input_ids[{row}] has")


def _check_range(field: str, rows: TokenRows, limit: int) -> None:
    """Raise Invalid where a value is outside 0 to `limit` - 1."""
    if _max_unsigned(rows.values) >= limit:
        index = int(np.flatnonzero(rows.values.view(np.uint64) >= limit)[0])
        raise Invalid(field + rows.place(index), int(rows.values[index]), f"0 to {limit - 1}")


def _max_unsigned(values: Int64) -> int:
    """Return the largest of some values, negative ones being larger than any other: one pass checks both ends."""
    unsigned = values.view(np.uint64)
    return int(unsigned[0] if len(unsigned) == 1 else np.maximum.reduce(unsigned))


def _check_offset(request: TokenRequest, manifest: Manifest, limit: int) -> None:
    batch, offset = len(request.input_ids.lengths), ZERO
    if request.offset is not None:
        offset = request.offset
        if offset.shape not in ((1,), (batch,)):
            raise Invalid("offset", f"{len(offset)} values", f"one value, or one for each of {batch} rows")
        if offset.min() < 0:
            row = int(np.flatnonzero(offset < 0)[0])
            raise Invalid(f"offset[{row}]", int(offset[row]), "0 or more")
    # Not offset + tokens > max_len: the sum of a large offset could wrap.
    beyond = np.flatnonzero(offset > limit - (least := min_row_tokens(request, manifest)))
    if len(beyond):
        row = int(beyond[0])
        start, tokens = int(np.broadcast_to(offset, batch)[row]), int(least[row])
        raise Invalid(
            f"offset[{request.input_ids.number(row)}] + tokens",
            f"{start} + {tokens} = {start + tokens}",
            f"at most {limit}, the max_len of this model",
        )
