"""Rows made of parts: token ids, texts, and vectors in place of token vectors.

Letters: N given vectors, T tokens of all rows, D width of a token vector, P width of a row of positions.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import EMBEDDINGS, TOKEN_EMBEDDINGS
from preblock.service.core.errors import Invalid, TooLarge, read_items
from preblock.service.core.types import GivenVectors, Int64, PartsRequest, RowPart, TokenRequest, TokenRows, per_row
from preblock.service.engine.plain_calls import ZERO
from preblock.service.engine.scheduler import TOKEN_COST
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.runner import Float32

POSITION_BLOCK = 256
"""Positions computed at once for given vectors."""


def assemble(request: PartsRequest, model: TokenModel, max_tokens: int) -> TokenRequest:
    """Return the tokens of all parts, and their given vectors; a given vector has an ordinary id in the request.

    Raises:
        Invalid: a value is not allowed, or the model cannot take vectors.
        TooLarge: the parts have too many tokens.

    """
    rows_of_parts = read_items(request.rows, lambda _, row: [_resolve(part, model) for part in row])
    parts = [part for row in rows_of_parts for part in row]
    filler = _ordinary_id(model.manifest)
    try:
        values = _tokens_of(parts, model, max_tokens, filler, request.special_tokens_in_text)
    except Invalid as error:
        texts = [row for row, parts in enumerate(request.rows) for part in parts if part.text is not None]
        error.items = sorted({texts[item] for item in error.items})
        raise
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    ends = np.cumsum([0, *lengths])[np.cumsum([0, *map(len, request.rows)])]
    rows = TokenRows(np.concatenate(values), np.diff(ends))
    given = np.repeat([part.vectors is not None for part in parts], lengths)
    vectors = [_shape(part, model.manifest) for part in parts if part.vectors is not None]
    index: Int64 = np.flatnonzero(given)
    if request.placeholder is not None:
        token, part = request.placeholder
        places = np.flatnonzero((rows.values == token) & ~given)
        vectors.append(_shape(part, model.manifest))
        if len(places) != len(vectors[-1]):
            got, expected = f"{len(vectors[-1])} vectors", f"{len(places)}, one for each token {token} of the parts"
            raise Invalid(part.field, got, expected)
        rows.values[places] = filler
        index = np.concatenate((index, places))
    options = {name: value for name, value in vars(request).items() if name not in ("rows", "placeholder")}
    if not len(index):
        return TokenRequest(input_ids=rows, **options)
    if request.context is not None:
        message = "context cannot be used with vectors: a vector has no id for the context after it"
        raise Invalid("context", "a value", "nothing beside vectors", message=message)
    order = np.argsort(index)
    found = GivenVectors(index[order], np.concatenate(vectors)[order])
    _check_model(request, model.manifest)
    return TokenRequest(input_ids=rows, given=found, **options)


def _resolve(part: RowPart, model: TokenModel) -> RowPart:
    """Return a soft prompt as vectors, and another part unchanged; check the number of vectors."""
    if part.prompt is None:
        if part.vectors is not None:
            _shape(part, model.manifest)
        return part
    if part.prompt not in model.soft_prompts:
        raise Invalid(part.field, part.prompt, ", ".join(model.soft_prompts) or "none, since this model has none")
    return part._replace(vectors=model.soft_prompts[part.prompt].reshape(-1))


def cost_of_parts(request: PartsRequest, model: TokenModel) -> int:
    """Return the cost of `assemble` without tokenization, in values."""
    parts = [part for row in request.rows for part in row]
    prompts = {name: vectors.size for name, vectors in model.soft_prompts.items()}
    given = sum(values.size for part in parts for values in (part.ids, part.vectors) if values is not None)
    return TOKEN_COST * len(parts) + given + sum(prompts.get(part.prompt or "", 0) for part in parts)


def _ordinary_id(manifest: Manifest) -> int:
    """Return an id that is neither padding nor refused; 0 if there is none."""
    special = {manifest.padding_id, *manifest.refused_ids}
    return next((token for token in range(manifest.vocab_size) if token not in special), 0)


def _tokens_of(parts: list[RowPart], model: TokenModel, max_tokens: int, filler: int, in_text: str) -> list[Int64]:
    """Return the tokens of each part; `filler` stands for each vector.

    Raises:
        Invalid: a text is not allowed; the items of the error are numbers of texts.
        TooLarge: there are too many; their vectors were not copied yet.

    """
    texts = [part for part in parts if part.text is not None]
    encoded: Iterable[Int64] = ()
    if texts:
        if model.tokenizer is None:
            raise Invalid(texts[0].field, repr(texts[0].text), "token ids, since this model has no tokenizer")
        contents, places = [str(part.text) for part in texts], [part.field for part in texts]
        tokens = model.tokenizer.encode(contents, max_tokens, False, False, in_text=in_text, places=places).input_ids
        encoded = np.split(tokens.values, tokens.starts[1:])
    remaining = iter(encoded)
    found: list[Int64] = []
    count = 0
    for part in parts:
        size = None if part.vectors is None else len(_shape(part, model.manifest))
        ids = next(remaining) if size is None and part.ids is None else part.ids
        count += len(ids) if ids is not None else size or 0
        if count > max_tokens:
            raise TooLarge("parts", f"more than {max_tokens} tokens", f"at most {max_tokens} tokens in a request")
        found.append(np.full(size or 0, filler) if ids is None else ids)
    return found


def _shape(part: RowPart, manifest: Manifest) -> Float32:
    """Return the vectors of a part, (N, D)."""
    if manifest.token_embeddings is None:
        raise Invalid(part.field, "vectors", "token ids, since the token vectors of this model are unknown")
    width, values = manifest.token_embeddings.width, part.vectors
    assert values is not None
    if len(values) % width:
        raise Invalid(part.field, f"{len(values)} values", f"a multiple of {width}, the width of a token vector")
    return values.reshape(-1, width)


def _check_model(request: PartsRequest, manifest: Manifest) -> None:
    """Check that the requested outputs can be computed from given vectors.

    Raises:
        Invalid: an output needs the ids, or the model changes token vectors beyond a scale and positions.

    """
    allowed = [TOKEN_EMBEDDINGS, *(name for rotary in manifest.rotary for name in (rotary.cos, rotary.sin))]
    if _enters_unchanged(manifest) or _factor_before_positions(manifest) is not None:
        allowed.append(EMBEDDINGS)
    for output in request.outputs:
        if output not in allowed and output in manifest.widths:
            message = (
                f"output {output} of this model cannot be computed from given vectors; request {', '.join(allowed)}"
            )
            raise Invalid("output", output, ", ".join(allowed), message=message)


def _enters_unchanged(manifest: Manifest) -> bool:
    return manifest.token_embeddings is not None and manifest.token_embeddings.output == EMBEDDINGS


def _factor_before_positions(manifest: Manifest) -> float | None:
    """Return the factor of a token vector, if positions are then added, and nothing else follows; else None."""
    front_end = manifest.front_end or {}
    lookup = front_end.get("lookup")
    if not isinstance(lookup, int) or front_end.get("arithmetic") != "float32":
        return None
    *scales, last = manifest.steps[lookup:] or [{}]
    if last.get("kind") != "positions" or manifest.counts != "slots" or len(scales) > 1:
        return None
    if not scales:
        return 1.0
    return float(scales[0]["by"]) if scales[0].get("kind") == "scale" and not scales[0].get("cast") else None


def vectors_of_outputs(
    request: TokenRequest, model: TokenModel, names: Iterable[str]
) -> Mapping[str, NDArray[np.float32]]:
    """Return the vectors (N, width) in place of those of the given tokens, by output of the graph.

    Args:
        request: validated, with given vectors.
        model: of the request.
        names: outputs of the graph.

    """
    given, manifest = request.given, model.manifest
    if given is None:
        return {}
    found: dict[str, NDArray[np.float32]] = {}
    for name in names:
        if name == TOKEN_EMBEDDINGS or (name == EMBEDDINGS and _enters_unchanged(manifest)):
            found[name] = given.values
        elif name == EMBEDDINGS:
            factor = _factor_before_positions(manifest)
            assert factor is not None
            found[name] = given.values * np.float32(factor) + _positions_of(request, given, model)
    return found


def _positions_of(request: TokenRequest, given: GivenVectors, model: TokenModel) -> Float32:
    """Return the row of positions of each given vector, (N, P)."""
    rows, table = request.input_ids, model.position_rows
    assert table is not None
    offset = per_row("offset", ZERO if request.offset is None else request.offset, len(rows.lengths))
    positions = (rows.spread(offset - rows.starts) + np.arange(len(rows.values)))[given.tokens]
    found = np.empty((len(positions), table.width), np.float32)
    for block in np.unique(positions // POSITION_BLOCK).tolist():
        first = block * POSITION_BLOCK
        inside = positions // POSITION_BLOCK == block
        computed = table.compute(first, min(POSITION_BLOCK, model.manifest.limit - first))
        found[inside] = computed[positions[inside] - first]
    return found


def place_vectors(vectors: Float32, begin: int, index: Int64, values: NDArray[np.float32]) -> Float32:
    """Return the vectors (t, width) of the tokens from `begin` on, with given vectors in their places.

    Args:
        vectors: of t tokens; changed in place if possible.
        begin: number of the first token.
        index: int64 (N,), numbers of the given tokens, ascending.
        values: float32 (N, width).

    """
    first, last = np.searchsorted(index, (begin, begin + len(vectors)))
    if first == last:
        return vectors
    if not vectors.flags.writeable:
        vectors = vectors.copy()
    vectors[index[first:last] - begin] = values[first:last]
    return vectors
