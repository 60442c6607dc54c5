"""The description of a front-end: its steps and their sizes, as plain values.

Letters: L length, D model width, M maximum length.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any, ClassVar, Literal

from preblock.models.modules.bias import KINDS, BiasConfig
from preblock.models.modules.ngram_config import CONTEXT, NGRAMS, NgramConfig
from preblock.models.modules.per_layer_config import INPUTS, TOKEN_INPUTS, PerLayerConfig
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.models.modules.signature import Signature
from preblock.models.serialization import (
    MAX_WHOLE,
    Count,
    Flag,
    Rule,
    Share,
    Text,
    check_fields,
    config_of,
    to_document,
    with_tuples,
)
from preblock.models.steps import (
    Levels,
    Mask,
    Norm,
    Positions,
    Project,
    RmsNorm,
    Scale,
    Step,
    Tokens,
    Weights,
    from_document,
    indexed,
    names_of,
)

OWN_NAMES = (
    *("input_ids", "offset", "attention_mask", "position_ids", "position_rows", "embeddings", "token_embeddings"),
    *("unscaled_token_embeddings", TOKEN_INPUTS, INPUTS, CONTEXT, NGRAMS),
    *("output", "dtype", "encoding", "text", "truncate", "pooling", "parts", "placeholder", "lengths", "shape"),
    *("return_tokens", "special_tokens", "special_tokens_in_text"),
)
"""Reserved names: an input of indices cannot have them, since graphs and requests use them for something else."""

MAX_TABLE_ROWS = 2**24
"""Most positions of a table, more than any published. A larger one would fill the memory."""


def check_size(name: str, size: Any) -> int:
    """Return a size, also one of NumPy, as an int; raise ValueError if it is no whole number from 1 on."""
    if isinstance(size, bool) or not isinstance(size, Integral) or int(size) < 1:
        raise ValueError(f"{name}: got {size!r}, expected a whole number from 1 on")
    if int(size) > MAX_WHOLE:
        raise ValueError(f"{name}: got {size}, expected at most {MAX_WHOLE}")
    return int(size)


@dataclass(frozen=True, kw_only=True)
class FrontEndConfig:
    """The steps of a front-end, their sizes, and its limits.

    Args:
        family: its row of the family table, or another name.
        steps: in order; `Tokens` first.
        max_len: M, the largest legal offset + real tokens; None without a limit.
        padding_idx: id of padding, with a row outside training; None for none.
        refused_ids: unsupported ids: their vectors would depend on other tokens.
        lookup: number of steps before `inputs_embeds`: the model's own lookup; default 1.
        consumer_scales: the model applies the embedding scale to `inputs_embeds` itself; None for unknown.
        arithmetic: type to round to after every step, which is computed in float32; default float32, no further
            rounding. A library rounds so when it loads a checkpoint in a narrower type.
        dropout: probability after the last step, in training only; default 0.1.
        bias: attention bias by distance; None for none.
        rotary: pairs of cosines and sines for attention, as further outputs; default none.
        no_rotary: the reason why a rotary model has no such outputs; default None.
        per_layer: inputs of all layers, as further outputs; default none.
        ngrams: n-gram embeddings of some layers, as a further output; default none.
        streams: vectors of a token that block 0 takes. The model projects the others from the front-end's. Default 1.
        copies: equal copies of each vector that block 0 takes, for hyper-connections; default 1.

    Raises:
        ValueError: the fields do not describe a front-end; the message names the field.

    """

    absent: ClassVar[tuple[str, ...]] = ("per_layer", "ngrams", "streams", "copies")

    family: Text
    steps: tuple[Step, ...]
    max_len: Count | None
    padding_idx: Annotated[int, Rule(lambda value: type(value) is int, "an id")] | None = None
    refused_ids: tuple[int, ...] = ()
    lookup: int = 1
    consumer_scales: Flag | None = None
    arithmetic: Literal["float32", "float16", "bfloat16"] = "float32"
    dropout: Share = 0.1
    bias: BiasConfig | None = None
    rotary: tuple[RotaryOutput, ...] = ()
    no_rotary: str | None = None
    per_layer: PerLayerConfig | None = None
    ngrams: NgramConfig | None = None
    streams: Count = 1
    copies: Count = 1

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        kinds = [step.kind for step in self.steps]
        if kinds[:1] != ["tokens"]:
            raise ValueError(f"steps: got {kinds}, expected a list that begins with 'tokens'")
        for kind in ("tokens", "positions", "mask"):
            if kinds.count(kind) > 1:
                raise ValueError(f"steps: got {kinds.count(kind)} of kind {kind!r}, expected at most one")
        self._check_sizes()
        if type(self.lookup) is not int or not 1 <= self.lookup <= len(self.steps):
            raise ValueError(f"lookup: got {self.lookup!r}, expected 1 to {len(self.steps)}")
        if self.lookup < len(self.steps) and not _only_look_up(self.steps[: self.lookup]):
            kinds = [step.kind for step in self.steps[: self.lookup]]
            raise ValueError(f"lookup: got the steps {', '.join(kinds)}, expected tokens, scale, weights, or all steps")
        self._check_indices()
        if self.positions:
            self._check_positions(self.positions)
        for token in self.refused_ids:
            if type(token) is not int or token not in range(self.tokens.rows):
                raise ValueError(f"refused_ids: got {token!r}, expected ids from 0 to {self.tokens.rows - 1}")
        if self.counts == "ids" and self.padding_idx is None:
            raise ValueError("padding_idx: got none, expected an id, since positions skip it")
        if self.rotary and self.counts != "slots":
            raise ValueError(f"rotary: got positions that count {self.counts!r}, expected 'slots'")
        if self.per_layer and self.per_layer.rows > self.tokens.rows:
            raise ValueError(f"per_layer.rows: got {self.per_layer.rows}, expected 1 to {self.tokens.rows}")
        if self.ngrams and self.counts != "slots":
            raise ValueError(f"ngrams: got positions that count {self.counts!r}, expected 'slots'")
        if self.ngrams and not 0 <= self.ngrams.reset_id < self.tokens.rows:
            raise ValueError(f"ngrams.reset_id: got {self.ngrams.reset_id}, expected 0 to {self.tokens.rows - 1}")
        names = [output.name for output in self.rotary]
        if len(set(names)) < len(names):
            raise ValueError(f"rotary: got the names {names}, expected each once")

    def _check_sizes(self) -> None:
        sizes: dict[str, Any] = {"tokens.rows": self.tokens.rows, "tokens.width": self.tokens.width}
        sizes |= {f"{part.input}.rows": part.rows for part in indexed(self.steps) if part.table == "own"}
        named = zip(names_of(self.steps), self.steps, strict=True)
        sizes |= {f"{name}.width": step.width for name, step in named if isinstance(step, Project)}
        for name, size in sizes.items():
            check_size(name, size)

    def _check_indices(self) -> None:
        for step, width in zip(self.steps[1:], self.widths, strict=False):
            parts = indexed((step,))
            if isinstance(step, Levels) and not parts:
                raise ValueError("levels: got none, expected one or more")
            for part in parts:
                if part.table == "tokens" and width != self.tokens.width:
                    raise ValueError(f"{step.kind}.table: got 'tokens', expected at a width of {self.tokens.width}")
        reserved = (*OWN_NAMES, *(name for output in self.rotary for name in output.names))
        for name, count in Counter(part.input for part in indexed(self.steps)).items():
            if count > 1:
                raise ValueError(f"input: got {name!r} {count} times, expected once")
            if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in reserved:
                raise ValueError(
                    f"input: got {name!r}, expected small letters, digits and '_', the first a letter, "
                    f"other than {', '.join(reserved)}"
                )

    def _check_positions(self, positions: Positions) -> None:
        positions.check()
        rows = positions.cells if positions.table == "exact" and positions.grid else positions.rows
        if rows > MAX_TABLE_ROWS:
            raise ValueError(f"rows: got {rows}, expected at most {MAX_TABLE_ROWS}, in a table of positions")
        if self.max_len is None or self.max_len > positions.limit:
            raise ValueError(f"max_len: got {self.max_len}, expected 1 to {positions.limit}, as the positions allow")

    def to_document(self) -> dict[str, Any]:
        """Return the config as plain values, without the names of tensors in a checkpoint."""
        return to_document(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "FrontEndConfig":
        """Return the config of a document from `to_document`.

        Raises:
            ValueError: a step, a rotary output or a bias is not known.

        """
        readers: dict[str, Callable[[Any], Any]] = {
            "steps": lambda steps: tuple(map(from_document, steps)),
            "rotary": lambda outputs: tuple(map(RotaryOutput.from_document, outputs)),
            "refused_ids": tuple,
            "bias": lambda bias: config_of(bias, KINDS),
            "per_layer": lambda values: PerLayerConfig(**values),
            "ngrams": lambda values: NgramConfig(**with_tuples(values)),
        }
        given = {name: document[name] for name in readers if document.get(name) is not None}
        return cls(**{**document, **{name: readers[name](value) for name, value in given.items()}})

    @property
    def tokens(self) -> Tokens:
        """The first step."""
        first = self.steps[0]
        assert isinstance(first, Tokens)
        return first

    @property
    def positions(self) -> Positions | None:
        """The position step; None without one."""
        return next((step for step in self.steps if isinstance(step, Positions)), None)

    @property
    def indices(self) -> dict[str, int]:
        """Name of each extra input -> the number of its legal indices, in the order of their steps."""
        return {part.input: self.tokens.rows if part.table == "tokens" else part.rows for part in indexed(self.steps)}

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the required extra inputs."""
        return tuple(part.input for part in indexed(self.steps) if part.needed)

    @property
    def counts(self) -> Literal["slots", "ids", "mask"]:
        """Source of positions: every slot, non-padding ids, or the mask."""
        return self.positions.counts if self.positions else "slots"

    @property
    def needs_mask(self) -> bool:
        """Whether `attention_mask` is an input."""
        return self.counts == "mask" or any(isinstance(step, Mask) for step in self.steps)

    @property
    def exact(self) -> bool:
        """Whether every bit is determined: a vector is made of gathers, sums and products of two numbers alone."""
        return not any(isinstance(step, Norm | RmsNorm | Project) for step in self.steps)

    @property
    def only_looks_up(self) -> bool:
        """Whether a vector depends only on its id: it is a row of the token table, perhaps scaled or weighted."""
        return _only_look_up(self.steps)

    @property
    def embedding_scale(self) -> float:
        """Factor of the token vectors, the second step; 1 without one."""
        return self.steps[1].by if len(self.steps) > 1 and isinstance(self.steps[1], Scale) else 1.0

    @property
    def scaled_lookup(self) -> bool:
        """Whether the model's own lookup includes an embedding scale."""
        return self.lookup > 1 and self.embedding_scale != 1

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of `x` after each step; the last is D."""
        widths = [self.tokens.width]
        for step in self.steps[1:]:
            widths.append(step.width if isinstance(step, Project) else widths[-1])
        return tuple(widths)

    @property
    def signature(self) -> Signature:
        """The inputs, sizes and promises of the graph of a front-end."""
        same = self.lookup == len(self.steps)
        return Signature(
            family=self.family,
            vocab_size=self.tokens.rows,
            width=self.widths[-1],
            max_len=self.max_len,
            rows=(self.positions.cells or self.positions.rows) if self.positions else 0,
            exact=self.exact,
            indices=self.indices,
            needed=self.needed,
            counts=self.counts,
            needs_mask=self.needs_mask,
            padding_idx=self.padding_idx,
            refused_ids=self.refused_ids,
            lookup_width=None if same else self.widths[self.lookup - 1],
            unscaled_width=self.tokens.width if self.scaled_lookup else None,
            per_layer=(self.per_layer.layers, self.per_layer.width) if self.per_layer else None,
            ngrams=(len(self.ngrams.layers), self.ngrams.width) if self.ngrams and not self.ngrams.referenced else None,
            row_ids=(len(self.ngrams.layers), self.ngrams.heads_of_layer) if self.ngrams else None,
            history=self.ngrams.history if self.ngrams else 0,
            reset_id=self.ngrams.reset_id if self.ngrams else None,
            rotary={name: output.columns for output in self.rotary for name in output.names},
            rotary_len=min((output.config.length for output in self.rotary if output.config.length), default=None),
        )


def _only_look_up(steps: tuple[Step, ...]) -> bool:
    """Return whether `steps` need token ids alone, and every bit of their vectors is determined."""
    return all(isinstance(step, Tokens | Scale | Weights) for step in steps)
