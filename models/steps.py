"""The steps that front-ends are composed of. A front-end is a list of them, in order; so is a row of the family table.

Each step changes `x` (B, L, width). Sizes of 0 are filled in from a checkpoint's tensors; `weight` and `bias` name the
tensors there, the current spelling first.

Letters: B batch, L length, V vocabulary, M maximum length.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

Keys = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """x = table[input_ids]. Always the first step."""

    kind: ClassVar[str] = "tokens"
    rows: int = 0
    width: int = 0
    weight: Keys = ()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """x = x * by; where `cast`, the factor is rounded to the type of the arithmetic first."""

    kind: ClassVar[str] = "scale"
    by: float
    cast: bool = False


@dataclass(frozen=True, kw_only=True)
class Segments:
    """x = x + table[token_type_ids]."""

    kind: ClassVar[str] = "segments"
    rows: int = 0
    weight: Keys = ()


@dataclass(frozen=True, kw_only=True)
class Positions:
    """x = x + table[row], where the row follows from what `counts`.

    Args:
        table: "learned", or the name of a sinusoid recipe, whose table has `rows` and is derived, not stored.
        counts: "slots": every slot advances the position, and row = first + position index;
            "ids": slots that hold another id than padding do; "mask": slots where `attention_mask` is 1 do. In either,
            other slots take the row before `first`.
        first: row of the first real token.
        zero_row: row of a sinusoid table that is zero; None for none.

    """

    kind: ClassVar[str] = "positions"
    rows: int = 0
    table: str = "learned"
    counts: Literal["slots", "ids", "mask"] = "slots"
    first: int = 0
    zero_row: int | None = None
    weight: Keys = ()


@dataclass(frozen=True, kw_only=True)
class Norm:
    """x = LayerNorm(x), with or without a bias."""

    kind: ClassVar[str] = "norm"
    eps: float
    weight: Keys = ()
    bias: Keys | None = ()


@dataclass(frozen=True, kw_only=True)
class Project:
    """x = x @ weight.T, + bias if there is one."""

    kind: ClassVar[str] = "project"
    width: int = 0
    weight: Keys = ()
    bias: Keys | None = ()


@dataclass(frozen=True, kw_only=True)
class Mask:
    """x = x * attention_mask: padding becomes zero."""

    kind: ClassVar[str] = "mask"


Step = Tokens | Scale | Segments | Positions | Norm | Project | Mask
KINDS: dict[str, type[Step]] = {step.kind: step for step in (Tokens, Scale, Segments, Positions, Norm, Project, Mask)}


def to_document(step: Step) -> dict[str, Any]:
    """Return a step as plain values, without the names of tensors in a checkpoint."""
    values = {name: value for name, value in asdict(step).items() if name != "weight"}
    if isinstance(values.get("bias"), tuple):
        values["bias"] = []
    return {"kind": step.kind, **values}


def from_document(document: dict[str, Any]) -> Step:
    """Return the step that `to_document` wrote.

    Raises:
        ValueError: the kind or a field is not known.

    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed {', '.join(KINDS)}")
    for name, kinds in {"rows": int, "width": int, "first": int, "by": float | int, "eps": float | int}.items():
        if name in values and (not isinstance(values[name], kinds) or isinstance(values[name], bool)):
            raise ValueError(f"{kind}.{name}: got {values[name]!r}, allowed a number")
    try:
        return KINDS[kind](**values)
    except TypeError as error:
        raise ValueError(f"{kind}: {error}") from error
