"""The records that a manifest is made of."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt


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


class KernelTokens(Schema):
    """A table of token rows, float32, that the fused kernel reads.

    Args:
        begin: of the table in the data file, in bytes.
        rows: of the table.
        width: of a row.
        scale: factor of each row.

    """

    begin: NonNegativeInt
    rows: PositiveInt
    width: PositiveInt
    scale: FiniteFloat


class Kernel(Schema):
    """Tables of the fused kernel, which computes `embeddings` on the CPU: token row * scale + position row.

    Args:
        tokens: the token rows.
        positions: the position rows, as wide as the token rows.

    """

    tokens: KernelTokens
    positions: PositionTable
