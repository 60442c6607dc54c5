"""Time of the export of gpt2-small, against a bare torch.onnx.export and save of the same module.

    python -m benchmarks.export

The time covers reading, hashing, checking and writing to disk, but not the comparison of vectors. The figures are
medians of five runs in one process, both exports in turn, after one warm-up run of each.
"""

import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch

from preblock.export.exporter import export
from preblock.export.graph_builder import OPSET
from preblock.export.own_modules.tracing import quiet_exporter
from preblock.models.frontend import FrontEnd
from preblock.models.presets import preset_data

PRESET, TIMES = "gpt2-small", 5


def main() -> None:
    """Measure, and print the ratio."""
    warnings.simplefilter("ignore")
    ours, bare = [], []
    for _ in range(TIMES + 1):
        with tempfile.TemporaryDirectory() as folder:
            bare.append(export_bare(Path(folder)))
            ours.append(export_ours(Path(folder)))
    one, other = statistics.median(ours[1:]), statistics.median(bare[1:])
    print(f"{PRESET}: {one:.2f} s, a bare torch.onnx.export and save {other:.2f} s: {one / other:.1f} times as long")


def export_bare(folder: Path) -> float:
    """Return the seconds of an export by torch alone."""
    module = FrontEnd.from_data(preset_data(PRESET)).eval()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    begin = time.perf_counter()
    with quiet_exporter():
        program = torch.onnx.export(
            module,
            (torch.ones(2, 3, dtype=torch.int64), torch.ones(1, dtype=torch.int64)),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=({0: batch, 1: length}, None),
            verbose=False,
        )
    assert program is not None
    program.save(folder / "model.onnx", external_data=True)
    return time.perf_counter() - begin


def export_ours(folder: Path) -> float:
    """Return the seconds of an export by Preblock, without the comparison of vectors."""
    began: list[tuple[str, float]] = []
    begin = time.perf_counter()
    export(PRESET, "m", folder / "repository", lambda step: began.append((step, time.perf_counter())))
    end = time.perf_counter()
    proof = [when for step, when in began if step.startswith("proving")]
    return end - begin - (proof[-1] - proof[0])


if __name__ == "__main__":
    main()
