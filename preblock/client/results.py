"""The results of a client. Letters: B rows, L tokens of a row, T tokens of all rows, D width of a vector."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Int64 = NDArray[np.int64]
Vectors = NDArray[Any]

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "float8_e4m3fn": 1}
"""Size of a value of each dtype."""
GRAPHS_WITHOUT_OUTPUTS = ("bias.onnx", "ngram.rows.onnx")
"""Graphs of the attention bias, and of `ngram_embeddings` in another form."""


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The vectors of some rows of tokens.

    Args:
        model: name of the model.
        version: its version.
        vectors: (B, L, D) if all rows have one length, else (T, D), the rows one after another; (B, D) if pooled.
        lengths: int64 (B,), tokens of each row.
        next_offset: int64 (B,), the offset to continue each row with.
        use_as: use of the output, such as "input of block 0".
        next_context: int64 (B, H), the ids before the next token of each row, to continue with; None for outputs
            without history.
        position_delta: int64 (B,), next position - `next_offset`; None without positions of three axes.
        truncated: int64 (B,), tokens cut of each row; None without `truncate`.
        input_ids: the ids of each row of text, with `return_tokens`.
        spans: for each row of text int64 (L, 2), the first character of each token and the one after its last, with
            `return_tokens`.
        pooled: whether `vectors` has one vector for each row.

    """

    model: str
    version: int
    vectors: Vectors
    lengths: Int64
    next_offset: Int64
    use_as: str
    next_context: Int64 | None = None
    position_delta: Int64 | None = None
    truncated: Int64 | None = None
    input_ids: list[Int64] | None = None
    spans: list[Int64] | None = None
    pooled: bool = False

    def rows(self) -> list[Vectors]:
        """Return the vectors of each row, (L, D), without a copy; (D,) if they are pooled."""
        if self.pooled or (self.lengths == self.lengths[0]).all():
            return list(self.vectors)
        return np.split(self.vectors, np.cumsum(self.lengths)[:-1])

    def to_torch(self) -> "torch.Tensor":
        """Return `vectors` as a tensor of the same memory."""
        import torch

        if self.vectors.dtype.name == "bfloat16":  # torch does not take these types from numpy
            return torch.from_numpy(self.vectors.view(np.int16)).view(torch.bfloat16)
        if self.vectors.dtype.name == "float8_e4m3fn":
            return torch.from_numpy(self.vectors.view(np.uint8)).view(torch.float8_e4m3fn)
        return torch.from_numpy(self.vectors)


@dataclass(frozen=True)
class Model:
    """A served model.

    Args:
        name: name of the model.
        version: the described version.
        versions: all served versions.
        identity: SHA-256 of the manifest with the hashes of all files.
        provider: the onnxruntime provider in use.
        max_len: the largest legal offset + real tokens; None without a limit.
        max_tokens: most tokens of one request.
        manifest: manifest of the artifact; its fields in docs/artifact.md.
        parity: parity report of the artifact.

    """

    name: str
    version: int
    versions: list[int]
    identity: str
    provider: str
    max_len: int | None
    max_tokens: int
    manifest: dict[str, Any]
    parity: dict[str, Any]

    @property
    def kind(self) -> Literal["tokens", "stem"]:
        """The input: token ids, or an image or spectrogram."""
        kind: Literal["tokens", "stem"] = self.manifest["kind"]
        return kind

    @property
    def family(self) -> str:
        """The family of the front-end, such as "gpt2"."""
        return str(self.manifest["family"])

    @property
    def width(self) -> int:
        """D, the width of the vectors `embeddings`."""
        return int(self.manifest["width"])

    @property
    def outputs(self) -> dict[str, int]:
        """The number of values of a token in each output of `embed` and `decode`, by name; empty for a stem."""
        if self.kind == "stem":
            return {}
        graphs = [graph for file, graph in self.manifest["graphs"].items() if file not in GRAPHS_WITHOUT_OUTPUTS]
        widths = {output["name"]: math.prod(output["shape"][2:]) for graph in graphs for output in graph["outputs"]}
        if tables := self.manifest.get("ngram_tables"):
            rows, width = widths["ngram_row_ids"], tables[0]["width"]
            widths["ngram_embeddings"] = rows * width
            if scales := tables[0]["parts"][0].get("scales"):
                widths["ngram_scales"] = rows * -(-width // scales["block_columns"])
        lookup = self.manifest["token_embeddings"]
        return widths if lookup is None else widths | {"token_embeddings": int(lookup["width"])}

    @property
    def dtype(self) -> str:
        """The stored type of the tables; vectors are computed in float32."""
        return str(self.manifest["dtype"])

    @property
    def vocab_size(self) -> int | None:
        """V: legal ids are 0 to V - 1; None for a stem."""
        size: int | None = self.manifest.get("vocab_size")
        return size

    @property
    def indices(self) -> dict[str, int]:
        """The further inputs of each token, such as `token_type_ids`: name -> number of legal values from 0 on."""
        return dict(self.manifest.get("indices", {}))

    @property
    def needed(self) -> tuple[str, ...]:
        """The required inputs of `indices`; a missing value of the others is 0."""
        return tuple(self.manifest.get("needed", ()))

    @property
    def history(self) -> int:
        """Number of ids before a row that `ngram_embeddings` depend on, the length of a context; 0 without them."""
        return int((self.manifest.get("history") or {}).get("tokens", 0))

    @property
    def padding_id(self) -> int | None:
        """The id of padding; None in a family without padding."""
        padding: int | None = self.manifest.get("padding_id")
        return padding

    @property
    def consumers(self) -> list[dict[str, Any]]:
        """Consumers of `inputs_embeds`, each with its `versions`, `scale` and `output`.

        The list is empty without an embedding scale: then all consumers take `token_embeddings`.
        """
        return list((self.manifest.get("token_embeddings") or {}).get("consumers", ()))

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model takes text."""
        return "tokenizer.json" in self.manifest["files"]


def array_of(data: bytearray | memoryview, dtype: str, shape: list[int]) -> Vectors:
    """Return little-endian bytes as a writable array of the same memory."""
    if dtype in ("bfloat16", "float8_e4m3fn"):
        try:
            import ml_dtypes
        except ModuleNotFoundError as error:
            message = f"{dtype} in NumPy needs the package ml_dtypes: pip install ml_dtypes"
            raise ModuleNotFoundError(message, name=error.name) from error
        return np.frombuffer(data, getattr(ml_dtypes, dtype)).reshape(shape)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)
