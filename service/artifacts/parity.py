"""Schema of `parity.json`: the comparison of an artifact with its reference on each provider."""

from pydantic import Field, JsonValue, PositiveInt

from preblock.service.artifacts.manifest import Schema
from preblock.service.core.errors import shorten


class ParityCase(Schema):
    """One comparison: the arguments, and the largest difference over all output values.

    `max_ulp` counts units in the last place of the largest value of the row. For cosines and sines, it counts units of
    the largest value of all rows.
    """

    arguments: dict[str, JsonValue]
    max_abs: float
    max_ulp: float


class OutputParity(Schema):
    """The comparison of one output with the output of its reference."""

    allowed_ulp: float
    max_abs: float
    max_ulp: float
    cases: tuple[ParityCase, ...]

    def summary(self) -> str:
        """Return the comparison in one line."""
        return f"{len(self.cases)} cases {self.difference}"

    @property
    def difference(self) -> str:
        """The largest difference of a value in words."""
        return "bit for bit equal" if self.max_abs == 0 else f"within {self.max_abs:.2g} ({self.max_ulp:.2g} ULP)"


class Parity(Schema):
    """The comparison of the graphs on one provider with their reference, by output.

    Args:
        onnxruntime: its version.
        reference: the library that computed the expected values, and its version: "torch 2.13.0" or "numpy 2.3.1".
        outputs: comparison of each output.

    """

    onnxruntime: str
    reference: str
    outputs: dict[str, OutputParity]

    def summary(self) -> str:
        """Return the comparison in one line."""
        return "; ".join(f"{name}: {parity.summary()}" for name, parity in self.outputs.items())


class StoredTable(Schema):
    """Comparison of a table in another dtype than float32 with its float32 values.

    Args:
        rows: of the table.
        width: of a row.
        max_abs: largest absolute difference of a value.
        mean_abs: mean difference.
        min_cosine: smallest cosine between a row and its stored form.
        bytes: of the stored table, scales included.
        saved: saved bytes, compared with the source.

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


class TokenizerConflict(Schema):
    """A difference between `tokenizer.json` and the other files of its folder, or the tokenizer of transformers 5.

    Args:
        setting: the setting or the file in conflict.
        message: both readings in words.
        text: an example.
        ids: of the text by `tokenizer.json`, as the artifact has them.
        other_ids: of the text by the other reading; empty if it gives none.
        ordinary: whether transformers 5 gives other ids for text without special tokens.

    """

    setting: str
    message: str
    text: str
    ids: tuple[int, ...]
    other_ids: tuple[int, ...]
    ordinary: bool

    def summary(self) -> str:
        """Return the conflict in one line."""
        return f"{self.setting}: {self.details()}"

    def details(self) -> str:
        """Return both readings, and both lists of ids, at most the first 24."""
        if not self.ids and not self.other_ids:
            return self.message
        ids, other = (" ".join(map(str, found[:24])) or "no id" for found in (self.ids, self.other_ids))
        return f"{self.message}; the text {shorten(repr(self.text))} has ids {ids} here, and {other} there"


class ParityReport(Schema):
    """One section for each provider by its onnxruntime name, and the tables in other dtypes than float32 by name.

    The graphs are compared with a reference over the stored tables, the stored tables with the float32 ones.
    `discovery` compares the module of a discovered front-end with the model class of the library, in float32.
    `references` has the SHA-256 of each file outside the artifact, by path, after a verification. `tokenizer` has the
    conflicts of the tokenizer with its folder, as the export found them.
    """

    providers: dict[str, Parity]
    storage: dict[str, StoredTable] = Field(default={})
    discovery: OutputParity | None = Field(default=None, exclude_if=lambda parity: parity is None)
    references: dict[str, str] = Field(default={}, exclude_if=lambda hashes: not hashes)
    tokenizer: tuple[TokenizerConflict, ...] = Field(default=(), exclude_if=lambda conflicts: not conflicts)

    def storage_summary(self) -> str:
        """Return the comparison of all stored tables in one line."""
        tables = self.storage.values()
        return (
            f"{len(tables)} tables, error at most {max(table.max_abs for table in tables):.2g}, "
            f"worst cosine {min(table.min_cosine for table in tables):.8f}, "
            f"{sum(table.bytes for table in tables):,} bytes, {sum(table.saved for table in tables):,} saved"
        )
