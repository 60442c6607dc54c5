"""History: the ids before each token, for outputs that depend on them.

The history of a token is the last real tokens before it in its row, and the `context` of the request before these.
Padding is never part of it.

Letters: B batch, T tokens of all rows, H ids of a history.
"""

from collections.abc import Collection

import numpy as np

from preblock.service.artifacts.manifest import NGRAMS, Manifest
from preblock.service.core.errors import Invalid
from preblock.service.core.types import Int64, TokenRequest
from preblock.service.engine.positions import count_real, real_tokens


def needs_history(outputs: Collection[str], manifest: Manifest) -> bool:
    """Return whether one of `outputs` depends on the ids before a token."""
    return manifest.history is not None and NGRAMS in outputs


def check_context(request: TokenRequest, manifest: Manifest, starts: Int64) -> None:
    """Check the shape of `context`, and its presence; the caller checks its ids.

    Args:
        request: the request.
        manifest: of its model.
        starts: int64 (B,), position of the first real token of each row.

    Raises:
        Invalid: the model takes no context, a row has another number of ids, or a context is missing.

    """
    history, context, rows = manifest.history, request.context, len(request.input_ids.lengths)
    if context is not None:
        if history is None:
            message = "context is not an input: no output of this model depends on the ids before a row"
            raise Invalid("context", "a value", "nothing", message=message)
        if len(context.lengths) != rows:
            raise Invalid("context", f"{len(context.lengths)} rows", f"{rows} rows, as input_ids has")
        differs = context.lengths != history.tokens
        if differs.any():
            row = int(np.argmax(differs))
            name = "context" if context.flat else f"context[{context.number(row)}]"
            allowed = f"{history.tokens} ids, the last ones before the row"
            raise Invalid(name, f"{int(context.lengths[row])} ids", allowed)
    elif history is not None and needs_history(request.outputs, manifest) and starts.any():
        row = int(np.argmax(starts > 0))
        allowed = f"the last {history.tokens} ids before each row, since row {request.input_ids.number(row)} begins at "
        raise Invalid("context", "nothing", f"{allowed}{int(starts[row])}; a response has them as next_context")


def context_of(request: TokenRequest, manifest: Manifest) -> Int64:
    """Return the ids before each row of a validated request, int64 (B, H)."""
    assert manifest.history is not None
    shape = len(request.input_ids.lengths), manifest.history.tokens
    if request.context is not None:
        return request.context.values.reshape(shape)
    return np.full(shape, manifest.history.reset_id)


def token_contexts(request: TokenRequest, manifest: Manifest) -> Int64:
    """Return the ids before each token of a validated request, int64 (T, H); arbitrary for padding."""
    assert manifest.history is not None
    real = real_tokens(request, manifest)
    ids, index, _ = _joined(request, manifest)
    found: Int64 = ids[index[:, None] + np.arange(-manifest.history.tokens, 0)]
    if real is None:
        return found
    contexts = np.full((len(real), manifest.history.tokens), manifest.history.reset_id)
    contexts[real != 0] = found
    return contexts


def next_context(request: TokenRequest, manifest: Manifest) -> Int64:
    """Return the ids before the next tokens of each row, int64 (B, H)."""
    assert manifest.history is not None
    ids, _, ends = _joined(request, manifest)
    found: Int64 = ids[ends[:, None] + np.arange(-manifest.history.tokens, 0)]
    return found


def _joined(request: TokenRequest, manifest: Manifest) -> tuple[Int64, Int64, Int64]:
    """Return contexts and real tokens in one array, row by row; the places of these tokens; and the end of each row."""
    context, real = context_of(request, manifest), real_tokens(request, manifest)
    counts, width = count_real(request, manifest), context.shape[1]
    values = request.input_ids.values if real is None else request.input_ids.values[real != 0]
    before = np.arange(1, len(counts) + 1) * width  # ids of contexts up to each row
    ends: Int64 = np.cumsum(counts) + before
    index = np.arange(len(values)) + np.repeat(before, counts)
    ids = np.empty(len(values) + context.size, np.int64)
    ids[index] = values
    ids[(ends - counts)[:, None] + np.arange(-width, 0)] = context
    return ids, index, ends
