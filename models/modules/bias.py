"""Configurations of pairwise attention biases: terms added to scores by the distance between query and key.

Imports no torch.
Letters: H heads.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

from preblock.models.serialization import Count, Flag, Keys, Positive, Rule, check_fields, config_of

RECIPES = ("exact", "float32_powers", "float32_reciprocals")
"""Recipes of the slopes of ALiBi."""


@dataclass(frozen=True, kw_only=True)
class AlibiConfig:
    """The arguments of `AlibiBias`."""

    kind: ClassVar[str] = "alibi"
    heads: Count
    anchor: Literal["query", "first", "last"] = "query"
    recipe: Annotated[str, Rule(RECIPES.__contains__, ", ".join(RECIPES))] = "exact"
    arithmetic: Literal["float32", "bfloat16"] = "float32"
    divisor: Positive = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError unless every value is allowed."""
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """The arguments of `T5RelativeBias`; `weight` names its table (buckets, H) in a checkpoint."""

    kind: ClassVar[str] = "t5"
    heads: Count
    buckets: Count
    max_distance: Count
    bidirectional: Flag
    weight: Keys = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless the sizes go together."""
        check_fields(self)
        least = 4 if self.bidirectional else 2
        if self.buckets < least or (self.bidirectional and self.buckets % 2):
            kind = "an even number of" if self.bidirectional else "a number of"
            raise ValueError(f"buckets: got {self.buckets}, expected {kind} {least} or more")
        exact = (self.buckets // 2 if self.bidirectional else self.buckets) // 2
        if self.max_distance <= exact:
            raise ValueError(f"max_distance: got {self.max_distance}, expected {exact + 1} or more")


@dataclass(frozen=True, kw_only=True)
class RelativeSinusoidConfig:
    """The arguments of `RelativeSinusoid`."""

    kind: ClassVar[str] = "relative_sinusoid"
    width: Count
    clamp_len: Count | None
    bidirectional: Flag

    def __post_init__(self) -> None:
        """Raise ValueError unless the sizes are allowed."""
        check_fields(self)
        if self.width % 2:
            raise ValueError(f"width: got {self.width}, expected an even width of 2 or more")


BiasConfig = AlibiConfig | T5Config | RelativeSinusoidConfig
KINDS: dict[str, type[BiasConfig]] = {kind.kind: kind for kind in (AlibiConfig, T5Config, RelativeSinusoidConfig)}


def to_document(config: BiasConfig) -> dict[str, Any]:
    """Return `config` as plain values, without the names of tensors in a checkpoint."""
    return {"kind": config.kind, **{name: value for name, value in asdict(config).items() if name != "weight"}}


def from_document(document: dict[str, Any]) -> BiasConfig:
    """Return the config of a document written by `to_document`.

    Raises:
        ValueError: the kind, a field or a count is not allowed.

    """
    return config_of(document, KINDS)
