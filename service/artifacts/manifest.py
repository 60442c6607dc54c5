"""Schema of `manifest.json`."""

import math
from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, PositiveInt, field_validator

from preblock.service.artifacts.names import (
    BIAS_GRAPH,
    EMBEDDINGS_GRAPH,
    GRAPH,
    NGRAM_OUTPUTS,
    NGRAM_ROW_IDS,
    NGRAM_SCALES,
    NGRAMS,
    OUTPUT_GRAPHS,
    STORED,
    STORED_NGRAMS,
    TOKEN_EMBEDDINGS,
)

DType = Literal["float32", "float16", "bfloat16", "int8", "int4"]
FileName = Annotated[str, Field(pattern=r"^[a-z][a-z.]*$")]
MAX_NUMBER = 2**62
"""Largest size or place in a manifest: the sum of two still fits into 64 bits."""
Count = Annotated[int, Field(gt=0, le=MAX_NUMBER)]
Index = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
MAX_HISTORY = 15
"""Most ids before a token that its n-grams reach back to. Each token of a batch is computed with a copy of them."""


class Schema(BaseModel):
    """Frozen record; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __hash__(self) -> int:
        """Return the identity of the record: a cache key without a pass over the fields."""
        return id(self)


class Tensor(Schema):
    """An input or output of a graph; a dimension is a number, or the name of a dynamic dimension."""

    name: str
    dtype: Literal["int64", "float32", "float16"]
    shape: tuple[int | str, ...]


class Graph(Schema):
    """Inputs and outputs of a graph."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class File(Schema):
    """A file of the artifact."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Source(Schema):
    """The source of the front-end; "module": a PyTorch module in Python.

    `name` is the preset's or the repository's; `revision` the repository's commit; `config_sha256` identifies
    `config.json` or `frontend.toml` of a checkpoint. `discovered_with` names the library, with its version, in whose
    model class the front-end was discovered; None for a row of the family table. `options` are the
    arguments of the export other than the defaults. Without any, `files` holds the SHA-256 of each file of a folder
    that the export read, by its name there. Paths of the exporting machine are not recorded.
    """

    kind: Literal["preset", "folder", "hub", "module"]
    name: str | None = None
    revision: str | None = None
    config_sha256: str | None = None
    discovered_with: str | None = Field(default=None, exclude_if=lambda library: library is None)
    files: dict[str, str] = Field(default={}, exclude_if=lambda files: not files)
    options: dict[str, JsonValue] = Field(default={}, exclude_if=lambda options: not options)

    @property
    def has_random_weights(self) -> bool:
        """Whether the weights come from a seed and no training: only the shapes are those of a published model."""
        return self.kind == "preset"


class Resized(Schema):
    """A changed position limit: the source's own, and the method that resized a learned table."""

    from_max_len: int | None
    method: str | None


class Consumer(Schema):
    """The vectors that a consumer of `inputs_embeds` or `prompt_embeds` expects.

    Args:
        engine: name of the consumer.
        versions: versions in the form of a requirement; a commit where the source was read; "" for every one.
        scale: "applied" for vectors with the embedding scale, "none" for vectors that the consumer scales itself.
        output: output with these vectors; None if the artifact has none.
        source: releases, a pull request, or a file of the commit, as read.

    """

    engine: str
    versions: str
    scale: Literal["applied", "none"]
    output: Literal["embeddings", "token_embeddings", "unscaled_token_embeddings"] | None
    source: str


