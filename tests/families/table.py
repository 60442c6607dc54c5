"""Writes `docs/parity.md`: every family exported through the command line, and compared with transformers.

`make families` runs it.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from preblock.models.config import FrontEndConfig
from preblock.models.families import FAMILIES
from preblock.service.artifacts.io import read
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import MANIFEST
from tests.families import stems
from tests.families.library_models import TransformersModel, save
from tests.families.parity import Difference, compare, compare_rotary, compare_stem
from tests.support.paths import PREBLOCK, ROOT

DOCUMENT = ROOT / "docs/parity.md"
HEAD = """# Parity

This page compares every family of `models/families/` with transformers. For each family, transformers
saves a tiny random checkpoint, `preblock export` exports it, and a bare onnxruntime session runs the artifact. The
reference is the input of the model's own first block.

| case | input |
|---|---|
| plain | rows of one length |
| padding | rows padded on the left, and on the right |
| segments | rows with segments, if the family has them |
| chunks | rows fed as 9 tokens, then 5 tokens |

- "Largest difference" is the maximum over all cases. ULP is the same difference, in units in the last place
  of the largest value of its row.
- Families without a norm or a projection must match bit for bit.
- `token_embeddings` is the model's own lookup. "The model scales" marks models with a scale on `inputs_embeds`.
- [Edited configurations](parity-configs.md) are compared on a page of their own.
- Rotary outputs are compared with the cosines and sines in the model's attention, in one pass and in chunks.

`make families` writes this page. Versions: {versions}.

| family | largest difference | ULP | `token_embeddings` | rotary outputs |
|---|---|---|---|---|
"""

STEM_HEAD = """
Images and spectrograms are compared at the native size. Images are also compared at two other sizes. The tolerance of
convolutions is in [front-ends](front-ends.md#images-and-spectrograms).

| family | largest difference | ULP |
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
    lookup = "same as `embeddings`" if tokens.output == "embeddings" else f"separate graph, width {tokens.width}"
    return f"| `{name}` | {found} | {lookup}{'; the model scales' if config.consumer_scales else ''} | {rotary} |"


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
