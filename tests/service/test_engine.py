"""The path from request to answer. Oracles: positions counted one by one, torch's rounding, a call of the session."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from incipit.service.batching import Scheduler
from incipit.service.engine import Call, Engine, cast, plan
from incipit.service.errors import Invalid, TooLarge
from incipit.service.manifest import Manifest
from incipit.service.messages import Request
from incipit.service.metrics import Metrics
from incipit.service.repository import Repository
from incipit.service.runtime import CPU
from incipit.service.wire.native import read_embed
from tests.service.doors import Fields
from tests.service.random_requests import positions_of, random_request

TORCH_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def engine(tiny_repository: Path) -> Iterator[Engine]:
    scheduler = Scheduler(1, 8)
    yield Engine(Repository(tiny_repository, CPU, 1), scheduler, Metrics(), 65536)
    scheduler.close()


@pytest.fixture(scope="module")
def bert(engine: Engine) -> Manifest:
    return engine.repository.get("bert").manifest


@pytest.fixture(scope="module")
def gpt(engine: Engine) -> Manifest:
    return engine.repository.get("gpt").manifest


def planned(fields: Fields, manifest: Manifest) -> Call:
    request = read_embed(fields).request
    assert isinstance(request, Request)
    return plan(request, manifest)


def feeds_of(manifest: Manifest, **fields: Any) -> dict[str, Any]:
    return planned(fields, manifest).feeds


def test_equal_rows_run_as_one_rectangle_with_one_offset(bert: Manifest) -> None:
    feeds = feeds_of(bert, input_ids=[[1, 2], [3, 4]], offset=5)
    assert feeds["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert feeds["offset"].tolist() == [5]
    assert feeds["token_type_ids"].tolist() == [[0, 0], [0, 0]]


def test_equal_rows_with_an_offset_each_run_as_one_rectangle(bert: Manifest) -> None:
    feeds = feeds_of(bert, input_ids=[[1, 2], [3, 4]], offset=[5, 0])
    assert (feeds["input_ids"].shape, feeds["offset"].tolist()) == ((2, 2), [5, 0])


def test_a_mask_of_ones_is_no_mask(bert: Manifest) -> None:
    assert feeds_of(bert, input_ids=[[1, 2]], attention_mask=[[1, 1]])["input_ids"].shape == (1, 2)


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"input_ids": [[1, 2], [3]], "offset": [5, 0]}, [5, 6, 0]),
        ({"input_ids": [[1, 2], [3]], "offset": 2}, [2, 3, 2]),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[0, 1, 1]], "offset": 4}, [0, 4, 5]),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [0, 1]], "offset": [4, 1]}, [4, 5, 0, 1]),
        ({"input_ids": [[1, 2]], "position_ids": [[7, 3]]}, [7, 3]),
        ({"input_ids": [[1, 2]], "position_ids": [[7, 3]], "attention_mask": [[0, 1]]}, [7, 3]),
    ],
)
def test_the_rest_runs_as_rows_of_one_token_at_their_positions(
    bert: Manifest, fields: dict[str, Any], positions: list[int]
) -> None:
    feeds = feeds_of(bert, **fields)
    assert feeds["input_ids"].tolist() == [[id_] for row in fields["input_ids"] for id_ in row]
    assert feeds["offset"].tolist() == positions


def test_positions_of_random_requests_are_those_counted_one_by_one(bert: Manifest) -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        fields = random_request(random, "bert")
        call = planned(fields, bert)
        shape = call.feeds["input_ids"].shape
        found = np.broadcast_to(call.feeds["offset"][:, None], shape) + np.arange(shape[1])
        assert found.ravel().tolist() == np.concatenate(positions_of(fields)).tolist(), fields


def test_next_offset_of_random_requests_counts_real_tokens(gpt: Manifest) -> None:
    random = np.random.default_rng(1)
    for _ in range(300):
        fields = random_request(random, "gpt")
        positions = positions_of(fields)
        starts = np.broadcast_to(fields.get("offset", 0), len(positions)).tolist()
        expected = []
        for index, row in enumerate(positions):
            mask = fields["attention_mask"][index] if "attention_mask" in fields else [1] * len(row)
            after = [position + 1 for position, real in zip(row, mask, strict=True) if real]
            expected.append(max(after, default=starts[index]))
        assert planned(fields, gpt).next_offset.tolist() == expected, fields


def test_a_graph_without_segments_gets_none(gpt: Manifest) -> None:
    assert "token_type_ids" not in feeds_of(gpt, input_ids=[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cast_rounds_every_kind_of_value_as_torch_does(dtype: str) -> None:
    # Random bits: every exponent, subnormals, and ties, whose lower half is 0x8000 or 0x1000.
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    ties = np.concatenate([bits, bits & 0xFFFF8000 | 0x8000, bits & 0xFFFFE000 | 0x1000])
    vectors = ties.view(np.float32)
    oracle = torch.tensor(vectors).to(TORCH_TYPES[dtype])
    fits = torch.isfinite(oracle).numpy()
    found = cast(vectors[fits].reshape(1, -1), dtype)
    assert found.tobytes() == oracle[torch.from_numpy(fits)].view(torch.uint8).numpy().tobytes()


def test_float32_is_not_copied() -> None:
    vectors = np.ones((1, 2), np.float32)
    assert cast(vectors, "float32") is vectors


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65520.0), ("float16", -7e4), ("bfloat16", 3.4e38)])
def test_a_value_that_does_not_fit_is_refused(dtype: str, value: float) -> None:
    with pytest.raises(Invalid, match=f"dtype: got {dtype}, allowed float32, since a value of"):
        cast(np.array([[1, value]], np.float32), dtype)


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65504.0), ("float16", np.inf), ("float16", np.nan)])
def test_the_largest_value_and_what_was_infinite_before_are_kept(dtype: str, value: float) -> None:
    found = cast(np.array([[value]], np.float32), dtype)
    assert np.array_equal(found.astype(np.float32), [[value]], equal_nan=True)


def test_an_answer_is_what_the_session_gives(engine: Engine) -> None:
    model = engine.repository.get("gpt")
    answer = asyncio.run(engine.embed(model, read_embed({"input_ids": [[1, 2], [3, 4]], "offset": [1, 3]}).request))
    feeds = {"input_ids": np.array([[1, 2], [3, 4]]), "offset": np.array([1, 3])}
    oracle = model.sessions["model.onnx"].run(feeds)["embeddings"]
    assert answer.tensors["embeddings"].tobytes() == oracle.tobytes()
    assert answer.tensors["embeddings"].shape == (2, 2, 4)
    assert (answer.model, answer.version, answer.dtype) == ("gpt", 1, "float32")
    assert answer.next_offset.tolist() == [3, 5]


def test_a_request_is_checked_before_it_runs(engine: Engine) -> None:
    model = engine.repository.get("gpt")
    with pytest.raises(Invalid, match=r"input_ids\[0\]: got -1"):
        asyncio.run(engine.embed(model, read_embed({"input_ids": [-1]}).request))
    with pytest.raises(TooLarge):
        asyncio.run(engine.embed(model, read_embed({"input_ids": [[0]] * 65537}).request))


def test_requests_of_many_tasks_do_not_mix(engine: Engine) -> None:
    model = engine.repository.get("bert")
    requests = [read_embed({"input_ids": [[i % 11] * (i % 8 + 1)]}).request for i in range(50)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(engine.embed(model, request) for request in requests))

    together = [answer.tensors["embeddings"].tobytes() for answer in asyncio.run(all_at_once())]
    assert together == [asyncio.run(engine.embed(model, r)).tensors["embeddings"].tobytes() for r in requests]
