"""Read and write the JSON files of an artifact, and check its files against their hashes."""

import hashlib
import json
import os
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from preblock.service.artifacts.manifest import Artifact, File, Manifest, Schema, StemManifest
from preblock.service.artifacts.names import MANIFEST
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import FileSignature, open_file, read_file, signature_of
from preblock.service.core.schema_errors import explain

MAX_JSON_BYTES = 4 * 2**20
"""Limit of a manifest or a parity report: over ten times the largest known file."""

S = TypeVar("S", bound=BaseModel)


def read_manifest(folder: Path) -> Manifest | StemManifest:
    """Read the manifest of the artifact in `folder`; raise ArtifactError as `read` does."""
    return read_with_identity(folder)[0]


def read_with_identity(folder: Path) -> tuple[Manifest | StemManifest, str]:
    """Return the manifest of the artifact in `folder`, and the artifact's identity; raise ArtifactError as `read` does.

    The identity is the SHA-256 of the manifest as JSON without white space and with sorted keys. The manifest holds
    the hashes of all files except the parity report. Artifacts with the same identity are therefore equal.
    """
    file = folder / MANIFEST
    content = read_file(file, MAX_JSON_BYTES)
    try:
        document = json.loads(content)
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        message = f"{MANIFEST} is no JSON file: {error}"
        raise ArtifactError(MANIFEST, str(error), "ordinary JSON", message=message) from error
    stem = isinstance(document, dict) and document.get("kind") == "stem"
    manifest = _parse(StemManifest, file, content) if stem else _parse(Manifest, file, content)
    return manifest, hashlib.sha256(canonical.encode("ascii")).hexdigest()


def read(schema: type[S], file: Path) -> S:
    """Read `file` as `schema`.

    Raises:
        ArtifactError: the file is missing, irregular or too large, or violates the schema.

    """
    return _parse(schema, file, read_file(file, MAX_JSON_BYTES))


def write(record: Schema, file: Path) -> None:
    """Write `record` as indented JSON. The same record gives the same bytes."""
    file.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")


def sha256(stream: BufferedReader) -> str:
    """Return the SHA-256 of the content of `stream`, in hexadecimal."""
    return hashlib.file_digest(stream, "sha256").hexdigest()


def describe(file: Path, digest: Callable[[BufferedReader], str] = sha256) -> File:
    """Return size and SHA-256 of `file`; `digest` computes the SHA-256 of an open file."""
    with file.open("rb") as stream:
        return File(sha256=digest(stream), bytes=os.fstat(stream.fileno()).st_size)


def check_files(
    folder: Path, manifest: Artifact, digest: Callable[[BufferedReader], str] = sha256
) -> dict[str, FileSignature]:
    """Compare every file of the artifact with its hash, and return the signature of each file.

    Args:
        folder: of the artifact.
        manifest: names the files and their hashes.
        digest: returns the SHA-256 of an open file; by default computes it.

    Raises:
        ArtifactError: a file is missing, irregular, or differs from its hash; the error names the file.

    """
    signatures = {}
    for name, expected in manifest.files.items():
        file = folder / name
        if not os.path.lexists(file):
            raise ArtifactError(name, "no such file", f"a file of {expected.bytes} bytes", message=f"{name} is missing")
        with open_file(file) as stream:
            status = os.fstat(stream.fileno())
            found = File(sha256=digest(stream), bytes=status.st_size)
        if found != expected:
            got, allowed = (f"sha256 {of.sha256[:12]}…, {of.bytes} bytes" for of in (found, expected))
            raise ArtifactError(name, got, allowed)
        signatures[name] = signature_of(status)
    return signatures


def _parse(schema: type[S], file: Path, content: bytes) -> S:
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{file.name} {where}".rstrip(), *explain(first)) from error
