"""The schema of an artifact: the files of one folder `<repository>/<name>/<version>/`.

`manifest.json` says what the artifact is, `parity.json` how it compares with its PyTorch module on each provider.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, NonNegativeInt, PositiveInt, ValidationError

from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import FileSignature, open_file, read_file, stamp_of

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Of a model, as a regular expression: it is part of paths, URLs and headers."""
GRAPH = "model.onnx"
TOKEN_GRAPH = "token.onnx"
EMBEDDINGS_GRAPH = "embeddings.onnx"
TILES_GRAPH = "tiles.onnx"
POSITIONED_GRAPH = "positioned.onnx"
TOKEN_GRAPHS = (GRAPH, EMBEDDINGS_GRAPH, TOKEN_GRAPH)
BIAS_GRAPH = "bias.onnx"
DATA = "model.onnx.data"
TOKENIZER = "tokenizer.json"
MANIFEST = "manifest.json"
PARITY = "parity.json"
EMBEDDINGS = "embeddings"
TOKEN_EMBEDDINGS = "token_embeddings"
POSITION_EMBEDDINGS = "position_embeddings"
"""An input of the graph that is given its positions."""
SUMMAND = "summand"
"""An output of that graph, where it adds positions last: the vectors that it adds them to."""
IN_TILES = "embeddings in tiles"
"""What the parity report calls the vectors of the graph of tiles."""
POSITIONED = "embeddings at given positions"
"""What it calls those of the graph that is given its positions."""
MOST_BYTES = 4 * 2**20
"""Of a manifest or a parity report; more than ten times what the longest known has."""

DType = Literal["float32", "float16", "bfloat16", "int8", "int4"]
FileName = Annotated[str, Field(pattern=r"^[a-z][a-z.]*$")]


class Schema(BaseModel):
    """A frozen record that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __hash__(self) -> int:
        """Return a number of this very record, so that what follows from it can be remembered without reading it."""
        return id(self)


class Tensor(Schema):
    """An input or output of a graph; a dimension is a number, or a name where it is dynamic."""

    name: str
    dtype: Literal["int64", "float32"]
    shape: tuple[int | str, ...]


class Graph(Schema):
    """What a graph of the artifact takes and gives."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class File(Schema):
    """A file of the artifact."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Source(Schema):
    """Where the front-end came from; "module" is one that was handed over in Python.

    `name` is the preset's or the repository's; `revision` the repository's commit; `config_sha256` identifies
    `config.json` or `frontend.toml` of a checkpoint. Paths of the exporting machine are not recorded.
    """

    kind: Literal["preset", "folder", "hub", "module"]
    name: str | None = None
    revision: str | None = None
    config_sha256: str | None = None


class Resized(Schema):
    """A limit that is not the source's own: what it was, and how a learned table was made to fit."""

    from_max_len: int | None
    method: str | None


class TokenEmbeddings(Schema):
    """The model's own lookup, before positions and norm: what `inputs_embeds` and `prompt_embeds` mean.

    Args:
        output: which output of a graph it is; `embeddings` where the two are the same.
        width: of its vectors.
        consumer_scales: who is handed them scales them itself; None where that is not known.

    """

    output: Literal["embeddings", "token_embeddings"]
    width: PositiveInt
    consumer_scales: bool | None


class Rotary(Schema):
    """Cosines and sines that attention turns its queries and keys by.

    Args:
        cos: name of the output.
        sin: name of the output.
        width: R, the part of a head that is turned; each of the R/2 values stands twice, in halves.
        layout: which columns of a head are a pair: "half" column j and j + R/2, "interleaved" 2j and 2j + 1.
        max_len: the largest legal offset + real tokens for them; None where the model's own limit is the only one.

    """

    cos: str
    sin: str
    width: PositiveInt
    layout: Literal["half", "interleaved"]
    max_len: PositiveInt | None


class Tiles(Schema):
    """Which calls `tiles.onnx` serves on the CPU, in place of the plain graph, which is faster for others.

    Args:
        size: tokens of a tile, where rows are not tiles themselves.
        least: tokens of the smallest call.

    """

    size: PositiveInt = Field(le=2**16)
    least: PositiveInt


