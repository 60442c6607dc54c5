"""Writes `docs/reference/parity.md`: every family exported through the command line, and compared with transformers.

`make families` runs it; `make families ARGS=gpt2` measures one family and keeps the other rows.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Collection
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

DOCUMENT = ROOT / "docs/reference/parity.md"
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
convolutions is in [front-ends](../front-ends.md#images-and-spectrograms).

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


def read_rows(document: str) -> dict[str, str]:
    """Return the rows of the page by family."""
    return {line.split("`")[1]: line for line in document.splitlines() if line.startswith("| `")}


def named_families(description: str, known: Collection[str], page: str) -> list[str]:
    """Return the families on the command line; default none. `page`, with the other rows, must be current."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help="family, such as gpt2 or t5/encoder; default all")
    names: list[str] = parser.parse_args().names
    if names and versions() not in page:
        parser.error(f"the page states other versions than {versions()}; try all families, without NAME")
    if unknown := sorted({*names} - {*known}):
        parser.error(f"NAME: got {unknown[0]}, expected a family of `preblock families`, or SIDE after it: t5/encoder")
    return names


def main() -> None:
    """Measure the named families, or all, and write the document."""
    measures = dict.fromkeys(FAMILIES, measure) | dict.fromkeys(stems.ROWS.values(), measure_stem)
    document = DOCUMENT.read_text(encoding="utf-8")
    names = named_families("Export families, and compare them with transformers.", measures, document)
    rows = read_rows(document)
    models = {row: name for name, row in stems.ROWS.items()}
    for name in names or measures:
        rows[name] = measures[name](models.get(name, name))
        sys.stderr.write(f"{rows[name]}\n")
    families, further = ([rows[name] for name in group if name in rows] for group in (FAMILIES, models))
    text = HEAD.format(versions=versions()) + "\n".join(families) + "\n" + STEM_HEAD + "\n".join(further) + "\n"
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
