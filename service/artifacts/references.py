"""Files outside an artifact with rows of its tables: the only paths outside of it."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Literal

from preblock.service.artifacts.manifest import Artifact, Manifest, NgramTable, TablePart
from preblock.service.artifacts.names import MANIFEST
from preblock.service.artifacts.parity import ParityReport
from preblock.service.artifacts.safetensors_header import TYPES, Header, read_header
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import FileSignature, is_inside, open_file, signature_of


def check_references(manifest: Artifact, roots: Sequence[Path]) -> dict[str, FileSignature]:
    """Check the referenced files of an artifact by size, time and header, and return the signature of each.

    Args:
        manifest: of the artifact.
        roots: allowed folders.

    Raises:
        ArtifactError: a file is outside `roots`, is missing or irregular, or has changed since the export; or a table
            is none of its tensors. The error names the path.

    """
    if not isinstance(manifest, Manifest):
        return {}
    headers: dict[str, Header] = {}
    signatures: dict[str, FileSignature] = {}
    for path, expected in manifest.references.items():
        field = f"references {path}"
        with open_reference(path, roots) as stream:
            status = os.fstat(stream.fileno())
            for name, found, stated in (
                ("size", status.st_size, expected.bytes),
                ("time of change (ns)", status.st_mtime_ns, expected.mtime_ns),
            ):
                if found != stated:
                    raise ArtifactError(f"{field} {name}", found, f"{stated}, as at the export")
            headers[path] = read_header(field, stream)
            if headers[path].sha256 != expected.header_sha256:
                got = f"sha256 {headers[path].sha256[:12]}…"
                raise ArtifactError(f"{field} header", got, f"sha256 {expected.header_sha256[:12]}…, as at the export")
            signatures[path] = signature_of(status)
    for number, table in enumerate(manifest.ngram_tables if manifest.references else ()):
        _check_table(f"{MANIFEST} ngram_tables.{number}", table, headers)
    return signatures


def open_reference(path: str, roots: Sequence[Path]) -> BufferedReader:
    """Open a file outside an artifact.

    Raises:
        ArtifactError: the path is not absolute, or leads outside `roots`; or the file is missing or irregular.

    """
    field = f"references {path}"
    if not Path(path).is_absolute() or os.path.normpath(path) != path or "\0" in path:
        raise ArtifactError(field, path, "an absolute path without '..'")
    target = Path(os.path.realpath(path))
    if not is_inside(target, roots):
        link = "" if target == Path(path) else f", a link to {target},"
        allowed = ", ".join(map(str, roots)) or "no folder"
        message = f"{field}{link} is outside the folders of the setting reference_roots: {allowed}"
        raise ArtifactError(field, str(target), "a file in a folder of reference_roots", message=message)
    try:
        exists = target.exists()
    except OSError:  # `open_file` names the reason
        exists = True
    if not exists:
        message = f"{field} is missing; moved files need another export"
        raise ArtifactError(field, "no such file", "the file of the export", message=message)
    try:
        return open_file(target)
    except ArtifactError as error:
        raise ArtifactError(field, error.got, error.expected) from error


def describe_check(manifest: Artifact, report: ParityReport) -> Literal["header", "content"] | None:
    """Return the check of the referenced files of an artifact: of their headers, or by `verify` of their content.

    None for an artifact without such files.
    """
    paths = manifest.references.keys() if isinstance(manifest, Manifest) else ()
    if not paths:
        return None
    return "content" if report.references.keys() >= set(paths) else "header"


def read_signatures(paths: Iterable[str]) -> dict[str, FileSignature]:
    """Return the signatures of the files of these paths, without unreadable ones."""
    found = {}
    for path in paths:
        with suppress(OSError, ValueError):
            found[path] = signature_of(Path(path).stat())
    return found


def _check_table(field: str, table: NgramTable, headers: Mapping[str, Header]) -> None:
    """Compare the parts of a table with the tensors of the files."""
    if sum(part.rows for part in table.parts) != table.rows:
        raise ArtifactError(f"{field}.parts", sum(part.rows for part in table.parts), f"{table.rows} rows")
    for number, part in enumerate(table.parts):
        place = f"{field}.parts.{number}"
        _check_place(place, headers, part.file, part.begin, table.dtype, {(part.rows, table.width)})
        if (part.scales is None) == (table.dtype == "float8_e4m3fn"):
            raise ArtifactError(f"{place}.scales", part.scales, "scales for float8_e4m3fn, and for no other type")
        if part.scales is not None:
            shapes = scale_shapes(part, table.width)
            _check_place(f"{place}.scales", headers, part.scales.file, part.scales.begin, part.scales.dtype, shapes)


def scale_shapes(part: TablePart, width: int) -> set[tuple[int, ...]]:
    """Return the possible shapes of the tensor of scales of `part`."""
    assert part.scales is not None
    rows = -(-part.rows // part.scales.block_rows)
    columns = -(-width // part.scales.block_columns)
    shapes: set[tuple[int, ...]] = {(rows, columns)}
    shapes |= {(rows,)} if columns == 1 else set()
    return shapes | ({()} if rows == columns == 1 else set())


def _check_place(
    field: str, headers: Mapping[str, Header], file: str, begin: int, dtype: str, shapes: set[tuple[int, ...]]
) -> None:
    """Raise ArtifactError unless a tensor of `file` has this place, type and shape, and the bytes for these."""
    if file not in headers:
        raise ArtifactError(f"{field}.file", file, "a file of references")
    for tensor in headers[file].tensors.values():
        stored = TYPES.get(tensor.dtype)
        if stored is None or stored.name != dtype or tensor.shape not in shapes:
            continue
        if (tensor.begin, tensor.end) == (begin, begin + math.prod(tensor.shape) * stored.itemsize):
            return
    shape = " or ".join(str(list(shape)) for shape in sorted(shapes))
    raise ArtifactError(field, f"{dtype} {shape} from byte {begin}", f"a tensor of {file}")
