"""The one general front-end: from token ids to the vectors that enter block 0.

Letters: B batch, L length, D model width, V vocabulary, M maximum length, H rows and W columns of a grid.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from preblock.models.modules import bias as biases
from preblock.models.modules.bias import Bias, BiasConfig, build_bias
from preblock.models.modules.grid import FactorisedCells, SinusoidalGridPositions
from preblock.models.modules.hybrid import HybridPositions
from preblock.models.modules.positions import (
    FixedPositions,
    LearnedPositions,
    SinusoidalPositions,
    check_position_ids,
    positions_of,
)
from preblock.models.modules.rotary import RotaryOutput, RotaryPositions
from preblock.models.modules.signature import Signature
from preblock.models.modules.sinusoids import RECIPES
from preblock.models.modules.tokens import TokenTable
from preblock.models.steps import (
    Levels,
    Mask,
    Norm,
    Positions,
    Project,
    Scale,
    Segments,
    Step,
    Tokens,
    from_document,
    indexed,
    to_document,
)

OWN_NAMES = (
    *("input_ids", "offset", "attention_mask", "position_ids", "embeddings", "token_embeddings"),
    *("output", "dtype", "encoding"),
)
"""What an input that holds an index cannot be called: a graph, or who asks for its vectors, means something else."""


@dataclass(frozen=True, kw_only=True)
class FrontEndConfig:
    """What a front-end is made of.

    Args:
        family: the row of the family table that it follows, or another name for what it is.
        steps: in order; `Tokens` first.
        max_len: M, the largest legal offset + real tokens; None where nothing limits it.
        padding_idx: id of padding, whose row is not trained; None for none.
        refused_ids: ids whose vectors would depend on other tokens, so that they cannot be served.
        lookup: how many steps make up the model's own lookup, which `inputs_embeds` stands for.
        consumer_scales: who is handed `inputs_embeds` applies the scale itself; None where that is not known.
        arithmetic: the type whose rounding follows every step, in float32 otherwise; default float32, which rounds no
            more. A checkpoint in another type is computed with that type's rounding by a library that loads it so.
        dropout: probability after the last step, in training only; default 0.1.
        bias: what attention adds for the distance between a query and a key; None for nothing.
        rotary: cosines and sines for attention, which are further outputs; default none.
        no_rotary: why a model whose attention is rotary has no such output; default None.

    """

    family: str
    steps: tuple[Step, ...]
    max_len: int | None
    padding_idx: int | None = None
    refused_ids: tuple[int, ...] = ()
    lookup: int = 1
    consumer_scales: bool | None = None
    arithmetic: Literal["float32", "float16", "bfloat16"] = "float32"
    dropout: float = 0.1
    bias: BiasConfig | None = None
    rotary: tuple[RotaryOutput, ...] = ()
    no_rotary: str | None = None

    def __post_init__(self) -> None:
        """Refuse steps that no front-end has."""
        kinds = [step.kind for step in self.steps]
        if kinds[:1] != ["tokens"]:
            raise ValueError(f"steps: got {kinds}, allowed a list that begins with 'tokens'")
        for kind in ("tokens", "positions", "mask"):
            if kinds.count(kind) > 1:
                raise ValueError(f"steps: got {kinds.count(kind)} of kind {kind!r}, allowed at most one")
        if not 1 <= self.lookup <= len(self.steps):
            raise ValueError(f"lookup: got {self.lookup}, allowed 1 to {len(self.steps)}")
        if self.max_len is not None and (type(self.max_len) is not int or self.max_len < 1):
            raise ValueError(f"max_len: got {self.max_len!r}, allowed 1 or more")
        self._check_indices()
        if self.positions:
            self._check_positions(self.positions)
        if self.arithmetic not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"arithmetic: got {self.arithmetic!r}, allowed float32, float16, bfloat16")
        if self.counts == "ids" and self.padding_idx is None:
            raise ValueError("padding_idx: got none, allowed an id, since positions skip it")
        if self.rotary and self.counts != "slots":
            raise ValueError(f"rotary: got positions that count {self.counts!r}, allowed 'slots'")
        names = [output.name for output in self.rotary]
        if len(set(names)) < len(names):
            raise ValueError(f"rotary: got the names {names}, allowed each once")

    def _check_indices(self) -> None:
        for step, width in zip(self.steps[1:], self.widths, strict=False):
            parts = indexed((step,))
            if isinstance(step, Levels) and not parts:
                raise ValueError("levels: got none, allowed one or more")
            for part in parts:
                if part.table not in ("own", "tokens"):
                    raise ValueError(f"{step.kind}.table: got {part.table!r}, allowed own, tokens")
                if part.table == "tokens" and width != self.tokens.width:
                    raise ValueError(f"{step.kind}.table: got 'tokens', allowed at a width of {self.tokens.width}")
        for name, count in Counter(part.input for part in indexed(self.steps)).items():
            if count > 1:
                raise ValueError(f"input: got {name!r} {count} times, allowed once")
            if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in OWN_NAMES:
                raise ValueError(
                    f"input: got {name!r}, allowed small letters, digits and '_', the first a letter, "
                    f"other than {', '.join(OWN_NAMES)}"
                )

    def _check_positions(self, positions: Positions) -> None:
        positions.check()
        if self.max_len is None or self.max_len > positions.limit:
            raise ValueError(f"max_len: got {self.max_len}, allowed 1 to {positions.limit}, as the positions allow")

    def to_document(self) -> dict[str, Any]:
        """Return the config as plain values, without the names of tensors in a checkpoint."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {"steps": [to_document(step) for step in self.steps], "refused_ids": list(self.refused_ids)}
        values["rotary"] = [output.to_document() for output in self.rotary]
        values["bias"] = None if self.bias is None else biases.to_document(self.bias)
        return values

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "FrontEndConfig":
        """Return the config that `to_document` wrote.

        Raises:
            ValueError: a step, a rotary output or a bias is not known.

        """
        steps = tuple(from_document(step) for step in document["steps"])
        rotary = tuple(RotaryOutput.from_document(output) for output in document["rotary"])
        bias = None if document["bias"] is None else biases.from_document(document["bias"])
        further = {"steps": steps, "rotary": rotary, "bias": bias, "refused_ids": tuple(document["refused_ids"])}
        return cls(**{**document, **further})

    @property
    def tokens(self) -> Tokens:
        """The first step."""
        first = self.steps[0]
        assert isinstance(first, Tokens)
        return first

    @property
    def positions(self) -> Positions | None:
        """The step that adds positions, if there is one."""
        return next((step for step in self.steps if isinstance(step, Positions)), None)

    @property
    def indices(self) -> dict[str, int]:
        """Name of each further index of a token -> how many there are, in the order in which they are added."""
        return {part.input: self.tokens.rows if part.table == "tokens" else part.rows for part in indexed(self.steps)}

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the indices that must be given."""
        return tuple(part.input for part in indexed(self.steps) if part.needed)

    @property
    def counts(self) -> Literal["slots", "ids", "mask"]:
        """What advances the position."""
        return self.positions.counts if self.positions else "slots"

    @property
    def needs_mask(self) -> bool:
        """Whether `attention_mask` is an input."""
        return self.counts == "mask" or any(isinstance(step, Mask) for step in self.steps)

    @property
    def exact(self) -> bool:
        """Whether only gathers, sums and products of two make up a vector, so that every bit is determined."""
        return not any(isinstance(step, Norm | Project) for step in self.steps)

    @property
    def only_looks_up(self) -> bool:
        """Whether a vector depends on nothing but its id: it is a row of the token table, perhaps scaled."""
        return all(isinstance(step, Tokens | Scale) for step in self.steps)

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of `x` after each step; the last is D."""
        widths = [self.tokens.width]
        for step in self.steps[1:]:
            widths.append(step.width if isinstance(step, Project) else widths[-1])
        return tuple(widths)


