"""The steps of front-ends. A front-end is an ordered list of steps; so is a row of the family table.

Each step changes `x` (B, L, width). Sizes of 0 are filled in from a checkpoint's tensors; `weight`, `columns` and
`bias` name the tensors there, the current spelling first.

Letters: B batch, L length, V vocabulary, M maximum length, H rows and W columns of a grid.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from preblock.models.serialization import (
    Epsilon,
    Finite,
    Flag,
    Keys,
    Rule,
    Text,
    Whole,
    check_fields,
    config_of,
    with_tuples,
)
from preblock.models.sinusoid_tables import POSITIONS, RECIPES


def _is_grid(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


Grid = Annotated[tuple[int, int], Rule(_is_grid, "two numbers of 1 or more, rows and columns")]


class _Checked:
    """Base of a step: its fields are checked when it is made."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise ValueError unless the fields follow the rules in their annotations."""
        check_fields(self, f"{self.kind}.")


@dataclass(frozen=True, kw_only=True)
class Tokens(_Checked):
    """x = table[input_ids]. Always the first step."""

    kind: ClassVar[str] = "tokens"
    rows: Whole = 0
    width: Whole = 0
    weight: Keys = ()


@dataclass(frozen=True, kw_only=True)
class Scale(_Checked):
    """x = x * by; with `cast`, the factor is rounded to the type of the arithmetic first."""

    kind: ClassVar[str] = "scale"
    by: Finite
    cast: Flag = False


@dataclass(frozen=True, kw_only=True)
class Weights(_Checked):
    """x = x * table[input_ids], one factor per token id: the importance of a token in a static embedding model."""

    kind: ClassVar[str] = "weights"
    rows: Whole = 0
    weight: Keys = ()


@dataclass(frozen=True, kw_only=True)
class Segments(_Checked):
    """x = x + table[index] * by, with a separate input for the index of each token.

    Args:
        rows: rows of the table; an index is 0 to rows - 1.
        input: name of the input.
        table: "own", or "tokens" for the table of the tokens.
        by: factor of the row, rounded separately like a scale; default 1.
        needed: whether the input is required, because the model has no default; otherwise an omitted index is 0.

    """

    kind: ClassVar[str] = "segments"
    rows: Whole = 0
    input: Text = "token_type_ids"
    table: Literal["own", "tokens"] = "own"
    by: Finite = 1.0
    needed: Flag = False
    weight: Keys = ()


@dataclass(frozen=True, kw_only=True)
class Levels(_Checked):
    """x = x + (sum of the vectors of all levels, in their order): hierarchical positions.

    Each level has a separate input, as segments have: paragraph, sentence, word; or year, month, day, hour.
    """

    kind: ClassVar[str] = "levels"
    levels: Annotated[tuple[Segments, ...], Rule(lambda levels: isinstance(levels, tuple), "a list of tables")]


@dataclass(frozen=True, kw_only=True)
class Positions(_Checked):
    """x = x + table[row]; `counts` determines the row.

    Args:
        table: "learned"; "exact" for sinusoids; "hybrid" for learned rows and, from their end on, sinusoids;
            "factorised" for a learned table of the grid's rows and one of its columns, added; or the name of a
            sinusoid recipe: a derived table of `rows`, not stored.
        counts: "slots": every slot advances the position, and row = first + position index;
            "ids": only slots with ids other than padding do; "mask": only slots with `attention_mask` 1 do. For
            both, other slots take the row before `first`.
        first: row of the first real token.
        zero_row: row of zeros in the table of a recipe; default none.
        grid: (H, W): the positions are the cells of a grid, row by row. Exact sinusoids of row and column are then
            concatenated.
        columns: name of the factorised table of columns; `weight` names the table of rows.

    """

    kind: ClassVar[str] = "positions"
    rows: Whole = 0
    table: str = "learned"
    counts: Literal["slots", "ids", "mask"] = "slots"
    first: Whole = 0
    zero_row: Whole | None = None
    grid: Grid | None = None
    weight: Keys = ()
    columns: Keys = ()

    @property
    def cells(self) -> int:
        """Number of cells of the grid; 0 without a grid."""
        return self.grid[0] * self.grid[1] if self.grid else 0

    @property
    def limit(self) -> int:
        """The largest max_len: the rows of a table, or the range in which computed sinusoids are exact."""
        computed = self.table == "hybrid" or not self.rows
        return self.cells or (POSITIONS if computed else self.rows) - self.first

    def check(self) -> None:
        """Raise ValueError unless the fields, sizes among them, go together."""
        tables = ("learned", "exact", "hybrid", "factorised", *RECIPES)
        if self.table not in tables:
            raise ValueError(f"table: got {self.table!r}, expected {', '.join(tables)}")
        lowest = 0 if self.counts == "slots" else 1  # padding takes the row before the first
        if self.first < lowest:
            raise ValueError(f"first: got {self.first}, expected {lowest} or more with counts {self.counts!r}")
        if (self.grid or self.table == "hybrid") and (self.counts, self.first) != ("slots", 0):
            raise ValueError(
                f"counts and first: got {self.counts!r} and {self.first}, expected 'slots' and 0 for a grid and for a "
                "hybrid table"
            )
        if self.zero_row is not None and self.table not in RECIPES:
            raise ValueError(f"zero_row: got {self.zero_row}, expected none for a table {self.table!r}")
        if self.table in ("learned", "hybrid") and self.rows < 1:
            raise ValueError(f"rows: got {self.rows}, expected 1 or more for a table {self.table!r}")
        if self.grid is None:
            if self.table == "factorised":
                raise ValueError("grid: got none, expected rows and columns for a table 'factorised'")
            return
        if self.table not in ("learned", "exact", "factorised"):
            raise ValueError(f"grid: got {self.grid}, expected none for a table {self.table!r}")
        if self.rows != self.cells and (self.rows or self.table == "learned"):
            raise ValueError(f"rows: got {self.rows}, expected {self.cells}, the cells of the grid")


