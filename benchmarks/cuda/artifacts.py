"""Artifacts of tiny checkpoints: every row of the family table in every stored type, and every stem.

    python -m benchmarks.cuda.artifacts FOLDER

Needs transformers, and no GPU. Existing artifacts are kept.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from preblock.export.errors import ExportError

TYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8", "scale": "row"},
    "int8-tensor": {"dtype": "int8", "scale": "tensor"},
    "int4": {"dtype": "int4"},
    "rotary-float16": {"rotary_dtype": "float16"},
}
"""Options of `export` by stored type; the last is for families with rotary outputs."""


def main() -> None:
    """Export all checkpoints to a folder."""
    from tests.families.published_models import PUBLISHED
    from tests.families.stems import ROWS

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(folder, name, "float32", True) for name in ROWS]
    # In this order, even a stopped run has all families and all types.
    types = list(TYPES)
    jobs += [
        (folder, name, types[(number + turn) % len(types)], False)
        for turn in range(len(types))
        for number, name in enumerate(PUBLISHED)
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for said in pool.map(make, *zip(*jobs, strict=True)):
            print(said, flush=True)


def make(folder: Path, name: str, stored: str, stem: bool) -> str:
    """Export one checkpoint in a stored type, and return a line about it."""
    from preblock.export.exporter import export
    from tests.families import library_models, stems

    artifact = f"{'stem-' if stem else ''}{name.replace('/', '-')}.{stored}"
    if (folder / artifact).exists():
        return f"{artifact}: kept"
    with TemporaryDirectory() as checkpoint:
        (stems if stem else library_models).save(name, Path(checkpoint))
        _, _, side = (stems.ROWS[name] if stem else name).partition("/")
        try:
            export(checkpoint, artifact, folder, side=side or None, **TYPES[stored])
        except ExportError as error:
            return f"{artifact}: {error}"
    return f"{artifact}: done"


if __name__ == "__main__":
    main()
