"""Finds the steps of a front-end in a library's model. Letters: B batch, L length, V vocabulary, M maximum length."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from preblock.export.discovery.calls import ordinary_ids, pad, random_ids, special_ids
from preblock.export.discovery.errors import DiscoveryError, MissingTensorError
from preblock.export.discovery.further_inputs import find_further_input
from preblock.export.discovery.index_rules import find_rule, without_fill
from preblock.export.discovery.model import BlocklessModel
from preblock.export.discovery.recognition import Part, recognise_ids, recognise_vectors
from preblock.export.discovery.sinusoid_recipes import find_recipe
from preblock.export.discovery.trace import Recorder, Value
from preblock.models.steps import Mask, Norm, Positions, Project, RmsNorm, Scale, Segments, Step, Tokens

BATCH, LENGTH = 2, 7
FEWEST_IDS = 16
NOT_INDICES = ("input_ids", "position_ids", "decoder_input_ids", "cache_position", "labels")
LIMIT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "max_sequence_length")


@dataclass(frozen=True, kw_only=True)
class FoundSteps:
    """The steps of a front-end, with the names of their tensors in the checkpoint.

    Args:
        steps: without sizes, as in a row of the family table.
        tensors: names of the tensors in the model, by their names in the checkpoint.
        known: names in the checkpoint of all tensors of the model.
        derived: computed table of positions, (M, width); None for a table in the checkpoint.
        max_len: M without a table of positions; None for no limit.
        padding: id of padding; None for none.
        lookup: number of steps of the model's own lookup.
        consumer_scales: the model scales `inputs_embeds` itself; None for unknown.
        others: further tensors in the model behind the vectors.
        rotary: attention has rotary positions.
        copies: equal copies of each vector that block 0 takes.
        takes_ids: blocks take the token ids beside the vectors.

    """

    steps: tuple[Step, ...]
    tensors: dict[str, str]
    known: frozenset[str]
    padding: int | None
    lookup: int
    takes_ids: bool
    derived: Tensor | None = None
    max_len: int | None = None
    consumer_scales: bool | None = None
    others: tuple[str, ...] = ()
    rotary: bool = False
    copies: int = 1


class Search:
    """Reads the front-end of one model.

    Raises:
        DiscoveryError: an operation before block 0 is outside the general form, or a tensor is missing.

    """

    def __init__(self, model: BlocklessModel) -> None:
        self._model = model
        # The size in the config serves to choose ids; the size of the table counts afterwards.
        stated = getattr(model.text_config, "vocab_size", None)
        vocab_size = stated if type(stated) is int and stated > 0 else FEWEST_IDS
        self._padding = _padding_id(model, vocab_size)
        self._ids = random_ids(ordinary_ids(vocab_size, special_ids(model.config, vocab_size)), BATCH, LENGTH)
        self._block = ""
        self._leaves: set[str] = set()

    def find(self) -> FoundSteps:
        """Return the steps."""
        plain = {"input_ids": self._ids}
        # Masked tokens and padding ids are different ones, to tell the rules for positions apart.
        padded = {"input_ids": pad(self._ids, self._padding, "inner")[0]}
        if "attention_mask" in self._model.inputs:
            padded["attention_mask"] = pad(self._ids, None, "left")[1]
        parts, masked = self._recognise(plain), self._recognise(padded)
        if _shape(parts) != _shape(masked):
            raise DiscoveryError(f"padding changes the steps from {_shape(parts)} to {_shape(masked)}")
        merged = masked if len(masked) >= len(parts) else parts
        unmasked = iter(zip(*(([p for p in run if p.kind != "mask"]) for run in (parts, masked)), strict=True))
        steps: list[Step] = []
        names: dict[str, str] = {}
        derived: Tensor | None = None
        for part in merged:
            if part.kind == "mask":
                steps.append(Mask())
                continue
            one, other = next(unmasked)
            step, computed = self._step(one, [(plain, one), (padded, other)], names)
            derived = computed if computed is not None else derived
            steps.append(step)
        takes_ids = self._refuse_further_inputs()
        table = self._model.tensors[parts[0].weight]
        named = self._model.token_table()
        if named is not None and named is not table:
            raise DiscoveryError(
                f"the blocks that run first ({self._block}) read {parts[0].weight}, "
                "which is not the model's token table"
            )
        lookup, scales = self._lookup(steps, table.shape[-1])
        return FoundSteps(
            steps=tuple(steps),
            tensors=names,
            known=frozenset(self._model.keys.values()),
            derived=derived,
            max_len=self._limit(),
            padding=self._padding,
            lookup=lookup,
            consumer_scales=scales,
            others=tuple(sorted((self._leaves & self._model.keys.keys()) - set(names.values()))),
            rotary=any("RotaryEmbedding" in type(module).__name__ for module in self._model.part.modules()),
            copies=self._model.copies,
            takes_ids=takes_ids,
        )

    def find_tokens(self) -> FoundSteps:
        """Return the steps of the library's embedding module: the token table, perhaps scaled.

        Raises:
            DiscoveryError: the model has no such module, or the module does more.

        """
        names: dict[str, str] = {}
        parts = self._module_parts()
        further = [part.kind for part in parts if part.kind not in ("tokens", "scale")]
        if further:
            raise DiscoveryError(f"the embedding module of the library adds {', '.join(further)} to the token table")
        steps = tuple(self._step(part, [], names)[0] for part in parts)
        return FoundSteps(
            steps=steps,
            tensors=names,
            known=frozenset(self._model.keys.values()),
            padding=self._padding,
            lookup=len(steps),
            takes_ids=self._takes_ids(),
        )

    def _takes_ids(self) -> bool:
        try:
            return self._model.block_input({"input_ids": self._ids}).takes_ids
        except DiscoveryError:  # --tokens-only needs no pass up to block 0
            return False

    def _recognise(self, inputs: dict[str, Tensor]) -> list[Part]:
        return recognise_ids(self._record(inputs), inputs["input_ids"])

    def _record(self, inputs: dict[str, Tensor]) -> Value:
        recorder = Recorder(inputs, self._model.tensors)
        missing = ", ".join(self._model.missing()[:3])
        lacks = MissingTensorError(
            f"the checkpoint lacks tensors that the front-end needs, such as {missing}"
            if missing
            else "a table before block 0 is neither a parameter nor a buffer of the library's model"
        )
        try:
            self._block, vectors, *_ = self._model.block_input(inputs, recorder)
        except DiscoveryError as error:
            raise lacks if "meta tensor" in str(error) or "device meta" in str(error) else error from error
        if vectors.device.type == "meta":
            raise lacks
        value = recorder.value_of(vectors)
        self._leaves |= value.leaves()
        batch, length = next(iter(inputs.values())).shape[:2]
        self._model.transposed = tuple(vectors.shape[:2]) == (length, batch) != (batch, length)
        self._model.columns_first = vectors.ndim == 3 and vectors.shape[-1] == length != vectors.shape[1]
        copied = vectors.ndim == 4 and bool((vectors == vectors[:, :, :1]).all())
        self._model.copies = vectors.shape[2] if copied else 1
        if not (vectors.ndim == 3 or copied) or (vectors.shape[1] < length and not self._model.transposed):
            got, expected = tuple(vectors.shape), f"({batch}, {length}, width)"
            raise DiscoveryError(f"block 0 takes vectors of shape {got}, expected {expected}")
        return value

    def _refuse_further_inputs(self) -> bool:
        """Return whether block 0 takes the ids.

        Raises:
            DiscoveryError: block 0 takes other content of the tokens or of the request beside the vectors.

        """
        recorder = Recorder({"input_ids": self._ids}, self._model.tensors)
        first = self._model.block_input({"input_ids": self._ids}, recorder)
        second = self._model.block_input({"input_ids": self._ids.flip(1)})
        further = find_further_input(recorder, first, second, self._model.trained, LENGTH)
        if further is not None:
            name, tensors = further
            sources = f" of {', '.join(tensors[:3])}" if tensors else ""
            raise DiscoveryError(
                f"block 0 takes {name or 'a further tensor'}{sources} beside the vectors; "
                "--tokens-only exports the token table alone"
            )
        return first.takes_ids

    def _step(
        self, part: Part, calls: list[tuple[dict[str, Tensor], Part]], names: dict[str, str]
    ) -> tuple[Step, Tensor | None]:
        """Return the step of a part, and its table if the library computes it; add its tensors to `names`."""

        def key(name: str) -> tuple[str, ...]:
            if name not in self._model.keys:
                raise MissingTensorError(f"the checkpoint lacks the tensor {name}")
            names[self._model.keys[name]] = name
            return (self._model.keys[name],)

        match part.kind:
            case "tokens":
                return Tokens(weight=key(part.weight)), None
            case "scale":
                return Scale(by=part.by, cast=part.cast), None
            case "norm":
                return Norm(eps=part.eps, weight=key(part.weight), bias=key(part.bias) if part.bias else None), None
            case "rms_norm":
                return RmsNorm(eps=part.eps, weight=key(part.weight) if part.weight else None), None
            case "project":
                return Project(weight=key(part.weight), bias=key(part.bias) if part.bias else None), None
        if part.index is not None and part.weight and (name := self._index_input(part)):
            return Segments(input=name, weight=key(part.weight), by=part.by), None
        counts, first = "slots", part.first
        if part.index is not None:
            rows = [(given, found.index) for given, found in calls if found.index is not None]
            rule = find_rule(rows, self._padding)
            if rule is None:
                raise DiscoveryError(f"rows of {part.weight or 'a table'} are chosen by none of slots, ids and mask")
            counts, first = rule
        if part.by != 1:
            raise DiscoveryError("positions are scaled before they are added")
        if part.weight in self._model.keys:
            return Positions(counts=counts, first=first, weight=key(part.weight)), None  # type: ignore[arg-type]
        table = self._computed_rows(part)
        recipe = find_recipe(table)
        step = Positions(counts=counts, first=first, rows=len(table), **recipe)  # type: ignore[arg-type]
        return step, None if recipe else table

    def _index_input(self, part: Part) -> str | None:
        """Return the input of the model with the rows of a part; None for none."""
        assert part.index is not None
        rows = len(self._model.tensors[part.weight])
        for name in self._model.inputs:
            if (not name.endswith("_ids") and name != "langs") or name in NOT_INDICES:
                continue
            bits = random_ids(torch.arange(min(2, rows)), BATCH, LENGTH)
            try:
                again = self._recognise({"input_ids": self._ids, name: bits})
            except DiscoveryError:
                continue
            for other in again:
                index = other.index if other.weight == part.weight else None
                if index is not None and torch.equal(without_fill(index, bits).reshape(-1), bits.reshape(-1)):
                    return name
        # The only row of a table needs no input.
        return "token_type_ids" if rows == 1 else None

    def _computed_rows(self, part: Part) -> Tensor:
        """Return the computed table of positions."""
        if part.weight:
            table = self._model.tensors[part.weight]
            return table.detach().reshape(-1, table.shape[-1])
        limit = self._limit()
        if limit is None:
            raise DiscoveryError("positions are computed, and the config states no longest input")
        long = self._recognise({"input_ids": random_ids(self._ids.reshape(-1), 1, limit)})
        (found,) = (other for other in long if other.kind == "rows" and not other.weight)
        assert found.vectors is not None
        return found.vectors.detach().reshape(-1, found.vectors.shape[-1])[:limit].clone()

    def _lookup(self, steps: list[Step], width: int) -> tuple[int, bool | None]:
        """Return the number of steps of the model's own lookup, and whether it scales `inputs_embeds` itself."""
        try:
            later = recognise_vectors(
                self._record({"inputs_embeds": torch.zeros(BATCH, LENGTH, width)}), "inputs_embeds"
            )
        except DiscoveryError:
            return self._count_module_steps(), None
        count = sum(part.kind != "mask" for part in later)
        for lookup in range(len(steps), 0, -1):
            if sum(not isinstance(step, Mask) for step in steps[lookup:]) == count:
                return lookup, any(part.kind == "scale" for part in later)
        return 1, None

    def _count_module_steps(self) -> int:
        """Return the number of steps in the library's embedding module; 1 if it has none."""
        try:
            return len(self._module_parts())
        except DiscoveryError:
            return 1

    def _module_parts(self) -> list[Part]:
        recorder = Recorder({"input_ids": self._ids}, self._model.tensors)
        with recorder:
            vectors = self._model.look_up(self._ids)
        return recognise_ids(recorder.value_of(vectors), self._ids)

    def _limit(self) -> int | None:
        for key in LIMIT_KEYS:
            value = getattr(self._model.text_config, key, None)
            if type(value) is int and value > 0:
                return value
        return None


def _shape(parts: Iterable[Part]) -> list[str]:
    """Return kind and tensor of each part, without masks."""
    return [f"{part.kind} {part.weight}".rstrip() for part in parts if part.kind != "mask"]


def _padding_id(model: BlocklessModel, vocab_size: int) -> int | None:
    for config in (model.text_config, model.config):
        stated = getattr(config, "pad_token_id", None)
        if type(stated) is int and 0 <= stated < vocab_size:
            return stated
    return None
