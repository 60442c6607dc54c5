"""One request, one answer, bit for bit, whichever door: 200 random requests, checked against the raw tables."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.doors import (
    NATIVE,
    TENSORS,
    Clients,
    Door,
    Fields,
    decode_frame,
    decode_json,
    native_bytes,
    native_json,
    native_npy,
    openai_base64,
)
from tests.service.random_requests import positions_of, random_request, random_rows


def lookup(tables: dict[str, NDArray[np.float32]], fields: Fields) -> NDArray[np.float32]:
    """Return GPT-2's front-end: a row of one table plus a row of the other."""
    ids, positions = np.concatenate(fields["input_ids"]), np.concatenate(positions_of(fields))
    vectors: NDArray[np.float32] = tables["tokens"][ids] + tables["positions"][positions]
    return vectors


def doors_for(fields: Fields) -> list[Door]:
    """Return the doors that can express a request."""
    doors = list(NATIVE)
    if len({len(row) for row in fields["input_ids"]}) == 1:
        doors += [native_npy, *TENSORS]
    if set(fields) == {"input_ids"}:
        doors.append(openai_base64)
    if len(fields["input_ids"]) == 1 and not isinstance(fields.get("offset"), list):
        if set(fields) <= {"input_ids", "offset", "token_type_ids"}:
            doors.append(decode_json)
        if set(fields) <= {"input_ids", "offset"}:
            doors.append(decode_frame)
    return doors


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["bert", "gpt"])
def test_doors_give_the_same_bits_for_random_requests(
    tiny_clients: Clients, tables: dict[str, NDArray[np.float32]], model: str, seed: int
) -> None:
    random = np.random.default_rng([seed, len(model)])
    for _ in range(25):
        fields = random_request(random, model)
        expected = native_json(tiny_clients, model, fields).tobytes()
        if model == "gpt":
            assert lookup(tables, fields).tobytes() == expected, fields
        for door in doors_for(fields):
            assert door(tiny_clients, model, fields).tobytes() == expected, (door.__name__, fields)


@pytest.mark.parametrize("model", ["minilm", "gpt2-small", "transformer-base"])
def test_a_batch_of_random_rows_is_bit_equal_to_each_row_alone(clients: Clients, model: str) -> None:
    random = np.random.default_rng(3)
    lengths = [1, 17, 64, 5, 33]
    rows, offset = random_rows(random, lengths, 30000), random.integers(0, 400, 5).tolist()
    alone = [
        native_bytes(clients, model, {"input_ids": [row], "offset": o}) for row, o in zip(rows, offset, strict=True)
    ]
    assert (
        native_bytes(clients, model, {"input_ids": rows, "offset": offset}).tobytes() == np.concatenate(alone).tobytes()
    )


@pytest.mark.parametrize("model", ["minilm", "gpt2-small", "transformer-base"])
def test_equal_rows_as_one_rectangle_are_bit_equal_to_each_row_alone(clients: Clients, model: str) -> None:
    rows = random_rows(np.random.default_rng(4), [48] * 6, 30000)
    alone = [native_bytes(clients, model, {"input_ids": [row], "offset": 9}) for row in rows]
    assert native_bytes(clients, model, {"input_ids": rows, "offset": 9}).tobytes() == np.concatenate(alone).tobytes()


@pytest.mark.parametrize("model", ["minilm", "gpt2-small"])
def test_the_doors_give_the_same_bits_for_a_real_model(clients: Clients, model: str) -> None:
    fields: dict[str, Any] = {"input_ids": random_rows(np.random.default_rng(5), [7], 30000), "offset": 3}
    expected = native_json(clients, model, fields).tobytes()
    assert {door.__name__ for door in doors_for(fields) if door(clients, model, fields).tobytes() != expected} == set()
