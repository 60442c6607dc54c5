"""Proves a discovered front-end equal to the library's model: over a grid of calls, and over every id."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from preblock.export.discovery.calls import LONGEST, Call, grid, ordinary_ids, special_call, special_ids, table_calls
from preblock.export.discovery.errors import DiscoveryError
from preblock.export.discovery.model import BlocklessModel
from preblock.export.parity import allowed_ulp, compare, in_words, judge, size_of
from preblock.models.frontend import FrontEnd
from preblock.service.artifacts.parity import OutputParity, ParityCase


class Proof:
    """Compares `frontend` with the input of block 0 of `model`."""

    def __init__(self, model: BlocklessModel, frontend: FrontEnd) -> None:
        self._model, self._frontend = model, frontend
        self._allowed = allowed_ulp(frontend)

    def refused_ids(self) -> list[int]:
        """Return the ids without a vector of the front-end, in order, such as ids of images.

        Raises:
            DiscoveryError: the config does not name one of them.

        """
        config = self._frontend.config
        vocab_size, width = config.tokens.rows, config.widths[-1]
        special = special_ids(self._model.config, vocab_size)
        ordinary = ordinary_ids(vocab_size, special)
        refused = {
            one
            for one in special
            if not self._fits(special_call(ordinary, one, config.max_len)) and one != config.padding_idx
        }
        for call in table_calls(vocab_size, sorted(refused), config.max_len, width):
            if self._fits(call):
                continue
            differing = set(call.inputs["input_ids"][self._differing(call)].tolist())
            if not differing <= set(special):
                raise self._error(self.compare(call))
            refused |= differing
        return sorted(refused)

    def run(self) -> OutputParity:
        """Compare all calls.

        Raises:
            DiscoveryError: a call differs by more than the front-end's kind allows.

        """
        return self._judge(map(self.compare, self._calls()))

    def run_tokens(self) -> OutputParity:
        """Compare the lookup of every id with the library's embedding module.

        Raises:
            DiscoveryError: an id differs.

        """
        config = self._frontend.config
        calls = table_calls(config.tokens.rows, [], None, config.widths[-1])
        return self._judge(map(self._compare_lookup, calls))

    def compare(self, call: Call) -> ParityCase:
        """Compare one call."""
        found, expected = self._vectors(call)
        return compare(found.numpy(), expected.numpy(), call.arguments)

    def _compare_lookup(self, call: Call) -> ParityCase:
        ids = call.inputs["input_ids"]
        return compare(self._frontend(ids).numpy(), self._model.look_up(ids).numpy(), call.arguments)

    def _judge(self, cases: Iterable[ParityCase]) -> OutputParity:
        """Return the parity over `cases`; raise DiscoveryError at the first one that differs by too much."""
        found = []
        for case in cases:
            if not case.max_ulp <= self._allowed:
                raise self._error(case)
            found.append(case)
        return judge("the front-end", found, self._allowed)

    def _calls(self) -> Iterator[Call]:
        config = self._frontend.config
        vocab_size, width = config.tokens.rows, config.widths[-1]
        special = special_ids(self._model.config, vocab_size)
        ordinary = ordinary_ids(vocab_size, [*special, *config.refused_ids])
        limit = config.max_len
        longest = limit if limit is not None and config.positions else min(limit or LONGEST, LONGEST)
        yield from grid(ordinary, config.padding_idx, tuple(self._model.inputs), config.indices, longest)
        for one in special:
            if one not in config.refused_ids:
                yield special_call(ordinary, one, limit)
        yield from table_calls(vocab_size, config.refused_ids, limit, width)

    def _fits(self, call: Call) -> bool:
        try:
            return self.compare(call).max_ulp <= self._allowed
        except DiscoveryError:
            return False

    def _differing(self, call: Call) -> Tensor:
        """Return whether the vector of each id differs: bool (B, L)."""
        found, expected = self._vectors(call)
        return (found - expected).abs().amax(dim=-1) > 0

    def _vectors(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the vectors of the front-end and of the model, float32 (B, L, D)."""
        config, inputs = self._frontend.config, dict(call.inputs)
        ids = inputs["input_ids"]
        if config.needs_mask:
            inputs.setdefault("attention_mask", torch.ones_like(ids))
        expected = self._model.block_input(inputs)[1]
        if self._model.copies > 1:
            first = expected[:, :, 0]
            expected = first if bool((expected == expected[:, :, :1]).all()) else torch.full_like(first, torch.nan)
        if self._model.columns_first:
            expected = expected.transpose(1, 2)
        if self._model.transposed:
            expected = expected.transpose(0, 1)
        length, begin = ids.shape[1], call.offset
        expected = expected[:, begin:length]  # some models pad the row to a multiple of a window
        offset = torch.tensor([begin])
        if config.counts == "ids":
            offset = ids[:, :begin].ne(config.padding_idx or 0).sum(1)
        given = inputs["attention_mask"] if config.needs_mask else None
        found = self._frontend(
            ids[:, begin:],
            offset,
            attention_mask=None if given is None else given[:, begin:],
            indices={name: inputs[name][:, begin:] for name in config.indices if name in inputs},
        )
        return found, expected.expand(found.shape[0], -1, -1).contiguous()

    def _error(self, case: ParityCase) -> DiscoveryError:
        steps = " + ".join(step.kind for step in self._frontend.config.steps)
        return DiscoveryError(
            f"the best front-end found, {steps}, differs from the library's model by "
            f"{size_of(case, self._allowed)} at {in_words(case.arguments)}"
        )


def refuse(frontend: FrontEnd, refused: list[int]) -> FrontEnd:
    """Return `frontend` with further unsupported ids, around the same tensors."""
    config = replace(frontend.config, refused_ids=tuple(refused))
    return FrontEnd.from_tensors(config, frontend.state_dict()).eval()
