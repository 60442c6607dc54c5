"""Models outside the general form of a front-end are refused with a reason: small ones, on classes of transformers."""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from preblock.export.discovery.errors import DiscoveryError
from preblock.export.discovery.model import BlocklessModel
from preblock.export.discovery.search import FoundSteps, Search

V, D, M = 16, 4, 40
KEYS = ("wte.weight", "wpe.weight")


class TinyConfig(PretrainedConfig):
    model_type = "tiny-of-tests"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"vocab_size": V, "max_position_embeddings": M} | fields)


class Tiny(PreTrainedModel):
    """Tokens and positions; the models below change one thing."""

    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(M, D)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(D, D))])
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None: ...

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        vectors: Tensor = self.blocks[0](self.embed(input_ids, attention_mask))
        return vectors

    def embed(self, ids: Tensor, _: Tensor | None) -> Tensor:
        vectors: Tensor = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        return vectors


def rows(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1])


def changed(**methods: Callable[..., Any]) -> type[Tiny]:
    """Return a model with other methods."""
    return type("Changed", (Tiny,), methods)


def embedding(embed: Callable[[Any, Tensor, Tensor | None], Tensor]) -> type[Tiny]:
    """Return a model with another input of its blocks: a function of the model, of ids and of the mask."""
    return changed(embed=embed)


def fail(_: Tiny, input_ids: Tensor) -> Tensor:
    raise RuntimeError(f"no {len(input_ids)} rows")


Failing = changed(forward=fail)
WithoutBlocks = changed(forward=lambda model, input_ids: model.embed(input_ids, None))
OtherTable = changed(get_input_embeddings=lambda model: model.wpe)
ScaledPositions = embedding(lambda model, ids, _: model.wte(ids) + 2 * model.wpe(rows(ids)))
ReversedPositions = embedding(lambda model, ids, _: model.wte(ids) + model.wpe(rows(ids).flip(0)))
ComputedPositions = embedding(lambda model, ids, _: model.wte(ids) + torch.outer(rows(ids) + 0.5, torch.arange(D)))
Shortened = embedding(lambda model, ids, mask: Tiny.embed(model, ids, mask)[:, :3])
ScaledUnderMask = embedding(
    lambda model, ids, mask: Tiny.embed(model, ids, None) if mask is None else Tiny.embed(model, ids, None) * 3
)


class UnnamedTable(Tiny):
    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


class ScaledVectors(Tiny):
    """Scales given vectors twice, but not its own."""

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        given = self.wte(input_ids) if inputs_embeds is None else inputs_embeds * 3 * 5
        vectors: Tensor = self.blocks[0](given)
        return vectors


class Whole(nn.Module):
    """An embedding module that adds positions itself."""

    def __init__(self, tokens: nn.Embedding, places: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.places = tokens, places

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return vectors


AddingModule = changed(get_input_embeddings=lambda model: Whole(model.wte, model.wpe))


class Uninitialised(Tiny):
    def initialize_weights(self) -> None:
        raise ValueError("no initial weights")


def search(kind: type[Tiny], keys: tuple[str, ...] = KEYS, **config: Any) -> Search:
    model = BlocklessModel(kind, TinyConfig(**config), None, keys)
    generator = torch.Generator().manual_seed(0)
    for name in keys:
        model.load(name, torch.randn(model.tensors[name].shape, generator=generator))
    return Search(model)


def find(kind: type[Tiny], keys: tuple[str, ...] = KEYS, **config: Any) -> FoundSteps:
    return search(kind, keys, **config).find()


def kinds(found: FoundSteps) -> list[str]:
    return [type(step).__name__ for step in found.steps]


def test_tokens_and_positions_are_found() -> None:
    found = find(Tiny)
    assert (kinds(found), found.lookup, found.max_len) == (["Tokens", "Positions"], 1, M)
    assert found.tensors == {name: name for name in KEYS}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithoutBlocks, "^Changed of .* runs no list of blocks$"),
        (Failing, "^Changed of .* fails before block 0: RuntimeError: no 2 rows$"),
        (ScaledPositions, "^positions are scaled before they are added$"),
        (ReversedPositions, "^rows of wpe.weight are chosen by none of slots, ids and mask$"),
        (Shortened, rf"^block 0 takes vectors of shape \(2, 3, {D}\), expected \(2, 7, width\)$"),
        (ScaledUnderMask, "^padding changes the steps from "),
        (OtherTable, r"^the blocks that run first \(blocks\) read wte.weight, which is not the model's token table$"),
        (Uninitialised, " cannot initialise the model: no initial weights$"),
    ],
)
def test_model_outside_the_general_form_is_refused(kind: type[Tiny], message: str) -> None:
    with pytest.raises(DiscoveryError, match=message):
        find(kind)


def test_computed_positions_need_a_longest_input() -> None:
    found = find(ComputedPositions)
    assert found.derived is not None
    assert found.derived.shape == (M, D)
    with pytest.raises(DiscoveryError, match=r"^positions are computed, and the config states no longest input$"):
        find(ComputedPositions, max_position_embeddings=None)


def test_table_without_a_name_is_found_by_its_use() -> None:
    found = find(UnnamedTable)
    assert (kinds(found), found.lookup) == (["Tokens", "Positions"], 1)
    with pytest.raises(DiscoveryError, match="names no token table of the model: "):
        search(UnnamedTable).find_tokens()


def test_own_scale_of_given_vectors_is_unknown() -> None:
    found = find(ScaledVectors)
    assert (kinds(found), found.lookup, found.consumer_scales) == (["Tokens"], 1, None)


def test_tokens_alone_need_no_pass_up_to_block_0() -> None:
    found = search(Failing).find_tokens()
    assert (kinds(found), found.takes_ids) == (["Tokens"], False)
    with pytest.raises(DiscoveryError, match=r"^the embedding module of the library adds rows to the token table$"):
        search(AddingModule).find_tokens()