class TokenEmbeddings(Schema):
    """The model's own lookup, before positions and norm: the meaning of `inputs_embeds` and `prompt_embeds`.

    Args:
        output: name in the graph; `embeddings` if both outputs are equal.
        width: of the vectors.
        embedding_scale: factor of the model on its token vectors; 1 for none.
        scaled: whether `token_embeddings` include that factor.
        consumers: the expectation of each known consumer; empty without an embedding scale, because then all of them
            take `token_embeddings`.
        beside: further arguments of the model's `forward`, and the output or input of the artifact for each. Vectors
            without them give wrong results; empty for a model that takes `inputs_embeds` alone.

    """

    output: Literal["embeddings", "token_embeddings"]
    width: Count
    embedding_scale: FiniteFloat
    scaled: bool
    consumers: tuple[Consumer, ...] = ()
    beside: dict[str, str] = Field(default={}, exclude_if=lambda beside: not beside)

    @property
    def arguments(self) -> str:
        """The further arguments as text, such as `per_layer_inputs=per_layer_token_inputs`; "" for none."""
        return ", ".join(f"{argument}={output}" for argument, output in self.beside.items())

    @property
    def needs_ids(self) -> bool:
        """Whether the blocks take the token ids too: transformers refuses `input_ids` beside `inputs_embeds`."""
        return "input_ids" in self.beside

    @property
    def prompt_outputs(self) -> tuple[str, ...]:
        """The outputs for `prompt_embeds` of vLLM, the newest version's first; empty if it needs more, or is unknown.

        A custom front-end states its own model in place of vLLM.
        """
        return () if self.beside else self.outputs_for("vllm") or self.outputs_for("model")

    @property
    def use(self) -> str:
        """The use of the vectors, in words, with all inputs that belong to it."""
        if self.needs_ids:
            return "the output of the model's embedding module, with input_ids: it fails for inputs_embeds alone"
        fields = "inputs_embeds or prompt_embeds" if self.prompt_outputs else "inputs_embeds"
        return f"{fields} of a model{f', with {self.arguments}' if self.beside else ''}"

    def outputs_for(self, engine: str) -> tuple[str, ...]:
        """Return the outputs that versions of `engine` take, the newest version's first; empty if unknown."""
        if self.embedding_scale == 1:
            return ("token_embeddings",)
        found = [consumer.output for consumer in self.consumers if consumer.engine == engine]
        return tuple(dict.fromkeys(output for output in found if output is not None))


class History(Schema):
    """The ids before a row that an output depends on: the input `context` of its graph.

    Args:
        tokens: their number for each row, at most `MAX_HISTORY`.
        reset_id: id in place of those before the first token of a sequence; the end of an earlier sequence.

    """

    tokens: int = Field(gt=0, le=MAX_HISTORY)
    reset_id: Index


class TableScales(Schema):
    """The scales of the rows of a `TablePart`: a stored number times the scale of its block is the value.

    The scales lie row by row; the last block of a row or a column may be smaller.

    Args:
        file: as in `TablePart`.
        begin: of the first scale in the file, in bytes.
        dtype: of a scale.
        block_rows: rows of a block; all rows of the part for one scale of a tensor.
        block_columns: columns of a block; the width of a row for one scale of a row or of a tensor.

    """

    file: str
    begin: Index
    dtype: Literal["float32", "float16", "bfloat16"]
    block_rows: Count
    block_columns: Count


class TablePart(Schema):
    """Consecutive rows of a table, one after another in a file.

    Args:
        file: `model.onnx.data`, or the absolute path of a file in `references`.
        begin: of the first row in the file, in bytes.
        rows: their number.
        scales: of the rows; None for a type without scales.

    """

    file: str
    begin: Index
    rows: Count
    scales: TableScales | None = Field(default=None, exclude_if=lambda scales: scales is None)


class NgramTable(Schema):
    """The place of the rows that `ngram_row_ids` count, for one layer.

    Args:
        rows: of all parts.
        width: numbers in a row.
        dtype: of the stored numbers.
        parts: in the order of their rows.

    """

    rows: Count
    width: Count
    dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn"]
    parts: tuple[TablePart, ...]


class NgramHash(Schema):
    """The numbers of `ngram.ids.onnx`, for a runtime of row ids without graphs.

    Args:
        factors: for each layer, of the token and of the ids before it, the latest first.
        rows: for each layer, of the heads of each number of ids, from two ids on.

    """

    factors: tuple[tuple[PositiveInt, ...], ...]
    rows: tuple[tuple[tuple[Count, ...], ...], ...]


