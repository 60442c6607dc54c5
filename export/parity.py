"""Proves a graph equal to its PyTorch module: a grid of calls through the session code that serves.

Letters: B batch, L length, M maximum length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from preblock.export.errors import ParityError
from preblock.models.custom import CustomFrontEnd
from preblock.models.frontend import FrontEnd
from preblock.models.modules.rotary import SCALINGS
from preblock.models.modules.signature import Signature
from preblock.service.artifacts.manifest import (
    EMBEDDINGS,
    IN_TILES,
    POSITIONED,
    TOKEN_EMBEDDINGS,
    OutputParity,
    ParityCase,
)
from preblock.service.runtime.bound_calls import ReadyCalls
from preblock.service.runtime.chunks import cut
from preblock.service.runtime.position_table import place
from preblock.service.runtime.session import Session

BATCHES = (1, 2, 5)
LENGTHS = (1, 2, 17)
ALLOWED_ULP = 8.0
"""For a front-end with a norm or a projection: its sums may be ordered in any way. Without, bits must be equal."""
NARROW_ULP = {"float32": 0.0, "float16": 2.0**14, "bfloat16": 2.0**17}
"""Besides, where every step is rounded to a narrower type: two units of that type. A sum in another order may round to
the neighbour there, and a projection carries that further."""
ROTARY_ULP = 1.0
"""For cosines and sines, in units in the last place of the largest one: torch's float32 kernels against the float64 of
the graph, which is rounded. Found: 0.5, 6e-8, at every position up to 2^31."""
LARGEST = 2**23
"""Numbers of an output of several rows: the longest rows of a case that would have more are as long as fits."""
LONG = 512
"""Length that stands for the longest where no table of positions sets one."""
PART = 2**20
"""Numbers of the lookup that are computed at once."""
PIECE = 2**18
"""Numbers that are compared at once."""
WINDOW = 2**23
"""Numbers of the table of tokens that a case takes its ids from, beside the first and the last."""
TILE = 7
"""Tokens of a tile that is proven: cases have a part of one, a whole one, and several of which the last is a part."""
PADDINGS: tuple[Literal["none", "left", "right"], ...] = ("none", "left", "right")


Cases = Callable[[int, int, int], None]
"""Is told how many cases of how many are done, and the bytes of the last."""


class Arguments(NamedTuple):
    """The arguments of one comparison; `segments`: every further index is random, and not left out."""

    batch: int
    length: int
    offset: tuple[int, ...]
    segments: bool
    padding: Literal["none", "left", "right"]


def prove(frontend: FrontEnd | CustomFrontEnd, session: Session, report: Cases = lambda *_: None) -> OutputParity:
    """Compare `embeddings` of `session` with `frontend` over the grid.

    `report` is told how many cases of how many are done, and the bytes of the last.

    Raises:
        ParityError: a case differs by more than is allowed; the error names the worst.

    """
    frontend.eval()
    asked = list(grid(frontend.signature))
    cases = []
    for case in asked:
        cases.append(_compare(frontend, session, case))
        report(len(cases), len(asked), 4 * case.batch * case.length * frontend.signature.width)
    return judge(EMBEDDINGS, cases, allowed_ulp(frontend))


def allowed_ulp(frontend: FrontEnd | CustomFrontEnd) -> float:
    """Return by how many ULP of the largest value of its row a vector may differ."""
    arithmetic = frontend.config.arithmetic if isinstance(frontend, FrontEnd) else "float32"
    return 0.0 if frontend.signature.exact else ALLOWED_ULP + NARROW_ULP[arithmetic]


def judge(output: str, cases: Sequence[ParityCase], allowed_ulp: float) -> OutputParity:
    """Return the comparison of an output that `cases` make up.

    Raises:
        ParityError: a case differs by more than is allowed; the error names the worst.

    """
    worst = max(cases, key=lambda case: np.inf if np.isnan(case.max_ulp) else case.max_ulp)
    if not worst.max_ulp <= allowed_ulp:  # no number is found too
        at = ", ".join(f"{name} {value}" for name, value in worst.arguments.items())
        raise ParityError(
            f"{output} of the graph differs from its PyTorch module by {worst.max_abs:.3g} "
            f"({worst.max_ulp:.3g} ULP, allowed {allowed_ulp:.3g}) at {at}"
        )
    return OutputParity(
        allowed_ulp=allowed_ulp,
        max_abs=max(case.max_abs for case in cases),
        max_ulp=worst.max_ulp,
        cases=tuple(cases),
    )


def prove_lookup(frontend: FrontEnd, session: Session, told: Callable[[int], None] = lambda _: None) -> OutputParity:
    """Compare a graph of the model's own lookup with `frontend.look_up`, for every id.

    It is that of `token_embeddings`, or one of `embeddings` where the two are the same. `told` is told the bytes of
    each part of the ids.

    Raises:
        ParityError: a value differs; the steps of a lookup leave no bit to chance.

    """
    signature, cases = frontend.signature, []
    ids = np.arange(signature.vocab_size).reshape(-1, 1)  # rows of length 1 fit within every limit
    output, width = EMBEDDINGS, signature.width
    if signature.lookup_width is not None:
        output, width = TOKEN_EMBEDDINGS, signature.lookup_width
    count = min(4096, 1 + PART // width)
    with torch.inference_mode():
        for part in np.array_split(ids, 1 + ids.size // count):
            expected = frontend.look_up(torch.from_numpy(part)).numpy()
            found = session.run({"input_ids": part, "offset": np.zeros(1, np.int64)}, [output])[output]
            max_abs, max_ulp = difference(found, expected)
            told(expected.nbytes)
            arguments: dict[str, JsonValue] = {"from_id": int(part[0, 0]), "to_id": int(part[-1, 0])}
            cases.append(ParityCase(arguments=arguments, max_abs=max_abs, max_ulp=max_ulp))
    return judge(output, cases, 0.0)


def prove_rotary(frontend: FrontEnd, session: Session, alone: Session) -> dict[str, OutputParity]:
    """Compare the rotary outputs of `session` with those of `frontend` over the grid, as far as they are legal.

    `alone`, the graph without them, must give the vectors of `session` bit for bit.

    Raises:
        ParityError: a case differs by more than is allowed.

    """
    signature = frontend.signature
    limit = min((limit for limit in (signature.max_len, signature.rotary_len) if limit), default=LONG)
    largest = max(SCALINGS[output.config.scaling].attention_factor(output.config) for output in frontend.config.rotary)
    unit = float(np.spacing(np.float32(largest)))
    cases: dict[str, list[ParityCase]] = {name: [] for name in signature.rotary}
    for case in grid(replace(signature, max_len=limit)):
        feeds = feeds_of(signature, case)
        found = session.run(feeds)
        if not np.array_equal(found[EMBEDDINGS], alone.run(feeds)[EMBEDDINGS]):
            raise ParityError(f"the graph of embeddings alone differs at {_say(case)}")
        with torch.inference_mode():
            expected = frontend.rotary_outputs(*(torch.from_numpy(feeds[name]) for name in ("input_ids", "offset")))
        for name, values in expected.items():
            same_shape = found[name].shape == tuple(values.shape)
            max_abs = float(np.abs(found[name] - values.numpy()).max()) if same_shape else np.inf
            cases[name].append(ParityCase(arguments=_arguments(case), max_abs=max_abs, max_ulp=max_abs / unit))
    return {name: judge(name, compared, ROTARY_ULP) for name, compared in cases.items()}


def prove_tiles(
    signature: Signature, tiles: Session, plain: Session, told: Callable[[int], None] = lambda _: None
) -> OutputParity:
    """Compare the graph of tiles with the plain one over the grid: with one offset, and cut as the service cuts.

    `told` is told the bytes of each case.

    Raises:
        ParityError: a bit differs.

    """
    cases = []
    for case in grid(signature):
        feeds = feeds_of(signature, case)
        calls = {"tokens": cut(feeds, _offsets(signature, feeds), TILE)}
        calls |= {"rows": feeds} if len(case.offset) == 1 else {}
        expected = plain.run(feeds, [EMBEDDINGS])[EMBEDDINGS]
        for kind, call in calls.items():
            found = tiles.run(call)[EMBEDDINGS].reshape(-1, expected.shape[-1])[: case.batch * case.length]
            found = found.reshape(expected.shape)
            arguments: dict[str, JsonValue] = {**_arguments(case), "tiles": kind}
            cases.append(_same(found, expected, arguments))
        told(expected.nbytes)
    return judge(IN_TILES, cases, 0.0)


def prove_positioned(
    signature: Signature,
    positioned: Session,
    positions: NDArray[np.float32],
    plain: Session,
    told: Callable[[int], None] = lambda _: None,
) -> OutputParity:
    """Compare the graph that is given `positions` (1, M, P) with the plain one over the grid, for one offset.

    A graph that adds positions last is run in both ways that the service has. `told` is told the bytes of each case.

    Raises:
        ParityError: a bit differs.

    """
    cases = []
    for case in grid(signature):
        feeds = feeds_of(signature, case)
        expected = plain.run(feeds, [EMBEDDINGS])[EMBEDDINGS]
        # What is made in place keeps its session open, which a huge table must not.
        calls = ReadyCalls(positioned, positions, often=0)
        one = len(case.offset) == 1
        if (calls.in_place or not one) and (found := calls.run(feeds)) is not None:
            told_of = {"in_place": True} if calls.in_place else {}
            cases.append(_same(found, expected, _arguments(case) | told_of))
            del found
        del calls
        if not one:
            continue
        found = positioned.run(place(feeds, positions), [EMBEDDINGS])[EMBEDDINGS]
        cases.append(_same(found, expected, _arguments(case)))
        told(expected.nbytes)
    return judge(POSITIONED, cases, 0.0)


def _same(found: NDArray[np.float32], expected: NDArray[np.float32], arguments: dict[str, JsonValue]) -> ParityCase:
    """Compare what should have the same bits."""
    max_abs, max_ulp = (0.0, 0.0) if np.array_equal(found, expected) else difference(found, expected)
    return ParityCase(arguments=arguments, max_abs=max_abs, max_ulp=max_ulp)


def _offsets(signature: Signature, feeds: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return how many real tokens precede each token: int64 (batch, length)."""
    real = np.ones_like(feeds["input_ids"])
    if signature.counts == "ids":
        real = (feeds["input_ids"] != signature.padding_idx).astype(np.int64)
    elif signature.counts == "mask":
        real = feeds["attention_mask"]
    offsets: NDArray[np.int64] = feeds["offset"].reshape(-1, 1) + real.cumsum(axis=1) - real
    return offsets


