"""The schema of an artifact: the files of one folder `<repository>/<name>/<version>/`.

`manifest.json` says what the artifact is, `parity.json` how it compares with its PyTorch module on each provider.
"""

import hashlib
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from incipit.service.errors import ArtifactError

GRAPH = "model.onnx"
DATA = "model.onnx.data"
TOKENIZER = "tokenizer.json"
MANIFEST = "manifest.json"
PARITY = "parity.json"


class Schema(BaseModel):
    """A frozen record that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Tensor(Schema):
    """An input or output of the graph; a dimension is a number, or a name where it is dynamic."""

    name: str
    dtype: Literal["int64", "float32"]
    shape: tuple[int | str, ...]


class File(Schema):
    """A file of the artifact."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Source(Schema):
    """Where the front-end came from; "module" is one that was handed over in Python.

    `name` is the preset's or the repository's; `revision` the repository's commit; `config_sha256` identifies
    `config.json` of a checkpoint. Paths of the exporting machine are not recorded.
    """

    kind: Literal["preset", "folder", "hub", "module"]
    name: str | None = None
    revision: str | None = None
    config_sha256: str | None = None


class Manifest(Schema):
    """What an artifact is.

    Args:
        schema_version: of this schema.
        family: the row of the family table that the front-end follows.
        vocab_size: V; legal ids are 0 to V - 1.
        width: D, of an output vector.
        max_len: the largest legal offset + real tokens.
        segments: S; legal segments are 0 to S - 1; 0 where the family has none.
        dtype: of the stored tables.
        inputs: of the graph.
        outputs: of the graph.
        front_end: the configuration from which the PyTorch module is built again.
        files: every other file of the artifact, except the parity report.
        source: where the front-end came from.
        versions: of the software that exported it.

    """

    schema_version: Literal[1] = 1
    family: str
    vocab_size: PositiveInt
    width: PositiveInt
    max_len: PositiveInt
    segments: int = Field(ge=0)
    dtype: Literal["float32"]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    front_end: dict[str, str | int | float | None]
    files: dict[str, File]
    source: Source
    versions: dict[str, str]


class ParityCase(Schema):
    """One comparison: the arguments, and the largest difference over all output values.

    `max_ulp` counts units in the last place of the largest value of the row that the difference stands in.
    """

    batch: int
    length: int
    offset: tuple[int, ...]
    segments: bool
    max_abs: float
    max_ulp: float


class Parity(Schema):
    """The comparison of the graph on one provider with its PyTorch module."""

    onnxruntime: str
    torch: str
    allowed_ulp: float
    max_abs: float
    max_ulp: float
    cases: tuple[ParityCase, ...]

    def summary(self) -> str:
        """Return the comparison in one line."""
        found = "bit for bit equal" if self.max_abs == 0 else f"within {self.max_abs:.2g} ({self.max_ulp:.2g} ULP)"
        return f"{len(self.cases)} cases {found}"


class ParityReport(Schema):
    """One section for each provider, by its onnxruntime name."""

    providers: dict[str, Parity]


S = TypeVar("S", bound=Schema)


def read(schema: type[S], file: Path) -> S:
    """Read `file` as `schema`.

    Raises:
        ArtifactError: the file is missing, or does not follow the schema.

    """
    try:
        return schema.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ArtifactError(file.name, error.strerror or "an unreadable file", "a readable file") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{file.name} {where}".rstrip(), first["input"], first["msg"]) from error


def write(record: Schema, file: Path) -> None:
    """Write `record` as indented JSON: the same bytes for the same record."""
    file.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")


def describe(file: Path) -> File:
    """Return size and SHA-256 of `file`."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return File(sha256=digest, bytes=file.stat().st_size)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file of the artifact with its hash.

    Raises:
        ArtifactError: a file is missing or differs; the error names it.

    """
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise ArtifactError(name, "no such file", f"a file of {expected.bytes} bytes")
        found = describe(file)
        if found != expected:
            raise ArtifactError(
                name,
                f"sha256 {found.sha256[:12]}…, {found.bytes} bytes",
                f"sha256 {expected.sha256[:12]}…, {expected.bytes} bytes",
            )