class Reference(Schema):
    """A safetensors file outside the artifact, with rows of its tables.

    Args:
        bytes: size of the file.
        mtime_ns: time of its last change, in nanoseconds since 1970.
        header_sha256: of its header: the length in eight bytes, and the JSON.
        sha256: of the whole file, as its hub published it; None if unknown.

    """

    bytes: Count
    mtime_ns: int
    header_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    sha256: str | None = Field(pattern=r"^[0-9a-f]{64}$")


class SoftPrompt(Schema):
    """Rows of a soft prompt in the table of all soft prompts: the number of the first one, and their count."""

    first: Index
    rows: Count


class SentencePooling(Schema):
    """The sentence embedding of a static embedding model, as its library computes it.

    Args:
        pooling: default pooling of the OpenAI API.
        normalize: whether a pooled vector is divided by its Euclidean norm.
        ignored_ids: ids left out of every pooled vector, such as the unknown token.

    """

    pooling: Literal["mean"] = "mean"
    normalize: bool
    ignored_ids: tuple[Index, ...]


class Rotary(Schema):
    """Cosines and sines for the rotation of queries and keys in attention.

    Args:
        cos: name of the output.
        sin: name of the output; the same in the fused form.
        form: columns of the outputs: "full" for the R/2 values twice over, in halves; "half" for them once; "fused" for
            R/2 cosines and then R/2 sines in one output.
        dtype: type of the outputs in the graph; the service widens float16.
        width: R, the rotated part of a head.
        layout: the pairs of columns of a head: "half" column j and j + R/2, "interleaved" 2j and 2j + 1.
        axes: axis of each of the R/2 pairs, for positions of three axes: 0 for time, 1 for height, 2 for width. Empty
            for one axis. The graph has one position for all axes.
        max_len: the largest legal offset + real tokens; None if only the limit of the model applies.

    """

    cos: str
    sin: str
    form: Literal["full", "half", "fused"] = Field(default="full", exclude_if=lambda form: form == "full")
    dtype: Literal["float32", "float16"] = Field(default="float32", exclude_if=lambda dtype: dtype == "float32")
    width: Count
    layout: Literal["half", "interleaved"]
    axes: tuple[Literal[0, 1, 2], ...] = Field(default=(), exclude_if=lambda axes: not axes)
    max_len: Count | None


class PositionTable(Schema):
    """A table of position rows, float32, for the fused kernel.

    Args:
        begin: of the table in the data file, in bytes.
        rows: of the table.
        first: row of position 0; the next positions follow.

    """

    begin: Index
    rows: Count
    first: Index


class KernelTokens(Schema):
    """A table of token rows, float32, for the fused kernel.

    Args:
        begin: of the table in the data file, in bytes.
        rows: of the table.
        width: of a row.
        scale: factor of each row.

    """

    begin: Index
    rows: Count
    width: Count
    scale: FiniteFloat


class Kernel(Schema):
    """Tables of the fused kernel. It computes `embeddings` on the CPU: token row * scale + position row.

    Args:
        tokens: the token rows.
        positions: the position rows, as wide as the token rows.

    """

    tokens: KernelTokens
    positions: PositionTable


class Artifact(Schema):
    """Fields of every artifact.

    Args:
        schema_version: of this schema.
        family: row of the family table.
        width: D, of an output vector.
        graphs: by file. All token graphs compute the same bits for the same output.
        front_end: configuration to rebuild the PyTorch module; None for a custom module.
        files: every other file of the artifact, except the parity report.
        source: origin of the front-end.
        versions: of the exporting software.

    """

    schema_version: Literal[2] = 2
    family: str
    width: Count
    graphs: dict[FileName, Graph]
    front_end: dict[str, JsonValue] | None
    files: dict[FileName, File]
    source: Source
    versions: dict[str, str]

    @field_validator("front_end")
    @classmethod
    def _check_steps(cls, front_end: dict[str, Any] | None) -> dict[str, Any] | None:
        """Check the fields of steps that the service reads."""
        steps = [] if front_end is None else front_end.get("steps", [])
        for step in steps if isinstance(steps, list) else [steps]:
            kind = step.get("kind") if isinstance(step, dict) else None
            if not isinstance(kind, str) or (kind == "scale" and type(step.get("by")) not in (int, float)):
                raise ValueError("steps with a kind each, and a number as the factor of a scale")
        return front_end