class PositionTable(Schema):
    """Where the rows lie that `positioned.onnx` is given on the CPU, in place of the plain graph, for one offset.

    Args:
        begin: of the table in the data file, in bytes.
        rows: of it, float32, as wide as the graph says.
        first: row of position 0; those of others follow it.

    """

    begin: NonNegativeInt
    rows: PositiveInt
    first: NonNegativeInt


class Artifact(Schema):
    """What every artifact is, whatever it takes.

    Args:
        schema_version: of this schema.
        family: the row of the family table that the front-end follows.
        width: D, of an output vector.
        graphs: by file. Those of tokens give vectors of the same bits for the same output.
        front_end: the configuration from which the PyTorch module is built again; None for a module of the user's.
        files: every other file of the artifact, except the parity report.
        source: where the front-end came from.
        versions: of the software that exported it.

    """

    schema_version: Literal[1] = 1
    family: str
    width: PositiveInt
    graphs: dict[FileName, Graph]
    front_end: dict[str, JsonValue] | None
    files: dict[FileName, File]
    source: Source
    versions: dict[str, str]


class StemManifest(Artifact):
    """What an artifact is whose input is no token ids: an image, or a spectrogram.

    Args:
        dtype: of the stored weights.
        input: the only input.
        tokens: vectors of one input; None where its size decides.
        image_size: native height and width; None for no image.
        patch_size: of which height and width are multiples where they are not native; None for no image.

    """

    kind: Literal["stem"] = "stem"
    dtype: Literal["float32"]
    input: Tensor
    tokens: PositiveInt | None
    image_size: PositiveInt | None
    patch_size: PositiveInt | None

    def length(self, shape: tuple[int, ...]) -> int:
        """Return how many vectors an input of `shape` has in each row."""
        if self.tokens is not None or self.patch_size is None:
            return self.tokens or 0
        return 1 + (shape[2] // self.patch_size) * (shape[3] // self.patch_size)


class Manifest(Artifact):
    """What an artifact is whose input is token ids.

    Args:
        dtype: of the stored tables; what is computed from their rows is float32.
        scale: what has a scale of its own in a table of whole numbers; None for other types.
        block: columns of a block, of which each has a scale; None where that is another.
        vocab_size: V; legal ids are 0 to V - 1.
        max_len: the largest legal offset + real tokens; None where nothing limits it.
        indices: further inputs, one integer per token -> how many values are legal, from 0 on; such as segments.
        needed: those of them that must be given; what is left out of the others is 0.
        counts: what advances the position in the graph: every slot, ids other than padding, or the mask.
        padding_id: id of padding; None where the family has none.
        refused_ids: ids whose vectors would depend on other tokens.
        token_embeddings: the model's own lookup; None where it is not known.
        rotary: outputs for the attention of each kind of layer; none for a family without them.
        tiles: which calls the graph of tiles serves; None where there is none.
        positions: what the graph is given that is given its positions; None where there is none.
        resized: how max_len came to differ from the source's; None where it does not.

    """

    kind: Literal["tokens"] = "tokens"
    dtype: DType
    scale: Literal["row", "tensor", "block"] | None = None
    block: PositiveInt | None = None
    vocab_size: PositiveInt
    max_len: PositiveInt | None
    indices: dict[str, PositiveInt]
    needed: tuple[str, ...]
    counts: Literal["slots", "ids", "mask"]
    padding_id: int | None
    refused_ids: tuple[int, ...]
    token_embeddings: TokenEmbeddings | None
    rotary: tuple[Rotary, ...] = ()
    tiles: Tiles | None = None
    positions: PositionTable | None = None
    resized: Resized | None

    @property
    def limit(self) -> int:
        """max_len, or a number that stands for none: a sum of two such still fits into 64 bits."""
        return self.max_len or 2**62

    @cached_property
    def needs_mask(self) -> bool:
        """Whether the vectors depend on `attention_mask`."""
        return any(tensor.name == "attention_mask" for tensor in self.graphs[GRAPH].inputs)

    @cached_property
    def exact_rows(self) -> bool:
        """Whether a vector has the same bits in a call of whatever shape.

        Matrix products depend on the shape; of a user's module nothing is known.
        """
        steps = (self.front_end or {}).get("steps")
        kinds = {step.get("kind") for step in steps if isinstance(step, dict)} if isinstance(steps, list) else set()
        return bool(kinds) and "project" not in kinds

    @cached_property
    def widths(self) -> dict[str, int]:
        """The outputs of tokens, by name, and the width of each."""
        outputs = [tensor for name in TOKEN_GRAPHS if name in self.graphs for tensor in self.graphs[name].outputs]
        widths = {tensor.name: int(tensor.shape[-1]) for tensor in outputs}
        if self.token_embeddings:
            widths[TOKEN_EMBEDDINGS] = self.token_embeddings.width
        return widths

    @property
    def stored_as(self) -> str:
        """The type of the stored tables in words."""
        if self.scale is None:
            return self.dtype
        columns = "" if self.block is None else f" of {self.block} columns"
        return f"{self.dtype} with a scale for each {self.scale}{columns}"

    def rotary_of(self, outputs: Collection[str]) -> list[Rotary]:
        """Return the cosines and sines of which `outputs` has one; without them, rotary families are like others."""
        return [rotary for rotary in self.rotary if rotary.cos in outputs or rotary.sin in outputs]

    def graphs_for(self, outputs: tuple[str, ...]) -> dict[str, list[str]]:
        """Return which graph gives which of `outputs`: one that has all, or for each the one that has the fewest more.

        A graph computes everything that it has, whether or not it is asked for.
        """
        sizes = {name: len(self.graphs[name].outputs) for name in TOKEN_GRAPHS if name in self.graphs}
        has = {name: {tensor.name for tensor in self.graphs[name].outputs} for name in sizes}
        whole = [name for name in sizes if has[name].issuperset(outputs)]
        if whole:
            return {min(whole, key=sizes.__getitem__): list(outputs)}
        chosen: dict[str, list[str]] = {}
        for output in outputs:
            graph = min((name for name in sizes if output in has[name]), key=sizes.__getitem__)
            chosen.setdefault(graph, []).append(output)
        return chosen

    @property
    def plain(self) -> str:
        """The graph of `embeddings` alone, which those of tiles and of given positions stand for."""
        return EMBEDDINGS_GRAPH if EMBEDDINGS_GRAPH in self.graphs else GRAPH

    @property
    def bias(self) -> Tensor | None:
        """What attention adds for the distance between a query and a key; None where the family has nothing such."""
        return self.graphs[BIAS_GRAPH].outputs[0] if BIAS_GRAPH in self.graphs else None


class ParityCase(Schema):
    """One comparison: the arguments, and the largest difference over all output values.

    `max_ulp` counts units in the last place of the largest value of the row that the difference stands in; of cosines
    and sines, of the largest that there is.
    """

    arguments: dict[str, JsonValue]
    max_abs: float
    max_ulp: float


class OutputParity(Schema):
    """The comparison of one output with that of its PyTorch module."""

    allowed_ulp: float
    max_abs: float
    max_ulp: float
    cases: tuple[ParityCase, ...]

    def summary(self) -> str:
        """Return the comparison in one line."""
        found = "bit for bit equal" if self.max_abs == 0 else f"within {self.max_abs:.2g} ({self.max_ulp:.2g} ULP)"
        return f"{len(self.cases)} cases {found}"


class Parity(Schema):
    """The comparison of the graphs on one provider with their PyTorch module, by output.

    `embeddings in tiles` and `embeddings at given positions` are those of `tiles.onnx` and `positioned.onnx`, compared
    with the plain graph: every bit must be equal.
    """

    onnxruntime: str
    torch: str
    outputs: dict[str, OutputParity]

    def summary(self) -> str:
        """Return the comparison in one line."""
        return "; ".join(f"{name}: {parity.summary()}" for name, parity in self.outputs.items())


class StoredTable(Schema):
    """A table that is stored in another type than float32, against what it was in float32.

    Args:
        rows: of the table.
        width: of a row.
        max_abs: largest difference of a value.
        mean_abs: mean difference.
        min_cosine: of the angle between a row and what became of it, where that is worst.
        bytes: that it takes, scales included.
        saved: how many bytes more it took.

    """

    rows: PositiveInt
    width: PositiveInt
    max_abs: float
    mean_abs: float
    min_cosine: float
    bytes: int
    saved: int

    def summary(self) -> str:
        """Return the comparison in one line."""
        return (
            f"{self.rows} x {self.width}, error at most {self.max_abs:.2g}, mean {self.mean_abs:.2g}, "
            f"worst cosine {self.min_cosine:.8f}, {self.bytes:,} bytes, {self.saved:,} saved"
        )


class ParityReport(Schema):
    """One section for each provider, by its onnxruntime name; and the tables that are not stored in float32, by name.

    The graphs are compared with a module of the tables as they are stored, the tables themselves with those before.
    """

    providers: dict[str, Parity]
    storage: dict[str, StoredTable] = {}

    def storage_summary(self) -> str:
        """Return in one line how all tables are stored."""
        tables = self.storage.values()
        return (
            f"{len(tables)} tables, error at most {max(table.max_abs for table in tables):.2g}, "
            f"worst cosine {min(table.min_cosine for table in tables):.8f}, "
            f"{sum(table.bytes for table in tables):,} bytes, {sum(table.saved for table in tables):,} saved"
        )


S = TypeVar("S", bound=BaseModel)


class _Kind(BaseModel):
    kind: Literal["tokens", "stem"] = "tokens"


def read_manifest(folder: Path) -> Manifest | StemManifest:
    """Read the manifest of the artifact in `folder`; raises as `read`."""
    return read_with_identity(folder)[0]


def read_with_identity(folder: Path) -> tuple[Manifest | StemManifest, str]:
    """Return the manifest of the artifact in `folder`, and the artifact's identity; raises as `read`.

    The identity is the SHA-256 of the manifest as JSON without white space and with sorted keys. The manifest holds
    the hashes of all files but the parity report; so artifacts of one identity are the same, whoever exported them.
    """
    file = folder / MANIFEST
    content = read_file(file, MOST_BYTES)
    stem = _parse(_Kind, file, content).kind == "stem"
    manifest = _parse(StemManifest, file, content) if stem else _parse(Manifest, file, content)
    try:
        canonical = json.dumps(json.loads(content), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError) as error:  # numbers and depths that pydantic reads and Python does not
        raise ArtifactError(MANIFEST, str(error), "ordinary JSON") from error
    return manifest, hashlib.sha256(canonical.encode("ascii")).hexdigest()


def read(schema: type[S], file: Path) -> S:
    """Read `file` as `schema`.

    Raises:
        ArtifactError: the file is missing, no regular file or too long, or does not follow the schema.

    """
    return _parse(schema, file, read_file(file, MOST_BYTES))


def write(record: Schema, file: Path) -> None:
    """Write `record` as indented JSON: the same bytes for the same record."""
    file.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")


def sha256(stream: BufferedReader) -> str:
    """Return the SHA-256 of what `stream` holds, in hexadecimal."""
    return hashlib.file_digest(stream, "sha256").hexdigest()


def describe(file: Path, digest: Callable[[BufferedReader], str] = sha256) -> File:
    """Return size and SHA-256 of `file`; `digest` computes the SHA-256 of an open file."""
    with file.open("rb") as stream:
        return File(sha256=digest(stream), bytes=os.fstat(stream.fileno()).st_size)


def check_files(
    folder: Path, manifest: Artifact, digest: Callable[[BufferedReader], str] = sha256
) -> dict[str, FileSignature]:
    """Compare every file of the artifact with its hash, and return the stamps of those that were checked.

    Args:
        folder: of the artifact.
        manifest: that says which files there are.
        digest: returns the SHA-256 of an open file; default: it is computed.

    Raises:
        ArtifactError: a file is missing, differs, or is no regular file of its own; the error names it.

    """
    stamps = {}
    for name, expected in manifest.files.items():
        file = folder / name
        if not os.path.lexists(file):
            raise ArtifactError(name, "no such file", f"a file of {expected.bytes} bytes")
        with open_file(file) as stream:
            status = os.fstat(stream.fileno())
            found = File(sha256=digest(stream), bytes=status.st_size)
        if found != expected:
            raise ArtifactError(
                name,
                f"sha256 {found.sha256[:12]}…, {found.bytes} bytes",
                f"sha256 {expected.sha256[:12]}…, {expected.bytes} bytes",
            )
        stamps[name] = stamp_of(status)
    return stamps


def _parse(schema: type[S], file: Path, content: bytes) -> S:
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{file.name} {where}".rstrip(), first["input"], first["msg"]) from error
