"""Proves a graph equal to its PyTorch module, over a grid of calls through the session code of the service.

Letters: B batch, L length, M maximum length, P width of a table of positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from preblock.export.errors import ParityError
from preblock.export.parity_cases import UNLIMITED_LENGTH, GridCase, arguments_of, feeds_of, grid, in_words
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.models.frontend import FrontEnd
from preblock.models.modules.rotary_config import SCALINGS
from preblock.models.modules.signature import Signature
from preblock.service.artifacts.manifest import EMBEDDINGS, POSITIONED, TOKEN_EMBEDDINGS
from preblock.service.artifacts.parity import OutputParity, ParityCase
from preblock.service.runtime.position_table import with_position_view
from preblock.service.runtime.session import Session

ALLOWED_ULP = 8.0
"""For a front-end with a norm or a projection, whose sums may have any order. Others must be bit for bit equal."""
NARROW_ULP = {"float32": 0.0, "float16": 2.0**14, "bfloat16": 2.0**17}
"""Added if every step is rounded to a narrower type: two units of that type. A sum in another order may round to the
next value there, and a projection spreads the difference."""
ROTARY_ULP = 1.0
"""For cosines and sines, in ULP of the largest one: torch's float32 kernels against the rounded float64 of the graph.
Measured: 0.5 ULP, 6e-8, at every position up to 2^31."""
LOOKUP_CHUNK_VALUES = 2**20
"""Values of the lookup computed at once."""
COMPARED_CHUNK_VALUES = 2**18
"""Values compared at once."""
CaseReport = Callable[[int, int, int], None]
"""Receives the number of finished cases, the number of all cases, and the bytes of the last one."""


def prove(frontend: FrontEnd | CustomFrontEnd, session: Session, report: CaseReport = lambda *_: None) -> OutputParity:
    """Compare `embeddings` of `session` with `frontend` over the grid.

    Raises:
        ParityError: a case differs by more than allowed; the error names the worst.

    """
    frontend.eval()
    asked = list(grid(frontend.signature))
    cases = []
    for case in asked:
        cases.append(_compare(frontend, session, case))
        report(len(cases), len(asked), 4 * case.batch * case.length * frontend.signature.width)
    return judge(EMBEDDINGS, cases, allowed_ulp(frontend))


def allowed_ulp(frontend: FrontEnd | CustomFrontEnd) -> float:
    """Return the allowed error of a vector, in ULP of the largest value of its row."""
    arithmetic = frontend.config.arithmetic if isinstance(frontend, FrontEnd) else "float32"
    return 0.0 if frontend.signature.exact else ALLOWED_ULP + NARROW_ULP[arithmetic]


def judge(output: str, cases: Sequence[ParityCase], allowed_ulp: float) -> OutputParity:
    """Return the parity of an output over `cases`.

    Raises:
        ParityError: a case differs by more than allowed; the error names the worst.

    """
    worst = max(cases, key=lambda case: np.inf if np.isnan(case.max_ulp) else case.max_ulp)
    if not worst.max_ulp <= allowed_ulp:  # true for NaN too
        at = ", ".join(f"{name} {value}" for name, value in worst.arguments.items())
        raise ParityError(
            f"{output} of the graph differs from its PyTorch module by {worst.max_abs:.3g} "
            f"({worst.max_ulp:.3g} ULP, allowed {allowed_ulp:.3g}) at {at}"
        )
    return OutputParity(
        allowed_ulp=allowed_ulp, max_abs=max(case.max_abs for case in cases), max_ulp=worst.max_ulp, cases=tuple(cases)
    )


def prove_lookup(
    frontend: FrontEnd, session: Session, count_bytes: Callable[[int], None] = lambda _: None
) -> OutputParity:
    """Compare the model's own token lookup with `frontend.look_up`, for every id, bit for bit.

    The output is `token_embeddings`, or `embeddings` if the two are equal. `count_bytes` receives the number of bytes
    of each chunk of ids.

    Raises:
        ParityError: a value differs.

    """
    signature, cases = frontend.signature, []
    ids = np.arange(signature.vocab_size).reshape(-1, 1)  # rows of length 1 fit within every limit
    output, width = EMBEDDINGS, signature.width
    if signature.lookup_width is not None:
        output, width = TOKEN_EMBEDDINGS, signature.lookup_width
    count = min(4096, 1 + LOOKUP_CHUNK_VALUES // width)
    with torch.inference_mode():
        for part in np.array_split(ids, 1 + ids.size // count):
            expected = frontend.look_up(torch.from_numpy(part)).numpy()
            found = session.run({"input_ids": part, "offset": np.zeros(1, np.int64)}, [output])[output]
            max_abs, max_ulp = difference(found, expected)
            count_bytes(expected.nbytes)
            arguments: dict[str, JsonValue] = {"from_id": int(part[0, 0]), "to_id": int(part[-1, 0])}
            cases.append(ParityCase(arguments=arguments, max_abs=max_abs, max_ulp=max_ulp))
    return judge(output, cases, 0.0)


def prove_rotary(frontend: FrontEnd, session: Session, alone: Session) -> dict[str, OutputParity]:
    """Compare the rotary outputs of `session` with those of `frontend` over the legal part of the grid.

    `alone`, the graph without them, must return the vectors of `session` bit for bit.

    Raises:
        ParityError: a case differs by more than allowed.

    """
    signature = frontend.signature
    limit = min((limit for limit in (signature.max_len, signature.rotary_len) if limit), default=UNLIMITED_LENGTH)
    largest = max(SCALINGS[output.config.scaling].attention_factor(output.config) for output in frontend.config.rotary)
    unit = float(np.spacing(np.float32(largest)))
    cases: dict[str, list[ParityCase]] = {name: [] for name in signature.rotary}
    for case in grid(replace(signature, max_len=limit)):
        feeds = feeds_of(signature, case)
        found = session.run(feeds)
        if not np.array_equal(found[EMBEDDINGS], alone.run(feeds)[EMBEDDINGS]):
            raise ParityError(f"the graph of embeddings alone differs at {in_words(case)}")
        with torch.inference_mode():
            expected = frontend.rotary_outputs(*(torch.from_numpy(feeds[name]) for name in ("input_ids", "offset")))
        for name, values in expected.items():
            same_shape = found[name].shape == tuple(values.shape)
            max_abs = float(np.abs(found[name] - values.numpy()).max()) if same_shape else np.inf
            cases[name].append(ParityCase(arguments=arguments_of(case), max_abs=max_abs, max_ulp=max_abs / unit))
    return {name: judge(name, compared, ROTARY_ULP) for name, compared in cases.items()}


def prove_positioned(
    signature: Signature,
    positioned: Session,
    positions: NDArray[np.float32],
    plain: Session,
    count_bytes: Callable[[int], None] = lambda _: None,
) -> OutputParity:
    """Compare the graph with the input `positions` (1, M, P) to the plain one over the grid, for one offset.

    `count_bytes` receives the bytes of each case.

    Raises:
        ParityError: a bit differs.

    """
    cases = []
    for case in grid(signature):
        feeds = feeds_of(signature, case)
        if len(case.offset) > 1:
            continue
        expected = plain.run(feeds, [EMBEDDINGS])[EMBEDDINGS]
        found = positioned.run(with_position_view(feeds, positions), [EMBEDDINGS])[EMBEDDINGS]
        cases.append(_same(found, expected, arguments_of(case)))
        count_bytes(expected.nbytes)
    return judge(POSITIONED, cases, 0.0)


def _same(found: NDArray[np.float32], expected: NDArray[np.float32], arguments: dict[str, JsonValue]) -> ParityCase:
    """Compare two arrays with a short path for equal bits."""
    max_abs, max_ulp = (0.0, 0.0) if np.array_equal(found, expected) else difference(found, expected)
    return ParityCase(arguments=arguments, max_abs=max_abs, max_ulp=max_ulp)


def _compare(frontend: FrontEnd | CustomFrontEnd, session: Session, case: GridCase) -> ParityCase:
    feeds = feeds_of(frontend.signature, case)
    inputs = {name: torch.from_numpy(array) for name, array in feeds.items()}
    indices = {name: inputs.pop(name) for name in frontend.signature.indices}
    further = {"indices": indices} if case.segments else {}  # else compare the module's default with zeros in the graph
    if case.padding == "none":
        inputs.pop("attention_mask", None)
    with torch.inference_mode():
        expected = frontend(**inputs, **further).numpy()
    found = run_graph(session, feeds, f"the graph fails at {in_words(case)}")[EMBEDDINGS]
    max_abs, max_ulp = difference(found, expected)
    return ParityCase(arguments=arguments_of(case), max_abs=max_abs, max_ulp=max_ulp)


def run_graph(session: Session, feeds: Mapping[str, NDArray[Any]], failure: str) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of `session`.

    Raises:
        ParityError: onnxruntime fails; the error begins with `failure`.

    """
    try:
        return session.run(feeds)
    except Exception as error:  # onnxruntime's own exceptions share no narrower parent
        raise ParityError(f"{failure}: {' '.join(str(error).split())}") from error


def difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest one in ULP of the largest value of its row.

    Both are infinite if the shapes differ or a value is not finite.
    """
    if found.shape != expected.shape:
        return np.inf, np.inf
    width = found.shape[-1]
    rows, others, count = found.reshape(-1, width), expected.reshape(-1, width), 1 + COMPARED_CHUNK_VALUES // width
    max_abs = max_ulp = 0.0
    for begin in range(0, len(rows), count):  # in chunks, because every temporary needs memory
        one, other = rows[begin : begin + count], others[begin : begin + count]
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            return np.inf, np.inf
        absolute = np.abs(one - other).max(axis=-1)
        ulp = np.spacing(np.abs(other).max(axis=-1))
        max_abs, max_ulp = max(max_abs, float(absolute.max())), max(max_ulp, float((absolute / ulp).max()))
    return max_abs, max_ulp
