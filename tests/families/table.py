"""Writes `docs/parity.md`: every family exported through the command line, and compared with transformers.

`make families` runs it.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from preblock.models.checkpoints.families import FAMILIES
from preblock.models.config import FrontEndConfig
from preblock.service.artifacts.io import read
from preblock.service.artifacts.manifest import MANIFEST, Manifest
from tests.families import stems
from tests.families.parity import Difference, compare, compare_rotary, compare_stem
from tests.families.published import TransformersModel, save
from tests.support.paths import PREBLOCK, ROOT

DOCUMENT = ROOT / "docs/parity.md"
HEAD = """# Parity

Every family of the table in `models/checkpoints/families.py`, on a tiny random checkpoint: saved by transformers,
exported by `preblock export`, run in a bare onnxruntime, and compared with what enters the first block of the model
itself. The cases: plain rows, rows padded on the left and on the right, rows with segments where the family has them,
and rows fed in two chunks of 9 and 5 tokens. A difference is the largest of all cases; its ULP are those of the largest
value of the row it stands in. Without a norm or a projection every bit is determined, and must be equal. Rotary outputs
are compared with the cosines and sines that the model's attention uses, in one pass and in the two chunks.

`make families` writes this page, with {versions}.

| family | largest difference | ULP | the model's own lookup (`token_embeddings`) | rotary outputs |
|---|---|---|---|---|
"""

STEM_HEAD = """
Images and spectrograms are compared at the native size and, for images, at two others. How far a convolution may differ
is said in [front-ends](front-ends.md#images-and-spectrograms).

| row | largest difference | ULP |
|---|---|---|
"""


def versions() -> str:
    """Return the versions of the libraries in use."""
    return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("transformers", "torch", "onnxruntime"))


def measure(name: str) -> str:
    """Export one family through the command line, and return its line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, repository = Path(folder) / "checkpoint", Path(folder) / "repository"
        save(name, checkpoint)
        side = name.partition("/")[2]
        options = ["--name", "model", "--repository", str(repository), *(["--side", side] if side else [])]
        subprocess.run([PREBLOCK, "export", str(checkpoint), *options], check=True, capture_output=True)
        artifact = repository / "model/1"
        manifest = read(Manifest, artifact / MANIFEST)
        assert manifest.front_end is not None
        config = FrontEndConfig.from_document(manifest.front_end)
        model = TransformersModel.load(name, checkpoint)
        worst = max(compare(model, artifact, config), key=_ulp)
        farthest = max(compare_rotary(model, artifact), key=_ulp).max_abs if config.rotary else None
    found = f"{worst.max_abs:.1e} | {worst.max_ulp:.1f}" if worst.max_abs else "0 | 0"
    rotary = "none" if farthest is None else f"{farthest:.1e}" if farthest else "0"
    tokens = manifest.token_embeddings
    assert tokens is not None
    lookup = "the same as `embeddings`" if tokens.output == "embeddings" else f"its own graph, width {tokens.width}"
    return f"| `{name}` | {found} | {lookup}{'; the consumer scales' if tokens.consumer_scales else ''} | {rotary} |"


def measure_stem(name: str) -> str:
    """Export one stem through the command line, and return its line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, side = stems.save(name, Path(folder) / "checkpoint"), stems.MODELS[name][2]
        options = ["--name", "model", "--repository", folder, *(["--side", side] if side else [])]
        subprocess.run([PREBLOCK, "export", str(checkpoint), *options], check=True, capture_output=True)
        worst = max(compare_stem(name, Path(folder) / "model/1"), key=_ulp)
    return f"| `{stems.ROWS[name]}` | {worst.max_abs:.1e} | {worst.max_ulp:.1f} |"


def _ulp(difference: Difference) -> float:
    return difference.max_ulp


def main() -> None:
    """Write the document."""
    lines = []
    for name in FAMILIES:
        lines.append(measure(name))
        sys.stderr.write(f"{lines[-1]}\n")
    further = [measure_stem(name) for name in stems.ROWS]
    text = HEAD.format(versions=versions()) + "\n".join(lines) + "\n" + STEM_HEAD + "\n".join(further) + "\n"
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