def _arguments(case: Arguments) -> dict[str, JsonValue]:
    return {**case._asdict(), "offset": list(case.offset)}


def _say(case: Arguments) -> str:
    return (
        f"batch {case.batch}, length {case.length}, offset {list(case.offset)}, segments {case.segments}, "
        f"padding {case.padding}"
    )


def longest(signature: Signature) -> int:
    """Return the longest row that is compared.

    Without a table of positions every place is like every other: a long row shows no more than a short one. Computed
    ones that follow a table are reached from its end.
    """
    return min(signature.max_len or LONG, max(signature.rows, LONG))


def grid(signature: Signature) -> Iterator[Arguments]:
    """Yield all combinations that are legal."""
    most = longest(signature)
    for batch in BATCHES:
        fits = most if batch == 1 else max(LENGTHS[-1], LARGEST // (batch * signature.width))
        for length in sorted({min(length, most, fits) for length in (*LENGTHS, most)}):
            last = (signature.max_len or LONG) - length
            offsets: list[tuple[int, ...]] = [(offset,) for offset in sorted({0, min(1, last), last})]
            if batch > 1:
                offsets.append(tuple(int(offset) for offset in np.linspace(0, last, batch)))
            for offset in offsets:
                for segments in (False,) if not signature.indices else (True,) if signature.needed else (False, True):
                    for padding in PADDINGS if signature.counts == "ids" or signature.needs_mask else PADDINGS[:1]:
                        yield Arguments(batch, length, offset, segments, padding)


def _compare(frontend: FrontEnd | CustomFrontEnd, session: Session, case: Arguments) -> ParityCase:
    feeds = feeds_of(frontend.signature, case)
    inputs = {name: torch.from_numpy(array) for name, array in feeds.items()}
    indices = {name: inputs.pop(name) for name in frontend.signature.indices}
    further = {"indices": indices} if case.segments else {}  # else its own default against the zeros of the graph
    if case.padding == "none":
        inputs.pop("attention_mask", None)
    with torch.inference_mode():
        expected = frontend(**inputs, **further).numpy()
    try:
        found = session.run(feeds)[EMBEDDINGS]
    except Exception as error:  # onnxruntime's own exceptions share no narrower parent
        raise ParityError(f"the graph fails at {_say(case)}: {' '.join(str(error).split())}") from error
    max_abs, max_ulp = difference(found, expected)
    return ParityCase(arguments=_arguments(case), max_abs=max_abs, max_ulp=max_ulp)


def feeds_of(signature: Signature, case: Arguments) -> dict[str, NDArray[np.int64]]:
    """Make the inputs of a case: random, but the same in every run."""
    vocab_size, shape = signature.vocab_size, (case.batch, case.length)
    generator = np.random.Generator(np.random.PCG64([*shape, *case.offset]))
    excluded = {*signature.refused_ids, signature.padding_idx} - {None}
    legal = np.setdiff1d(np.arange(vocab_size), list(excluded), assume_unique=True)  # else it looks for ids that repeat
    # Of a huge table each case takes another part, since what it takes from everywhere is all in memory at once.
    window = min(len(legal), WINDOW // signature.width)
    begin = int(generator.integers(0, len(legal) - window + 1)) if window < len(legal) else 0
    ids = generator.choice(legal[begin : begin + window], shape)
    # The first and the last id are in every case: an off-by-one in the table shows.
    if ids.size:
        ids[0, 0], ids[-1, -1] = legal[0], legal[-1]
    real = np.ones(shape, np.int64)
    for row in range(case.batch):
        padded = min(row + 1, case.length) if case.padding != "none" else 0
        real[row, slice(0, padded) if case.padding == "left" else slice(case.length - padded, None)] = 0
    if signature.padding_idx is not None and signature.counts == "ids":
        ids[real == 0] = signature.padding_idx
    feeds = {"input_ids": ids, "offset": np.array(case.offset)}
    for name, count in signature.indices.items():
        feeds[name] = generator.integers(0, count, shape) if case.segments else np.zeros_like(ids)
    if signature.needs_mask:
        feeds["attention_mask"] = real
    return feeds


def difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest in ULP of the largest value of its row.

    Infinite where the shapes differ or a value is not a number.
    """
    if found.shape != expected.shape:
        return np.inf, np.inf
    width = found.shape[-1]
    rows, others, count = found.reshape(-1, width), expected.reshape(-1, width), 1 + PIECE // width
    max_abs = max_ulp = 0.0
    for begin in range(0, len(rows), count):  # some at a time, since each needs memory
        one, other = rows[begin : begin + count], others[begin : begin + count]
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            return np.inf, np.inf
        absolute = np.abs(one - other).max(axis=-1)
        ulp = np.spacing(np.abs(other).max(axis=-1))
        max_abs, max_ulp = max(max_abs, float(absolute.max())), max(max_ulp, float((absolute / ulp).max()))
    return max_abs, max_ulp
