"""Writes and proves the ONNX graph of a stem: one graph for every batch and every legal image size.

Letters: B batch, D output width.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from preblock.export.external_data import map_weights
from preblock.export.graph_builder import save_graph
from preblock.export.own_modules.tracing import export_program
from preblock.export.parity import ALLOWED_ULP, judge, run_case
from preblock.export.parity_cases import BATCHES
from preblock.export.progress import Report
from preblock.models.modules.signature import StemSignature
from preblock.models.modules.stems import Stem, StemConfig, without_storage
from preblock.service.artifacts.names import EMBEDDINGS, GRAPH
from preblock.service.artifacts.parity import OutputParity, ParityCase
from preblock.service.runtime.session import Session

GROWTH = 4.0
"""Factor of the allowed ULP; see `allowed_ulp`."""


def export_stem(stem: Stem, folder: Path, report: Report = lambda _: None) -> None:
    """Write the graph of `stem` (in evaluation mode) into `folder`, over one data file.

    `report` receives the progress of a long step.

    `model.onnx` has one float32 input, `pixel_values` (batch, C, height, width) or `input_features` (batch, C, frames),
    and output float32 `embeddings` (batch, tokens, D). Sizes must be checked by the caller.
    """
    signature = stem.signature
    dynamic = {axis: torch.export.Dim(name) for axis, name in enumerate(signature.shape) if isinstance(name, str)}
    sample = torch.zeros(_shape(signature, 2, *((side + 1) for side in _native(signature))))
    model = export_program(
        stem,
        folder,
        report,
        optimize=False,  # the optimizer folds small tables into others, and gives the results new names
        kwargs={signature.input: sample},
        dynamic_shapes={signature.input: dynamic},
        input_names=[signature.input],
        output_names=[EMBEDDINGS],
    )
    if signature.patch_size:  # the exporter writes a formula of height and width
        del model.graph.value_info[:]
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "tokens"
    save_graph(model, folder / GRAPH)


def read_stem_weights(folder: Path, config: StemConfig) -> dict[str, Tensor]:
    """Return the mapped weights of an artifact of `config`, under the names of `state_dict()`."""
    names = without_storage(config).state_dict().keys()
    return {name: torch.from_numpy(values) for name, values in map_weights(folder).items() if name in names}


def allowed_ulp(signature: StemSignature) -> float:
    """Return the allowed error of a vector, in ULP of the largest value of its row.

    The rounding of a sum in two orders differs by about the root of the number of terms. A position between the
    patches of the native grid is rounded to float32 on some processors; that error grows with the side of the grid.
    """
    return ALLOWED_ULP + GROWTH * (math.sqrt(signature.terms) + sum(_native(signature)[:1]))


def prove_stem(stem: Stem, session: Session, report: Callable[[int, int, int], None] = lambda *_: None) -> OutputParity:
    """Compare `session` with `stem` over batches and sizes.

    `report` receives the number of finished cases, the number of all, and the bytes of the last one.

    Raises:
        ParityError: a case differs by more than allowed; the error names the worst.

    """
    stem.eval()
    grid, cases = list(_grid(stem.signature)), []
    for shape in grid:
        cases.append(_compare(stem, session, shape))
        report(len(cases), len(grid), 4 * math.prod(shape))
    return judge(EMBEDDINGS, cases, allowed_ulp(stem.signature))


def _native(signature: StemSignature) -> tuple[int, ...]:
    """Return rows and columns of the native grid of patches; nothing for spectrograms."""
    return (signature.image_size // signature.patch_size,) * 2 if signature.image_size and signature.patch_size else ()


def _shape(signature: StemSignature, batch: int, *grid: int) -> tuple[int, ...]:
    """Return the shape of an input, for images of the size of a grid of patches."""
    fixed = [size for size in signature.shape if isinstance(size, int)]
    return (batch, *fixed, *(patches * (signature.patch_size or 1) for patches in grid))


def _grid(signature: StemSignature) -> Iterator[tuple[int, ...]]:
    """Yield the shapes to compare: the native size first, then smaller, larger, and oblong ones."""
    for batch in BATCHES:
        if not signature.image_size:
            yield _shape(signature, batch)
            continue
        yield (*_shape(signature, batch), signature.image_size, signature.image_size)
        side, _ = _native(signature)
        for grid in ((side + 1, side + 1), (side, side + 3), (2 * side + 1, side + 1), (1, 2)):
            yield _shape(signature, batch, *grid)


def _compare(stem: Stem, session: Session, shape: tuple[int, ...]) -> ParityCase:
    values = np.random.Generator(np.random.PCG64(shape)).standard_normal(shape, np.float32)
    with torch.inference_mode():
        expected = stem(torch.from_numpy(values)).numpy()
    return run_case(session, {stem.signature.input: values}, expected, {"shape": list(shape)})
