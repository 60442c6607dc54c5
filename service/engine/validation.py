"""Validation of requests against a model, before the session runs.

onnxruntime wraps negative ids silently, and on CUDA returns rows of zeros for ids beyond the table. Each error is about
the first bad value or row, and has the numbers of all bad items.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.names import BIAS_GRAPH, NGRAM_ROW_IDS, NGRAM_SCALES, STORED
from preblock.service.core.errors import Invalid, TooLarge
from preblock.service.core.settings import RequestLimits
from preblock.service.core.types import (
    DTYPES,
    POSITION_ROWS,
    Bools,
    Int64,
    PairwiseBiasRequest,
    StemRequest,
    TokenRequest,
    TokenRows,
    per_row,
)
from preblock.service.engine.plain_calls import ZERO, Call, bounds_of, check_size, is_plain
from preblock.service.engine.positions import count_real, pooled_tokens, position_limit, real_tokens
from preblock.service.engine.truncation import SIDES, min_row_tokens
from preblock.service.engine.vectors import POOLINGS, check_dtype

MAX_BIAS_POSITIONS = 2**31  # onnxruntime's operator Max reads 32 bits of larger distances
_INPUT_TITLES = {"token_type_ids": "segments"}


def check_range(field: str, rows: TokenRows, limit: int) -> None:
    """Raise Invalid if a value is outside 0 to `limit` - 1."""
    # As unsigned numbers, negative values are larger than any limit.
    refuse_values(field, rows, rows.values.view(np.uint64) >= limit, f"0 to {limit - 1}")


def refuse_values(field: str, rows: TokenRows, wrong: Bools, expected: str) -> None:
    """Raise Invalid for the first value with a true `wrong`, bool (T,), with all items that have such values."""
    if wrong.any():
        bad = np.flatnonzero(wrong)
        place, got = rows.place(int(bad[0])), int(rows.values[bad[0]])
        raise Invalid(field + place, got, expected, items=rows.bad_items(bad))


def check_same_lengths(field: str, rows: TokenRows, ids: TokenRows) -> None:
    """Raise Invalid if an input differs from the ids in the number of rows, or in the length of a row."""
    if len(rows.lengths) != len(ids.lengths):
        raise Invalid(field, f"{len(rows.lengths)} rows", f"{len(ids.lengths)} rows, as input_ids has")
    differs = rows.lengths != ids.lengths
    if differs.any():
        row = int(np.argmax(differs))
        got, number = int(rows.lengths[row]), ids.number(row)
        allowed = f"{int(ids.lengths[row])} values, as input_ids[{number}] has"
        raise Invalid(f"{field}[{number}]", f"{got} values", allowed, items=ids.bad_rows(differs))


def check_all_lengths(request: TokenRequest) -> None:
    """Raise Invalid if an input has other lengths than the ids."""
    for name, rows in request.further_inputs.items():
        check_same_lengths(name, rows, request.input_ids)


def check_context(
    context: TokenRows | None, starts: Int64, manifest: Manifest, needed: bool, numbers: Int64 | None = None
) -> None:
    """Check the ids before each row.

    Args:
        context: of the request; None without one.
        starts: int64 (B,), number of tokens before each row.
        manifest: of the model.
        needed: whether an output depends on the context.
        numbers: int64 (B,), numbers of the rows in messages; None for 0, 1, …

    Raises:
        Invalid: the model takes no context, a context is missing, has another number of ids, or an id is not legal.

    """
    history, rows = manifest.history, len(starts)
    if context is None:
        if history is not None and needed and starts.any():
            row = int(np.argmax(starts > 0))
            number = row if numbers is None else int(numbers[row])
            allowed = f"the last {history.tokens} ids before each row, since row {number} begins at {int(starts[row])}"
            raise Invalid("context", "nothing", f"{allowed}; an answer has them as next_context")
        return
    if history is None:
        message = "context is not an input: no output of this model depends on the ids before a row"
        raise Invalid("context", "a value", "nothing", message=message)
    if len(context.lengths) != rows:
        raise Invalid("context", f"{len(context.lengths)} rows", f"{rows} rows, as many as the tokens have")
    differs = context.lengths != history.tokens
    if differs.any():
        row = int(np.argmax(differs))
        name = "context" if context.flat else f"context[{context.number(row)}]"
        got, allowed = f"{int(context.lengths[row])} ids", f"{history.tokens} ids, the last ones before the row"
        raise Invalid(name, got, allowed, items=context.bad_rows(differs))
    check_range("context", context, manifest.vocab_size)


def to_position_ids(step: TokenRequest, manifest: Manifest) -> TokenRequest:
    """Return a request or a step with `position_ids` in place of rows of the position table.

    Where padding has no position, its row is the one before the first, and its position does not matter.

    Raises:
        Invalid: both are given, a row is no position of the model, or the lengths differ from those of the ids.

    """
    rows = step.indices.get(POSITION_ROWS)
    if rows is None:
        return step
    if step.position_ids is not None:
        message = "position_ids and position_rows exclude each other: a row is a position index + first_row"
        raise Invalid(POSITION_ROWS, "position_ids and position_rows", "one of them", message=message)
    check_same_lengths(POSITION_ROWS, rows, step.input_ids)
    if step.attention_mask is not None:
        check_same_lengths("attention_mask", step.attention_mask, step.input_ids)
    first, real = manifest.first_row, real_tokens(step, manifest)
    placed = rows.values
    if manifest.counts != "slots" and real is not None:
        placed = np.where((real == 0) & (placed == first - 1), first, placed)
    outside = (placed < first) | (placed >= manifest.limit + first)
    refuse_values(POSITION_ROWS, rows, outside, f"{first} to {manifest.limit + first - 1}, rows of positions")
    indices = {name: values for name, values in step.indices.items() if name != POSITION_ROWS}
    return replace(step, position_ids=replace(rows, values=placed - first), indices=indices)


def check(request: TokenRequest, manifest: Manifest, limits: RequestLimits) -> None:
    """Check ids, segments, masks, positions, offsets, lengths and the output type.

    Raises:
        Invalid: a value is not allowed for this model; the error names the first such value, and all rows that one rule
            or another refuses.
        TooLarge: the request has too many tokens or rows.

    """
    bounds = bounds_of(manifest, request.outputs, request.dtype, request.pooling)
    call = None if bounds is None else Call.of(request, manifest)
    if bounds is not None and call is not None and is_plain(call, bounds, limits):
        return
    try:
        _check_rules(request, manifest, limits)
    except Invalid as error:
        error.items = _find_bad_rows(error.items, request, manifest, limits)
        raise


def _find_bad_rows(
    items: Collection[int], request: TokenRequest, manifest: Manifest, limits: RequestLimits
) -> Collection[int]:
    """Return the rows `items` that one rule refuses, and the rows that the other rules refuse."""
    ids, given = request.input_ids, [*request.further_inputs.values()]
    if request.context is not None:
        given.append(request.context)
    count = len(ids.lengths)
    offsets = 1 if request.offset is None else len(request.offset)
    in_rows = not ids.flat and all(len(rows.lengths) == count and not rows.flat for rows in given)
    if not len(items) or not in_rows or offsets not in (1, count):
        return items
    numbers = np.arange(count) if ids.numbers is None else ids.numbers
    found = np.asarray(items)
    while len(rest := np.flatnonzero(~np.isin(numbers, found))):
        try:
            _check_rules(select_rows(request, rest), manifest, limits)
        except Invalid as error:
            more = np.setdiff1d(np.asarray(error.items), found)
        else:
            break
        if not len(more):
            break
        found = np.union1d(found, more)
    return found


def select_rows(request: TokenRequest, kept: Int64) -> TokenRequest:
    """Return the request with only the rows `kept`, which errors name by their numbers in `request`."""
    ids, offset, special, context = request.input_ids, request.offset, request.special, request.context
    return request.change_rows(
        lambda rows: rows.select(kept),
        context=None if context is None else context.select(kept),
        new_rows=None if request.new_rows is None else request.new_rows[kept],
        offset=offset if offset is None or len(offset) == 1 else offset[kept],
        special=None if special is None else special[np.isin(ids.spread(np.arange(len(ids.lengths))), kept)],
    )


def _check_rules(request: TokenRequest, manifest: Manifest, limits: RequestLimits) -> None:
    """Raise as `check`, for the rows that the first broken rule refuses."""
    check_dtype(request.dtype, request.outputs, manifest)
    if request.truncate is not None:
        check_choice("truncate", request.truncate, SIDES)
    check_choice("pooling", request.pooling, POOLINGS)
    ids = request.input_ids
    if not len(ids.lengths):
        raise Invalid("input_ids", "an empty batch", "at least one row")
    if not ids.lengths.all():
        row = ids.number(int(np.argmin(ids.lengths)))
        raise Invalid(f"input_ids[{row}]", "an empty row", "at least one id", items=ids.bad_rows(ids.lengths == 0))
    check_size(limits, "input_ids", tokens=len(ids.values), rows=len(ids.lengths))
    check_range("input_ids", ids, manifest.vocab_size)
    for refused in manifest.refused_ids:
        allowed = f"any other id, since this model scales the other tokens of a row with {refused}"
        refuse_values("input_ids", ids, ids.values == refused, allowed)
    for output in request.outputs:
        check_choice("output", output, manifest.widths)
        if request.pooling != "none" and (output in (NGRAM_ROW_IDS, NGRAM_SCALES) or request.dtype == STORED):
            raise Invalid("pooling", request.pooling, f"none, since {output} holds no vectors to pool")
    _check_indices(request, manifest)
    if request.attention_mask is not None:
        check_same_lengths("attention_mask", request.attention_mask, ids)
        check_range("attention_mask", request.attention_mask, 2)
    check_pooled(request, manifest)
    if request.max_length is not None and (least := int(min_row_tokens(request, manifest).max())) > request.max_length:
        raise Invalid("max_length", request.max_length, f"{least} or more, to keep the special tokens and one other")
    limit = position_limit(request, manifest)
    if request.position_ids is None or request.further_positions:
        _check_offset(request, manifest, limit)
    _check_positions(request, manifest, limit)
    _check_context(request, manifest)


def _check_indices(request: TokenRequest, manifest: Manifest) -> None:
    """Check the further inputs with an integer for each token."""
    for name, rows in request.indices.items():
        if name not in manifest.indices:
            message = f"{name} is not an input: this model has no {_INPUT_TITLES.get(name, name)}"
            raise Invalid(name, "a value", "nothing", message=message)
        check_same_lengths(name, rows, request.input_ids)
        check_range(name, rows, manifest.indices[name])
    for name in manifest.needed:
        if name not in request.indices:
            message = f"{name} is missing: this model needs a value for each token"
            raise Invalid(name, "nothing", "one value for each token", message=message)


def _check_positions(request: TokenRequest, manifest: Manifest, limit: int) -> None:
    """Check `position_ids` of one axis or of three, if the request has them."""
    ids = request.input_ids
    if request.position_ids is None:
        return
    if request.offset is not None and not request.further_positions:
        message = "offset and position_ids exclude each other: position_ids give every position"
        raise Invalid("offset", "offset and position_ids", "one of them", message=message)
    if request.truncate is not None:
        message = "truncate and position_ids exclude each other: position_ids have no length limit"
        raise Invalid("truncate", "truncate and position_ids", "one of them", message=message)
    if not request.further_positions:
        check_same_lengths("position_ids", request.position_ids, ids)
        check_range("position_ids", request.position_ids, limit)
        return
    if not any(rotary.axes for rotary in manifest.rotary):
        message = "position_ids: got three axes, expected one position for each token: this model has one axis"
        raise Invalid("position_ids", "three axes", "one position for each token", message=message)
    for axis, rows in enumerate((request.position_ids, *request.further_positions)):
        check_same_lengths(f"position_ids[{axis}]", rows, ids)
        check_range(f"position_ids[{axis}]", rows, limit)


def _check_context(request: TokenRequest, manifest: Manifest) -> None:
    """Check the ids before each row; a row begins at its offset, or at the least position of its real tokens."""
    rows, given = request.input_ids, None if request.further_positions else request.position_ids
    offset = ZERO if request.offset is None else request.offset
    starts = np.broadcast_to(offset, rows.lengths.shape)
    if given is not None:
        real = real_tokens(request, manifest)
        positions = given.values if real is None else np.where(real, given.values, manifest.limit)
        starts = np.minimum.reduceat(positions, rows.starts) * (count_real(request, manifest) > 0)
    needed = manifest.needs_history(request.outputs)
    check_context(request.context, starts, manifest, needed, rows.numbers)
    if request.new_rows is not None:
        check_context(None, starts * request.new_rows, manifest, needed, rows.numbers)


def check_pooled(request: TokenRequest, manifest: Manifest) -> None:
    """Check that each row has a token to pool; truncation may leave none.

    Raises:
        Invalid: a row has none.

    """
    tokens = None if request.pooling == "none" else pooled_tokens(request, manifest)
    if tokens is None:
        return
    counts = np.add.reduceat(tokens, request.input_ids.starts)
    if not counts.all():
        row = request.input_ids.number(int(np.argmin(counts)))
        kind = "real" if manifest.sentence is None else "known"
        allowed, items = f"at least one, to take the {request.pooling}", request.input_ids.bad_rows(counts == 0)
        raise Invalid(f"input_ids[{row}]", f"no {kind} token", allowed, items=items)


def check_bias(request: PairwiseBiasRequest, manifest: Manifest, max_tokens: int) -> tuple[int, ...]:
    """Validate the lengths and the output type of a bias request, and return the shape of the bias.

    Raises:
        Invalid: the model has no bias, or a value is not allowed.
        TooLarge: the bias has more values than `max_tokens` vectors.

    """
    check_choice("dtype", request.dtype, DTYPES)
    if manifest.bias is None:
        raise Invalid("bias", "a request for it", "none", message="bias: this model has no attention bias")
    takes_offset = any(tensor.name == "query_offset" for tensor in manifest.graphs[BIAS_GRAPH].inputs)
    if request.query_offset is not None and not takes_offset:
        message = "query_offset is not an input of this bias: its last query is at the last key"
        raise Invalid("query_offset", request.query_offset, "nothing", message=message)
    offset = request.query_offset or 0
    if offset < 0:
        raise Invalid("query_offset", offset, "0 or more")
    limit = min(manifest.limit, MAX_BIAS_POSITIONS)
    for name, length in (("query", request.query_length), ("key", request.key_length)):
        if not 1 <= length <= limit:
            raise Invalid(f"{name}_length", length, f"1 to {limit}")
    if offset + request.query_length > limit:
        got = f"{offset} + {request.query_length} = {offset + request.query_length}"
        raise Invalid("query_offset + query_length", got, f"at most {limit}")
    sizes = {"query_length": request.query_length, "key_length": request.key_length}
    sizes["rows"] = sum(sizes.values())  # most rows of a sinusoid
    shape = tuple(sizes[size] if isinstance(size, str) else size for size in manifest.bias.shape)
    values, most = math.prod(shape), max_tokens * manifest.width
    if values > most:
        raise TooLarge("query_length and key_length", f"{values} values", f"at most {most}")
    return shape


def check_stem(request: StemRequest, manifest: StemManifest, max_tokens: int) -> int:
    """Validate the shape and the output type of a stem request, and return the number of output vectors.

    Raises:
        Invalid: a size or the type is not allowed.
        TooLarge: the response would have more than `max_tokens` vectors.

    """
    check_choice("dtype", request.dtype, DTYPES)
    expected, shape = manifest.input, request.values.shape
    if len(shape) != len(expected.shape) or not all(
        got == size if isinstance(size, int) else got > 0 for got, size in zip(shape, expected.shape, strict=True)
    ):
        raise Invalid(f"{expected.name}.shape", list(shape), f"[{', '.join(map(str, expected.shape))}]")
    native, patch = manifest.image_size, manifest.patch_size
    if patch is not None and shape[2:] != (native, native) and (shape[2] % patch or shape[3] % patch):
        raise Invalid(f"{expected.name}.shape", list(shape), f"multiples of {patch}, or {native} by {native}")
    tokens: int = shape[0] * manifest.length(shape)
    if tokens > max_tokens:
        raise TooLarge(expected.name, f"{tokens} vectors", f"at most {max_tokens} vectors in an answer")
    return tokens


def check_choice(field: str, value: str, allowed: Iterable[str]) -> None:
    """Raise Invalid if `value` is not one of the allowed names."""
    if value not in allowed:
        raise Invalid(field, value, ", ".join(allowed))


def _check_offset(request: TokenRequest, manifest: Manifest, limit: int) -> None:
    ids = request.input_ids
    offset = per_row("offset", ZERO if request.offset is None else request.offset, len(ids.lengths))
    if offset.min() < 0:
        row = int(np.argmax(offset < 0))
        raise Invalid(f"offset[{ids.number(row)}]", int(offset[row]), "0 or more", items=ids.bad_rows(offset < 0))
    tokens = min_row_tokens(request, manifest)
    beyond = offset > limit - tokens  # not offset + tokens > limit: the sum of a large offset could wrap
    if beyond.any():
        row = int(np.argmax(beyond))
        start, count = int(offset[row]), int(tokens[row])
        got = f"{start} + {count} = {start + count}"
        allowed = f"at most {limit}, the max_len of this model"
        raise Invalid(f"offset[{ids.number(row)}] + tokens", got, allowed, items=ids.bad_rows(beyond))