@dataclass(frozen=True, kw_only=True)
class Norm(_Checked):
    """x = LayerNorm(x), with or without a bias."""

    kind: ClassVar[str] = "norm"
    eps: Epsilon
    weight: Keys = ()
    bias: Keys | None = ()


@dataclass(frozen=True, kw_only=True)
class RmsNorm(_Checked):
    """x = x / sqrt(mean(x²) + eps), * weight if the step has one."""

    kind: ClassVar[str] = "rms_norm"
    eps: Epsilon
    weight: Keys | None = ()


@dataclass(frozen=True, kw_only=True)
class Project(_Checked):
    """x = x @ weight.T, + bias if the step has one."""

    kind: ClassVar[str] = "project"
    width: Whole = 0
    weight: Keys = ()
    bias: Keys | None = ()


@dataclass(frozen=True, kw_only=True)
class Mask(_Checked):
    """x = x * attention_mask: padding becomes zero."""

    kind: ClassVar[str] = "mask"


Step = Tokens | Scale | Weights | Segments | Levels | Positions | Norm | RmsNorm | Project | Mask


class Parameter(NamedTuple):
    """A trained tensor of a step: its names in a checkpoint, and its shape."""

    keys: Keys
    shape: tuple[int, ...]


def parameters(step: Step, width: int = 0) -> dict[str, Parameter]:
    """Return the parameters of a step for vectors of `width`, by their names in its module."""
    found: dict[str, tuple[Keys | None, tuple[int, ...]]] = {}
    match step:
        case Tokens():
            found = {"weight": (step.weight, (step.rows, step.width))}
        case Weights():
            found = {"weight": (step.weight, (step.rows, 1))}
        case Levels():
            own = {place: level for place, level in enumerate(step.levels) if level.table == "own"}
            found = {f"{place}.weight": (level.weight, (level.rows, width)) for place, level in own.items()}
        case Positions(table="factorised"):
            rows, columns = step.grid or (0, 0)
            found = {"rows.weight": (step.weight, (rows, width)), "columns.weight": (step.columns, (columns, width))}
        case Segments(table="own") | Positions():
            found = {"weight": (step.weight, (step.rows, width))}
        case Norm():
            found = {"weight": (step.weight, (width,)), "bias": (step.bias, (width,))}
        case RmsNorm():
            found = {"weight": (step.weight, (width,))}
        case Project():
            found = {"weight": (step.weight, (step.width, width)), "bias": (step.bias, (step.width,))}
    return {name: Parameter(keys, shape) for name, (keys, shape) in found.items() if keys is not None}


def names_of(steps: tuple[Step, ...]) -> list[str]:
    """Name each step after its kind, with a number if a kind is repeated: norm, norm2."""
    names: list[str] = []
    for step in steps:
        count = sum(name.rstrip("0123456789") == step.kind for name in names)
        names.append(f"{step.kind}{count + 1}" if count else step.kind)
    return names


def indexed(steps: tuple[Step, ...]) -> list[Segments]:
    """Return the parts with an index of their own for each token, in order: segments and levels."""
    return [
        part
        for step in steps
        if isinstance(step, Segments | Levels)
        for part in (step.levels if isinstance(step, Levels) else [step])
    ]


KINDS: dict[str, type[Step]] = {step.kind: step for step in get_args(Step)}


def from_document(document: Mapping[str, Any]) -> Step:
    """Return the step of a document written by `to_document`.

    Raises:
        ValueError: the kind or a field is not known.

    """
    values = with_tuples(document)
    if isinstance(values.get("levels"), tuple):
        values["levels"] = tuple(map(_level, values["levels"]))
    return config_of(values, KINDS)


def _level(document: Any) -> Segments:
    level = from_document({"kind": "segments", **document}) if isinstance(document, Mapping) else None
    if not isinstance(level, Segments):
        raise ValueError(f"levels: got {document!r}, expected tables with the fields of segments")
    return level
