"""Checks a request against a model before the session runs.

onnxruntime wraps negative ids without a word, and on CUDA reads rows of zeros for ids beyond the table.
"""

import numpy as np

from incipit.service.errors import Invalid, TooLarge
from incipit.service.manifest import Manifest
from incipit.service.messages import DTYPES, Request, Rows
from incipit.service.pooling import POOLINGS
from incipit.service.positions import count_real, position_limit
from incipit.service.truncation import SIDES, least_room

_WHAT = {"token_type_ids": "segments"}


def check(request: Request, manifest: Manifest, max_tokens: int) -> None:
    """Check ids, segments, masks, positions, offsets, lengths and the output type.

    Raises:
        Invalid: a value is not allowed for this model; the error names the first.
        TooLarge: more than `max_tokens` tokens.

    """
    if request.dtype not in DTYPES:
        raise Invalid("dtype", request.dtype, ", ".join(DTYPES))
    if request.truncate not in (None, *SIDES):
        raise Invalid("truncate", request.truncate, ", ".join(SIDES))
    if request.pooling not in POOLINGS:
        raise Invalid("pooling", request.pooling, ", ".join(POOLINGS))
    ids = request.input_ids
    if not len(ids.lengths):
        raise Invalid("input_ids", "an empty batch", "at least one row")
    if not ids.lengths.all():
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
            raise Invalid(name, "a value", f"nothing, since this model has no {_WHAT.get(name, name)}")
        _check_like(name, rows, ids)
        _check_range(name, rows, manifest.indices[name])
    if request.attention_mask is not None:
        _check_like("attention_mask", request.attention_mask, ids)
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
        _check_like("position_ids", request.position_ids, ids)
        _check_range("position_ids", request.position_ids, limit)
    else:
        _check_offset(request, manifest, limit)


def _check_like(field: str, rows: Rows, ids: Rows) -> None:
    """Check that `rows` pair with the ids one by one."""
    if len(rows.lengths) != len(ids.lengths):
        raise Invalid(field, f"{len(rows.lengths)} rows", f"{len(ids.lengths)} rows, as input_ids has")
    differing = np.flatnonzero(rows.lengths != ids.lengths)
    if len(differing):
        row = int(differing[0])
        got, allowed = int(rows.lengths[row]), int(ids.lengths[row])
        raise Invalid(f"{field}[{row}]", f"{got} values", f"{allowed} values, as input_ids[{row}] has")


def _check_range(field: str, rows: Rows, limit: int) -> None:
    """Check that every value is 0 to `limit` - 1."""
    # One pass for both ends: as unsigned numbers, the negative ones are the largest.
    unsigned = rows.values.view(np.uint64)
    if unsigned.max() >= limit:
        index = int(np.flatnonzero(unsigned >= limit)[0])
        raise Invalid(field + rows.place(index), int(rows.values[index]), f"0 to {limit - 1}")


def _check_offset(request: Request, manifest: Manifest, limit: int) -> None:
    batch = len(request.input_ids.lengths)
    offset = np.zeros(1, np.int64) if request.offset is None else request.offset
    if offset.shape not in ((1,), (batch,)):
        raise Invalid("offset", f"{len(offset)} values", f"one value, or one for each of {batch} rows")
    if offset.min() < 0:
        row = int(np.flatnonzero(offset < 0)[0])
        raise Invalid(f"offset[{row}]", int(offset[row]), "0 or more")
    # Not offset + tokens > max_len: the sum of a large offset could wrap.
    beyond = np.flatnonzero(offset > limit - (least := least_room(request, manifest)))
    if len(beyond):
        row = int(beyond[0])
        start, tokens = int(np.broadcast_to(offset, batch)[row]), int(least[row])
        raise Invalid(
            f"offset[{row}] + tokens",
            f"{start} + {tokens} = {start + tokens}",
            f"at most {limit}, the max_len of this model",
        )
