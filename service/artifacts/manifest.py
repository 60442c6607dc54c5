"""The schema of `manifest.json`, and the names of the files of an artifact, `<repository>/<name>/<version>/`."""

from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, PositiveInt, model_validator

from preblock.service.artifacts.records import (
    File,
    Graph,
    Kernel,
    PositionTable,
    Resized,
    Rotary,
    Schema,
    Source,
    Tensor,
    TokenEmbeddings,
)

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Of a model, as a regular expression: it is part of paths, URLs and headers."""
GRAPH = "model.onnx"
TOKEN_GRAPH = "token.onnx"
EMBEDDINGS_GRAPH = "embeddings.onnx"
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
"""The position input of `positioned.onnx`."""
POSITIONED = "embeddings at given positions"
"""Name of the vectors of `positioned.onnx` in the parity report."""

DType = Literal["float32", "float16", "bfloat16", "int8", "int4"]
FileName = Annotated[str, Field(pattern=r"^[a-z][a-z.]*$")]


class Artifact(Schema):
    """Fields of every artifact.

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
    """An artifact that takes an image or a spectrogram.

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
    """An artifact that takes token ids.

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
        positions: what the graph is given that is given its positions; None where there is none.
        kernel: tables of the fused kernel; None where the vectors are more than a sum of two rows.
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
    positions: PositionTable | None = None
    kernel: Kernel | None = None
    resized: Resized | None

    @model_validator(mode="before")
    @classmethod
    def _drop_tiles(cls, content: Any) -> Any:
        """Leave out `tiles.onnx`, a second graph of the same vectors: earlier exports wrote it, and nothing runs it."""
        if isinstance(content, dict) and "tiles" in content:
            content = {name: value for name, value in content.items() if name != "tiles"}
            for name in ("graphs", "files"):
                if isinstance(content.get(name), dict):
                    content[name] = {file: value for file, value in content[name].items() if file != "tiles.onnx"}
        return content

    @property
    def limit(self) -> int:
        """max_len, or a number in place of none: a sum of two still fits into 64 bits."""
        return self.max_len or 2**62

    @cached_property
    def needs_mask(self) -> bool:
        """Whether the vectors depend on `attention_mask`."""
        return any(tensor.name == "attention_mask" for tensor in self.graphs[GRAPH].inputs)

    @cached_property
    def exact_rows(self) -> bool:
        """Whether a vector has the same bits in a call of any shape.

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
        """Return the rotary angles if `outputs` has any of them; without them, a rotary family is like others."""
        return [rotary for rotary in self.rotary if rotary.cos in outputs or rotary.sin in outputs]

    def graphs_for(self, outputs: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the graph of each of `outputs`: one graph for all, or for each the graph with the fewest others.

        A graph always computes all its outputs.
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
        """The graph of `embeddings` alone; `positioned.onnx` may replace it."""
        return EMBEDDINGS_GRAPH if EMBEDDINGS_GRAPH in self.graphs else GRAPH

    @property
    def bias(self) -> Tensor | None:
        """The attention bias for the distance between a query and a key; None in a family without it."""
        return self.graphs[BIAS_GRAPH].outputs[0] if BIAS_GRAPH in self.graphs else None