class StemManifest(Artifact):
    """Artifact with an image or a spectrogram as input.

    Args:
        dtype: of the stored weights.
        input: the only input.
        tokens: number of vectors of one input; None if the image size determines it.
        image_size: native height and width; None for a spectrogram.
        patch_size: divisor of other heights and widths; None for a spectrogram.

    """

    kind: Literal["stem"] = "stem"
    dtype: Literal["float32"]
    input: Tensor
    tokens: Count | None
    image_size: Count | None
    patch_size: Count | None

    def length(self, shape: tuple[int, ...]) -> int:
        """Return the number of vectors in each row for an input of `shape`."""
        if self.tokens is not None or self.patch_size is None:
            return self.tokens or 0
        return 1 + (shape[2] // self.patch_size) * (shape[3] // self.patch_size)


class Manifest(Artifact):
    """Artifact with token ids as input.

    Args:
        dtype: of the stored tables; the values computed from their rows are float32.
        scale: part of an integer table with one scale: a row, the tensor or a block; None for floating tables.
        block: number of columns of a block; None for another `scale`.
        vocab_size: V; legal ids are 0 to V - 1.
        max_len: the largest legal offset + real tokens; None without a limit.
        indices: further inputs with one integer per token, such as segments -> number of legal values from 0 on.
        needed: required inputs of `indices`; a missing value of the others is 0.
        counts: position source in the graph: every slot, ids other than padding, or the mask.
        padding_id: id of padding; None in a family without padding.
        first_row: row of position 0 in the position table of the model. Some families, such as RoBERTa, take rows as
            `position_ids` in transformers; Preblock's are indices, from 0 on.
        refused_ids: unsupported ids, because their vectors would depend on other tokens.
        token_embeddings: the model's own lookup; None if unknown.
        rotary: outputs for the attention of each kind of layer; empty in a family without rotary attention.
        kernel: tables of the fused kernel; None if the vectors are no sum of two rows.
        sentence: pooling of a static embedding model; None for a model without sentence embeddings.
        history: ids before a row that `ngram_embeddings` depend on; None without this output.
        ngram_tables: place of the rows of each layer with n-gram embeddings; empty if the graph alone has them.
        ngram_hash: of the last ids into these rows, required with `ngram_tables`; None without `ngram_row_ids`.
        references: files outside the artifact with rows of `ngram_tables`, by absolute path.
        resized: change of the position limit of the source; None if unchanged.
        soft_prompts: by name, for parts of rows.

    """

    kind: Literal["tokens"] = "tokens"
    dtype: DType
    scale: Literal["row", "tensor", "block"] | None = None
    block: Count | None = None
    vocab_size: Count
    max_len: Count | None
    indices: dict[str, Count]
    needed: tuple[str, ...]
    counts: Literal["slots", "ids", "mask"]
    padding_id: int | None
    first_row: Index = Field(default=0, exclude_if=lambda row: row == 0)
    refused_ids: tuple[int, ...]
    token_embeddings: TokenEmbeddings | None
    rotary: tuple[Rotary, ...] = ()
    kernel: Kernel | None = None
    resized: Resized | None
    history: History | None = Field(default=None, exclude_if=lambda value: value is None)
    ngram_tables: tuple[NgramTable, ...] = Field(default=(), exclude_if=lambda tables: not tables)
    ngram_hash: NgramHash | None = Field(default=None, exclude_if=lambda value: value is None)
    references: dict[str, Reference] = Field(default={}, exclude_if=lambda references: not references)
    sentence: SentencePooling | None = Field(default=None, exclude_if=lambda value: value is None)
    soft_prompts: dict[str, SoftPrompt] = Field(default={}, exclude_if=lambda prompts: not prompts)

    @property
    def limit(self) -> int:
        """max_len, or `MAX_NUMBER` without a limit."""
        return self.max_len or MAX_NUMBER

    @cached_property
    def needs_mask(self) -> bool:
        """Whether the vectors depend on `attention_mask`."""
        return any(tensor.name == "attention_mask" for tensor in self.graphs[GRAPH].inputs)

    @cached_property
    def exact_rows(self) -> bool:
        """Whether a vector has the same bits in a CPU's call of any shape.

        Matrix products depend on the shape. For a custom module the answer is unknown, so False.
        """
        kinds = self._step_kinds
        return bool(kinds) and "project" not in kinds and not (self.front_end or {}).get("per_layer")

    @cached_property
    def exact_rows_on_gpu(self) -> bool:
        """Whether a vector has the same bits in a GPU's call of any shape.

        onnxruntime sums the values of a norm in several parts there, and in fewer if a call has more rows.
        """
        return self.exact_rows and not self._step_kinds & {"norm", "rms_norm"}

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of the front-end; none for a custom module."""
        front_end: dict[str, Any] = self.front_end or {}
        steps: list[dict[str, Any]] = front_end.get("steps", [])
        return steps

    @cached_property
    def _step_kinds(self) -> set[str]:
        """Kinds of the steps; none for a custom module."""
        return {step["kind"] for step in self.steps}

    @cached_property
    def lookup_use(self) -> str:
        """The use of the model's own lookup, in words; "" without one."""
        return "" if self.token_embeddings is None else self.token_embeddings.use

    @cached_property
    def widths(self) -> dict[str, int]:
        """Values of a token in each token output, by name."""
        return {name: math.prod(shape) for name, shape in self.shapes.items()}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the values of a token in each token output, by name: one width, or layers and width."""
        outputs = [tensor for name in OUTPUT_GRAPHS if name in self.graphs for tensor in self.graphs[name].outputs]
        shapes = {tensor.name: tuple(map(int, tensor.shape[2:])) for tensor in outputs}
        if self.ngram_tables and NGRAM_ROW_IDS in shapes:
            table, (layers, heads) = self.ngram_tables[0], shapes[NGRAM_ROW_IDS]
            shapes[NGRAMS] = (layers, heads * table.width)
            if (scales := table.parts[0].scales) is not None:
                shapes[NGRAM_SCALES] = (layers, heads * -(-table.width // scales.block_columns))
        if self.token_embeddings:
            shapes[TOKEN_EMBEDDINGS] = (self.token_embeddings.width,)
        return shapes

    @property
    def stored_as(self) -> str:
        """The storage of the tables in words: dtype and scale."""
        if self.scale is None:
            return self.dtype
        columns = "" if self.block is None else f" of {self.block} columns"
        return f"{self.dtype} with a scale for each {self.scale}{columns}"

    def rotary_of(self, outputs: Collection[str]) -> list[Rotary]:
        """Return the rotary entries with an output in `outputs`."""
        return [rotary for rotary in self.rotary if rotary.cos in outputs or rotary.sin in outputs]

    def needs_history(self, outputs: Collection[str]) -> bool:
        """Return whether one of `outputs` depends on the ids before a token."""
        return self.history is not None and not set(NGRAM_OUTPUTS).isdisjoint(outputs)

    def dtype_of(self, output: str, dtype: str) -> str:
        """Return the type of an output in a response, by the type of the request."""
        if output == NGRAM_ROW_IDS:
            return "int64"
        if output == NGRAM_SCALES:
            return "float32"
        stored = dtype == STORED and output in (NGRAMS, STORED_NGRAMS) and self.ngram_tables
        return self.ngram_tables[0].dtype if stored else dtype

    def graphs_for(self, outputs: tuple[str, ...]) -> dict[str, list[str]]:
        """Return graphs and the outputs to take from each: one graph for all `outputs`, else the smallest for each.

        A graph always computes all its outputs.
        """
        sizes = {name: len(self.graphs[name].outputs) for name in OUTPUT_GRAPHS if name in self.graphs}
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
        """The graph with the fewest outputs beside `embeddings`."""
        return EMBEDDINGS_GRAPH if EMBEDDINGS_GRAPH in self.graphs else GRAPH

    @property
    def bias(self) -> Tensor | None:
        """The attention bias for distances between queries and keys; None in a family without it."""
        return self.graphs[BIAS_GRAPH].outputs[0] if BIAS_GRAPH in self.graphs else None
