"""Schema of `manifest.json`, and the file names of an artifact, `<repository>/<name>/<version>/`."""

import math
from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt

from preblock.service.artifacts.records import (
    File,
    Graph,
    History,
    Kernel,
    NgramHash,
    NgramTable,
    Reference,
    Resized,
    Rotary,
    Schema,
    SentencePooling,
    SoftPrompt,
    Source,
    Tensor,
    TokenEmbeddings,
)

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Regular expression of a model name, used in paths, URLs and headers."""
GRAPH = "model.onnx"
TOKEN_GRAPH = "token.onnx"
EMBEDDINGS_GRAPH = "embeddings.onnx"
UNSCALED_GRAPH = "unscaled.onnx"
LAYER_TOKENS_GRAPH = "layer.tokens.onnx"
LAYER_INPUTS_GRAPH = "layer.inputs.onnx"
NGRAMS_GRAPH = "ngrams.onnx"
TOKEN_GRAPHS = (
    *(GRAPH, EMBEDDINGS_GRAPH, TOKEN_GRAPH, UNSCALED_GRAPH),
    *(LAYER_TOKENS_GRAPH, LAYER_INPUTS_GRAPH, NGRAMS_GRAPH),
)
NGRAM_IDS_GRAPH = "ngram.ids.onnx"
"""The row ids of n-gram embeddings, from the same inputs as `ngrams.onnx`."""
NGRAM_ROWS_GRAPH = "ngram.rows.onnx"
"""The n-gram embeddings of given row ids, for runtimes without 64-bit integers."""
OUTPUT_GRAPHS = (*TOKEN_GRAPHS, NGRAM_IDS_GRAPH)
"""Graphs with outputs for requests."""
TABLE_GRAPHS = (*OUTPUT_GRAPHS, NGRAM_ROWS_GRAPH)
"""Graphs with tables or constants in the data file, as the export first writes them."""
BIAS_GRAPH = "bias.onnx"
DATA = "model.onnx.data"
TOKENIZER = "tokenizer.json"
SOFT_PROMPTS = "soft.prompts"
"""Vectors of all soft prompts, little-endian float32."""
MANIFEST = "manifest.json"
PARITY = "parity.json"
EMBEDDINGS = "embeddings"
TOKEN_EMBEDDINGS = "token_embeddings"
UNSCALED = "unscaled_token_embeddings"
"""Rows of the token table, if `token_embeddings` include an embedding scale."""
PER_LAYER_TOKENS = "per_layer_token_inputs"
"""Token part of the inputs of all layers, (B, L, layers, width)."""
PER_LAYER = "per_layer_inputs"
"""Combined inputs of all layers, (B, L, layers * width)."""
NGRAMS = "ngram_embeddings"
"""N-gram embeddings of some layers, (B, L, layers, width)."""
NGRAM_ROW_IDS = "ngram_row_ids"
"""Rows of the tables of these layers, int64 (B, L, layers, heads)."""
NGRAM_SCALES = "ngram_scales"
"""Scales of these rows, if their stored type has some, float32 (B, L, layers, heads * scales of a row)."""
STORED_NGRAMS = "stored ngram_embeddings"
"""Name of the stored rows in a run; a response names them `ngram_embeddings`."""
NGRAM_OUTPUTS = (NGRAMS, NGRAM_ROW_IDS, NGRAM_SCALES)
STORED = "stored"
"""Response type of `ngram_embeddings`: the type of their tables."""
CONTEXT = "context"
"""The input of `ngrams.onnx` and `ngram.ids.onnx` with the ids before each row."""
LOOKUPS = (TOKEN_EMBEDDINGS, UNSCALED)
POSITION_EMBEDDINGS = "position_embeddings"
"""The rows added for positions, in answers about tables."""
NGRAMS_OF_ROWS = "ngram_embeddings of given rows"
"""Name of the embeddings of `ngram.rows.onnx` in the parity report."""

DType = Literal["float32", "float16", "bfloat16", "int8", "int4"]
FileName = Annotated[str, Field(pattern=r"^[a-z][a-z.]*$")]


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

    schema_version: Literal[1] = 1
    family: str
    width: PositiveInt
    graphs: dict[FileName, Graph]
    front_end: dict[str, JsonValue] | None
    files: dict[FileName, File]
    source: Source
    versions: dict[str, str]


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
    tokens: PositiveInt | None
    image_size: PositiveInt | None
    patch_size: PositiveInt | None

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
        ngram_hash: of the last ids into these rows; None without `ngram_row_ids`.
        references: files outside the artifact with rows of `ngram_tables`, by absolute path.
        resized: change of the position limit of the source; None if unchanged.
        soft_prompts: by name, for parts of rows.

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
    first_row: NonNegativeInt = Field(default=0, exclude_if=lambda row: row == 0)
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
        """max_len, or 2^62 without a limit: the sum of two limits still fits into 64 bits."""
        return self.max_len or 2**62

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

    @cached_property
    def _step_kinds(self) -> set[Any]:
        """Kinds of the steps; none for a custom module."""
        steps = (self.front_end or {}).get("steps")
        return {step.get("kind") for step in steps if isinstance(step, dict)} if isinstance(steps, list) else set()

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
