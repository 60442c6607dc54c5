"""Proves a graph equal to its PyTorch module: a grid of calls through the session code that serves.

Letters: B batch, L length, M maximum length.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from incipit.export.errors import ParityError
from incipit.models.frontend import FrontEnd
from incipit.service import runtime
from incipit.service.manifest import Parity, ParityCase, ParityReport

BATCHES = (1, 2, 5)
LENGTHS = (1, 2, 17)
ALLOWED_ULP = 8.0
"""For a front-end with a LayerNorm: its sums may be ordered in any way. Without one, bits must be equal."""


def prove(
    frontend: FrontEnd, session: runtime.Session, report: Callable[[int, int], None] = lambda *_: None
) -> ParityReport:
    """Compare `session` with `frontend` over the grid; `report` is told how many cases are done, of how many.

    Raises:
        ParityError: a case differs by more than is allowed; the error names the worst.

    """
    frontend.eval()
    grid = list(_grid(frontend))
    cases = []
    for batch, length, offset, segments in grid:
        cases.append(_compare(frontend, session, batch, length, offset, segments))
        report(len(cases), len(grid))
    allowed = 0.0 if frontend.norm is None else ALLOWED_ULP
    worst = max(cases, key=lambda case: case.max_ulp)
    if worst.max_ulp > allowed:
        raise ParityError(
            f"the graph differs from its PyTorch module by {worst.max_abs:.3g} ({worst.max_ulp:.3g} ULP, allowed "
            f"{allowed:g}) at batch {worst.batch}, length {worst.length}, offset {list(worst.offset)}, "
            f"segments {worst.segments}"
        )
    section = Parity(
        onnxruntime=runtime.VERSION,
        torch=torch.__version__,
        allowed_ulp=allowed,
        max_abs=max(case.max_abs for case in cases),
        max_ulp=worst.max_ulp,
        cases=tuple(cases),
    )
    return ParityReport(providers={session.provider: section})


def _grid(frontend: FrontEnd) -> Iterator[tuple[int, int, tuple[int, ...], bool]]:
    """Yield batch, length, offset and whether segments are given: all combinations that are legal."""
    max_len = frontend.config.max_len
    for batch in BATCHES:
        for length in sorted({min(length, max_len) for length in (*LENGTHS, max_len)}):
            last = max_len - length
            offsets: list[tuple[int, ...]] = [(offset,) for offset in sorted({0, min(1, last), last})]
            if batch > 1:
                offsets.append(tuple(int(offset) for offset in np.linspace(0, last, batch)))
            for offset in offsets:
                for segments in (False, True) if frontend.config.segments else (False,):
                    yield batch, length, offset, segments


def _compare(
    frontend: FrontEnd,
    session: runtime.Session,
    batch: int,
    length: int,
    offset: tuple[int, ...],
    segments: bool,
) -> ParityCase:
    generator = np.random.Generator(np.random.PCG64([batch, length, *offset]))
    input_ids = generator.integers(0, frontend.config.vocab_size, (batch, length))
    # The first and the last id are in every case: an off-by-one in the table shows.
    input_ids[0, 0], input_ids[-1, -1] = 0, frontend.config.vocab_size - 1
    feeds = {"input_ids": input_ids, "offset": np.array(offset)}
    token_type_ids = None
    if frontend.config.segments:
        feeds["token_type_ids"] = np.zeros_like(input_ids)
    if segments:
        feeds["token_type_ids"] = generator.integers(0, frontend.config.segments, (batch, length))
        token_type_ids = torch.from_numpy(feeds["token_type_ids"])
    with torch.inference_mode():
        expected = frontend(torch.from_numpy(input_ids), torch.tensor(offset), token_type_ids).numpy()
    max_abs, max_ulp = difference(session.run(feeds), expected)
    return ParityCase(batch=batch, length=length, offset=offset, segments=segments, max_abs=max_abs, max_ulp=max_ulp)


def difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest in ULP of the largest value of its row.

    Infinite where the shapes differ or a value is not a number.
    """
    if found.shape != expected.shape or not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return np.inf, np.inf
    absolute = np.abs(found - expected).max(axis=-1)
    ulp = np.spacing(np.abs(expected).max(axis=-1))
    return float(absolute.max()), float((absolute / ulp).max())
