"""Steps recognised in single operations of torch, without a model of the library."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm

from preblock.export.discovery.errors import DiscoveryError
from preblock.export.discovery.index_rules import find_rule
from preblock.export.discovery.recognition import Part, recognise_ids
from preblock.export.discovery.sinusoid_recipes import find_recipe
from preblock.export.discovery.trace import Recorder
from preblock.models.sinusoid_tables import RECIPES, library_table

IDS = torch.tensor([[1, 4, 2, 3], [2, 3, 4, 1]])
TABLE, ROWS = torch.arange(15.0).reshape(5, 3), torch.arange(18.0).reshape(6, 3)
CUBE = torch.arange(48.0).reshape(4, 4, 3)
VECTOR, MATRIX = torch.tensor([0.5, 1.5, 2.5]), torch.eye(3)
TENSORS = {"table": TABLE, "rows": ROWS, "vector": VECTOR, "matrix": MATRIX}
SLOTS = torch.arange(4)


def recognise(run: Callable[[Tensor], Tensor]) -> list[Part]:
    recorder = Recorder({"input_ids": IDS}, TENSORS)
    with torch.no_grad(), recorder:
        vectors = run(embedding(IDS, TABLE))
    tokens, *parts = recognise_ids(recorder.value_of(vectors), IDS)
    assert (tokens.kind, tokens.weight) == ("tokens", "table")
    return parts


def test_division_by_a_power_of_two_is_a_scale() -> None:
    (part,) = recognise(lambda x: x / 4)
    assert (part.kind, part.by) == ("scale", 0.25)


@pytest.mark.parametrize(
    "replace",
    [
        lambda x: torch.where(IDS.eq(2).unsqueeze(-1), 0.0, x),
        lambda x: torch.cat([x, x.new_zeros(2, 1, 3)], 1),
    ],
    ids=["where", "cat"],
)
def test_replaced_and_padded_vectors_add_no_step(replace: Callable[[Tensor], Tensor]) -> None:
    assert recognise(replace) == []


@pytest.mark.parametrize(("first", "rows"), [(0, lambda: ROWS[:4]), (2, lambda: ROWS[2:])])
def test_added_slice_names_its_table_and_first_row(first: int, rows: Callable[[], Tensor]) -> None:
    (part,) = recognise(lambda x: x + rows())
    assert (part.kind, part.weight, part.first, part.index) == ("rows", "rows", first, None)


@pytest.mark.parametrize(
    "rows", [lambda: CUBE[SLOTS, SLOTS], lambda: SLOTS.unsqueeze(1) * VECTOR], ids=["index", "product"]
)
def test_computed_rows_are_kept_as_vectors(rows: Callable[[], Tensor]) -> None:
    (part,) = recognise(lambda x: x + rows())
    assert (part.kind, part.weight, part.index) == ("rows", "", None)
    assert part.vectors is not None
    assert torch.equal(part.vectors, rows())


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: x + embedding(IDS, ROWS), r"add\(\) joins several lookups of the token ids"),
        (lambda x: x / 3, r"div\(\) between the token ids and block 0 is no step"),
        (lambda x: layer_norm(x, (3,)), r"native_layer_norm\(\) between the token ids and block 0 is no step"),
        (lambda x: x * IDS.unsqueeze(-1), r"mul\(\) by values of input_ids is no step"),
        (lambda x: x + VECTOR, "the vector vector is added to every token"),
        (lambda x: x + (IDS.unsqueeze(-1) + 1), r"add\(\) of the token ids is added to the lookup"),
        (lambda x: x.reshape(-1, 3).mm(MATRIX.exp().t()), "a table or matrix of the front-end is computed, not stored"),
        (lambda x: x.reshape(-1, 3).mm(MATRIX), r"a matrix before block 0 is not stored as \(out, in\)"),
    ],
    ids=["two lookups", "inexact", "no weight", "ids", "vector", "added ids", "computed", "untransposed"],
)
def test_other_operation_is_named(run: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(DiscoveryError, match=message):
        recognise(run)


@pytest.mark.parametrize("padding", [None, 4])
def test_rows_by_no_rule_give_none(padding: int | None) -> None:
    assert find_rule([({"input_ids": IDS}, IDS)], padding) is None
    assert find_rule([({"input_ids": IDS}, SLOTS + 2)], padding) == ("slots", 2)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_of_computed_table_is_found(name: str) -> None:
    table = torch.from_numpy(library_table(name, 5, 6, None))
    found = find_recipe(table)
    assert torch.equal(torch.from_numpy(library_table(found["table"], 5, 6, found["zero_row"])), table)
    assert find_recipe(table + 1) == {}


def test_table_of_odd_width_has_no_recipe() -> None:
    assert find_recipe(torch.ones(4, 3)) == {}
