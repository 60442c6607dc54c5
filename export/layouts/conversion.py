"""Converts the token lookup of an artifact to the files of another engine; `LAYOUTS` has a row for each engine."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from preblock.export.errors import ExportError
from preblock.export.layouts.edgellm import write_edgellm
from preblock.export.layouts.openvino import write_openvino
from preblock.export.layouts.ort_genai import write_ort_genai, write_ort_genai_images
from preblock.export.layouts.token_lookup import TokenLookup, read_lookup
from preblock.export.layouts.transformers_js import write_transformers_js
from preblock.export.publication import draft_in, make_folder


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Files and names of an engine.

    Args:
        engine: its name among the consumers of a manifest.
        write: writes a lookup into an empty folder.
        write_images: writes a lookup that takes image features for the image token; None if the engine has none.

    """

    engine: str
    write: Callable[[TokenLookup, Path], None]
    write_images: Callable[[TokenLookup, Path, int], None] | None = None


LAYOUTS = {
    "transformers.js": Layout(engine="transformers", write=write_transformers_js),
    "ort-genai": Layout(engine="onnxruntime-genai", write=write_ort_genai, write_images=write_ort_genai_images),
    "openvino": Layout(engine="openvino-genai", write=write_openvino),
    "edgellm": Layout(engine="tensorrt-edge-llm", write=write_edgellm),
}
"""Layouts outside the repository."""


def convert(folder: Path, layout: str, output: Path, image_token_id: int | None = None) -> list[Path]:
    """Write the token lookup of the artifact in `folder` as `layout` into `output`, and return the written files.

    A failed or interrupted conversion leaves no files. Other files of `output` stay.

    Args:
        folder: of the artifact.
        layout: name of a row of `LAYOUTS`.
        output: folder to write; it is made if it is missing.
        image_token_id: id whose vectors the input `image_features` replaces, in a layout with this input; default
            None: no such input.

    Raises:
        ExportError: the artifact has no token lookup, the layout does not fit it, or a file exists or cannot be
            written.
        ArtifactError: the artifact is damaged.

    """
    row = LAYOUTS[layout]
    lookup = read_lookup(folder, row.engine)
    try:
        with draft_in(output) as draft:
            if row.write_images is not None and image_token_id is not None:
                row.write_images(lookup, draft, image_token_id)
            else:
                row.write(lookup, draft)
            return _move(draft, output)
    except OSError as error:
        raise ExportError(f"{error.filename or output}: {error.strerror}") from error


def _move(draft: Path, output: Path) -> list[Path]:
    """Move every file of `draft` to its place in `output`, and return the files."""
    files = {file: output / file.relative_to(draft) for file in sorted(draft.rglob("*")) if file.is_file()}
    for target in files.values():
        if os.path.lexists(target):
            raise ExportError(f"{target} exists; remove it, or choose another --output")
    try:
        for file, target in files.items():
            make_folder(target.parent)
            file.chmod(0o644)  # another user may run the engine
            file.rename(target)
    except BaseException:  # also after an interrupt
        for file, target in files.items():
            if not file.exists():
                target.unlink()
        raise
    return list(files.values())