def names_of(steps: tuple[Step, ...]) -> list[str]:
    """Name each step after its kind, with a number where a kind stands again: norm, norm2."""
    names: list[str] = []
    for step in steps:
        count = sum(name.rstrip("0123456789") == step.kind for name in names)
        names.append(f"{step.kind}{count + 1}" if count else step.kind)
    return names


class FrontEnd(nn.Module):
    """The steps of a config as a module, with dropout once, after the last.

    The module of a step is an attribute by the name of the step, that of the pairwise bias is `bias`; only those exist
    that the config has. The bias stands apart: no vector depends on it.
    """

    tokens: TokenTable
    segments: TokenTable
    levels: nn.ModuleDict
    positions: LearnedPositions | SinusoidalPositions | FixedPositions | HybridPositions | FactorisedCells
    norm: nn.LayerNorm
    project: nn.Linear
    bias: Bias

    def __init__(self, config: FrontEndConfig) -> None:
        super().__init__()
        self.config = config
        for name, step, width in zip(names_of(config.steps), config.steps, (0, *config.widths), strict=False):
            module = _module(step, width, config)
            if module is not None:
                self.add_module(name, module)
        if config.bias is not None:
            self.bias = build_bias(config.bias)
        for output in config.rotary:
            self.add_module(output.named("rotary"), RotaryPositions(output.config))
        self.dropout = nn.Dropout(config.dropout)
        self._arithmetic: torch.dtype = getattr(torch, config.arithmetic)

    @classmethod
    def from_tensors(cls, config: FrontEndConfig, tensors: Mapping[str, Tensor]) -> "FrontEnd":
        """Build a front-end around `tensors`, named as in `state_dict()`, without a second copy of them.

        Raises:
            RuntimeError: a tensor is missing, of another shape, or not of this front-end.

        """
        with torch.device("meta"):
            module = cls(config)
        module.load_state_dict(dict(tensors), strict=True, assign=True)
        return module

    def forward(
        self,
        input_ids: Tensor,
        offset: int | Tensor = 0,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        indices: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the vectors (B, L, D) that enter block 0.

        Args:
            input_ids: int64 (B, L).
            offset: real tokens already fed (what GPT-2 calls `past_length`): an int, or int64 (1,) or (B,); default 0.
            token_type_ids: int64 (B, L), segment of each token; default all 0.
            attention_mask: int64 (B, L), 1 for a real token, of the tokens given; default all 1. Only a front-end that
                uses it takes it.
            position_ids: int64 (1 or B, L), position index of each token; excludes `offset`.
            indices: further indices of each token, by the names in `config.indices`: int64 (1 or B, L). What is left
                out is all 0, except the names in `config.needed`, which must be given.
                Segments may be among them, unless they are given as `token_type_ids`.

        Raises:
            ValueError: a position or an index is not allowed, or one or a mask was given to a front-end that has none.

        """
        given = dict(indices or {})
        if token_type_ids is not None:
            if "token_type_ids" in given:
                raise ValueError("indices: got token_type_ids, allowed others where those are given too")
            given["token_type_ids"] = token_type_ids
        return self.run(self.config.steps, input_ids, offset, given, attention_mask, position_ids)

    @property
    def signature(self) -> Signature:
        """What its graph takes and promises."""
        config = self.config
        same = config.lookup == len(config.steps)
        return Signature(
            family=config.family,
            vocab_size=config.tokens.rows,
            width=config.widths[-1],
            max_len=config.max_len,
            rows=(config.positions.cells or config.positions.rows) if config.positions else 0,
            exact=config.exact,
            indices=config.indices,
            needed=config.needed,
            counts=config.counts,
            needs_mask=config.needs_mask,
            padding_idx=config.padding_idx,
            refused_ids=config.refused_ids,
            lookup_width=None if same else config.widths[config.lookup - 1],
            consumer_scales=config.consumer_scales,
            rotary={
                output.named(part): output.config.dim
                for output in config.rotary
                for part in ("rotary_cos", "rotary_sin")
            },
            rotary_len=min((output.config.length for output in config.rotary if output.config.length), default=None),
        )

    def look_up(self, input_ids: Tensor) -> Tensor:
        """Return the model's own lookup of `input_ids` (B, L): what `inputs_embeds` stands for."""
        return self.run(self.config.steps[: self.config.lookup], input_ids)

    def rotary_outputs(self, input_ids: Tensor, offset: int | Tensor = 0) -> dict[str, Tensor]:
        """Return the cosines and sines for `rotate`, by name: each float32 (1 or B, L, R), empty where there are none.

        Args:
            input_ids: int64 (B, L), of which only the shape counts.
            offset: tokens already fed: an int, or int64 (1,) or (B,); default 0. One number gives one row for all.

        Raises:
            ValueError: a position is negative, or beyond the length that the angles are made for.

        """
        outputs: dict[str, Tensor] = {}
        for output in self.config.rotary:
            cos, sin = self.get_submodule(output.named("rotary"))(input_ids, offset=offset)
            outputs |= {output.named("rotary_cos"): cos, output.named("rotary_sin"): sin}
        return outputs

    def run(
        self,
        steps: tuple[Step, ...],
        input_ids: Tensor,
        offset: int | Tensor = 0,
        indices: Mapping[str, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the first steps only, as `forward` runs all of them; dropout follows the last."""
        given = indices or {}
        self._check_given(input_ids, given)
        for part in indexed(steps):
            if part.needed and part.input not in given:
                raise ValueError(f"{part.input}: got none, allowed one for each token")
        if attention_mask is not None and not self.config.needs_mask:
            raise ValueError(
                f"attention_mask: the front-end {self.config.family!r} does not use one; pass position_ids"
            )
        x = input_ids
        for name, step in zip(names_of(steps), steps, strict=True):
            match step:
                case Tokens() | Norm() | Project():
                    x = self.get_submodule(name)(x)
                case Scale():
                    x = x * (float(torch.tensor(step.by, dtype=self._arithmetic)) if step.cast else step.by)
                case Segments():
                    x = x + self._look_up_index(step, name, input_ids, given)
                case Levels():
                    levels = (
                        self._look_up_index(level, f"{name}.{place}", input_ids, given)
                        for place, level in enumerate(step.levels)
                    )
                    x = x + reduce(torch.add, levels)
                case Positions():
                    rows = self._rows(step, input_ids, offset, attention_mask, position_ids)
                    x = self.get_submodule(name)(x, position_ids=rows)
                case Mask():
                    x = x if attention_mask is None else x * attention_mask.unsqueeze(-1).to(x.dtype)
            x = self._round(x)
        vectors: Tensor = self.dropout(x) if len(steps) == len(self.config.steps) else x
        return vectors

    def _round(self, x: Tensor) -> Tensor:
        return x if self._arithmetic == torch.float32 else x.to(self._arithmetic).to(torch.float32)

    def _check_given(self, input_ids: Tensor, given: Mapping[str, Tensor]) -> None:
        """Refuse indices that the front-end does not take, of another shape than (1 or B, L), or out of range."""
        known = self.config.indices
        batch, length = input_ids.shape
        for name, index in given.items():
            if name not in known:
                allowed = ", ".join(known) or "none"
                raise ValueError(f"{name}: the front-end {self.config.family!r} has no such index, allowed {allowed}")
            if torch.compiler.is_compiling():  # the exporter cannot follow a check on values
                continue
            if index.shape not in ((1, length), (batch, length)):
                raise ValueError(
                    f"{name}: got shape {tuple(index.shape)}, allowed (1, {length}) or ({batch}, {length})"
                )
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < known[name]:
                got = int(index.min()) if int(index.min()) < 0 else int(index.max())
                raise ValueError(f"{name}: got {got}, allowed 0 to {known[name] - 1}")

    def _look_up_index(self, step: Segments, name: str, input_ids: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors (1 or B, L, width) of the index of `step`, whose own table is the module `name`."""
        table = self.tokens if step.table == "tokens" else self.get_submodule(name)
        vectors: Tensor = table(given.get(step.input, torch.zeros_like(input_ids)))
        return vectors if step.by == 1 else self._round(vectors * step.by)

    def _rows(
        self,
        step: Positions,
        input_ids: Tensor,
        offset: int | Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Return which row of the table each token takes: int64 (1 or B, L)."""
        checked = not torch.compiler.is_compiling()
        if checked:
            check_position_ids(input_ids, position_ids, offset)
        if position_ids is not None or step.counts == "slots":
            index = positions_of(input_ids, position_ids, offset)
            if checked and (step.table != "exact" or step.grid):  # sinusoids that are computed have no end
                self._check_limit(index + 1, None if position_ids is not None else input_ids.shape[1])
            return index + step.first if step.first else index
        if step.counts == "mask":
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        else:
            real = input_ids.ne(self.config.padding_idx or 0).to(torch.int64)
        start = torch.as_tensor(offset, dtype=torch.int64, device=input_ids.device).reshape(-1, 1)
        count = (start + real.cumsum(1)) * real
        if checked:
            self._check_limit(count, None)
        return count + (step.first - 1)

    def _check_limit(self, counts: Tensor, length: int | None) -> None:
        """Compare the largest of `counts`, position index + 1, with the limit."""
        end, limit = int(counts.max()) if counts.numel() else 0, self.config.max_len
        if limit is not None and end > limit:
            got = f"position {end - 1}" if length is None else f"length {length} + offset {end - length} = {end}"
            raise ValueError(f"{got} exceeds the maximum length {limit}")


def _module(step: Step, width: int, config: FrontEndConfig) -> nn.Module | None:
    """Return the module of a step whose input is `width` wide; None for a step without one."""
    match step:
        case Tokens():
            return TokenTable(step.rows, step.width, padding_idx=config.padding_idx)
        case Segments():
            return TokenTable(step.rows, width) if step.table == "own" else None
        case Levels():
            own = (str(place) for place, level in enumerate(step.levels) if level.table == "own")
            return nn.ModuleDict({place: TokenTable(step.levels[int(place)].rows, width) for place in own})
        case Positions(grid=(height, columns), table="factorised"):
            return FactorisedCells(width, height, columns)
        case Positions(grid=(height, columns), table="exact"):
            with torch.device("cpu"):  # derived, as below
                cells = torch.zeros((1, height * columns), dtype=torch.int64)
                return FixedPositions(SinusoidalGridPositions(width, height, columns)(cells)[0])
        case Positions(table="hybrid"):
            return HybridPositions(width, step.rows, dropout=0.0)
        case Positions(table="learned"):
            return LearnedPositions(width, step.rows, dropout=0.0)
        case Positions(table="exact"):
            return SinusoidalPositions(width, step.rows, dropout=0.0)
        case Positions(rows=0):
            raise ValueError(f"rows: got 0, allowed 1 or more for a table {step.table!r}")
        case Positions():
            # A real table also where the parameters are built without storage: it is derived, and never loaded.
            with torch.device("cpu"):
                table = RECIPES[step.table](step.rows, width, step.zero_row)
                table = table.to(getattr(torch, config.arithmetic)).to(torch.float32)
            return FixedPositions(table)
        case Norm():
            return nn.LayerNorm(width, eps=step.eps, bias=step.bias is not None)
        case Project():
            return nn.Linear(width, step.width, bias=step.bias is not None)
        case _:
            return None
