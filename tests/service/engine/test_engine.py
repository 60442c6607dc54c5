"""The path from request to answer. Oracles: positions counted one by one, torch's rounding, requests asked alone."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from preblock.service.artifacts.manifest import Manifest
from preblock.service.codecs.native_json import read_embed
from preblock.service.core.errors import Invalid
from preblock.service.core.types import EmbedResult, Int64, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.planning import plan
from preblock.service.engine.vectors import cast
from preblock.service.observability.metrics import INFER
from tests.support.artifacts import copy_artifact
from tests.support.engines import ask_engine, open_engine
from tests.support.late import torch
from tests.support.protocols import Fields
from tests.support.random_requests import positions_of, random_request


@pytest.fixture(scope="module")
def engine(tiny_repository: Path) -> Iterator[Engine]:
    with open_engine(tiny_repository) as engine:
        yield engine


def planned(fields: Fields, manifest: Manifest) -> tuple[dict[str, Int64], Int64]:
    request = read_embed(fields).request
    assert isinstance(request, TokenRequest)
    return plan(request, manifest)


def test_equal_rows_run_as_one_rectangle(engine: Engine) -> None:
    ids = [[1, 2], [3, 4]]
    for fields, offset in (
        ({"offset": 5}, [5]),
        ({"offset": [5, 0]}, [5, 0]),
        ({"attention_mask": [[1, 1], [1, 1]]}, [0]),  # as without a mask
    ):
        feeds, _ = planned({"input_ids": ids} | fields, engine.repository.get("bert").manifest)
        assert (feeds["input_ids"].tolist(), feeds["offset"].tolist()) == (ids, offset), fields


def test_random_requests_have_positions_counted_one_by_one(engine: Engine) -> None:
    random = np.random.default_rng(0)
    for name in ("bert", "gpt"):
        manifest = engine.repository.get(name).manifest
        for _ in range(300):
            fields = random_request(random, name)
            feeds, following = planned(fields, manifest)
            shape, expected = feeds["input_ids"].shape, positions_of(fields)
            found = np.broadcast_to(feeds["offset"][:, None], shape) + np.arange(shape[1])
            assert found.ravel().tolist() == np.concatenate(expected).tolist(), fields
            assert feeds["input_ids"].ravel().tolist() == np.concatenate(fields["input_ids"]).tolist(), fields
            assert following.tolist() == next_offsets(fields, expected), fields


def next_offsets(fields: Fields, positions: list[list[int]]) -> list[int]:
    """Return, for each row, the position after its last real token."""
    starts = np.broadcast_to(fields.get("offset", 0), len(positions)).tolist()
    masks = fields.get("attention_mask", [[1] * len(row) for row in positions])
    rows = zip(positions, masks, starts, strict=True)
    return [
        max((position + 1 for position, real in zip(row, mask, strict=True) if real), default=start)
        for row, mask, start in rows
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cast_rounds_every_value_like_torch(dtype: str) -> None:
    # Random bits: every exponent, subnormals, and ties, with a lower half of 0x8000 or 0x1000.
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    ties = np.concatenate([bits, bits & 0xFFFF8000 | 0x8000, bits & 0xFFFFE000 | 0x1000])
    vectors = ties.view(np.float32)
    oracle = torch.tensor(vectors).to(getattr(torch, dtype))
    fits = torch.isfinite(oracle).numpy()
    found = cast(vectors[fits].reshape(1, -1), dtype)
    assert found.tobytes() == oracle[torch.from_numpy(fits)].view(torch.uint8).numpy().tobytes()


def test_cast_of_too_large_value_is_rejected() -> None:
    for dtype, value in (("float16", 65520.0), ("float16", -7e4), ("bfloat16", 3.4e38)):
        with pytest.raises(Invalid) as refused:
            cast(np.array([[1, value]], np.float32), dtype)
        assert (refused.value.field, refused.value.got) == ("dtype", dtype)
    for value in (65504.0, np.inf, np.nan):
        found = cast(np.array([[value]], np.float32), "float16")
        assert np.array_equal(found.astype(np.float32), [[value]], equal_nan=True)


def test_cast_to_float32_does_not_copy() -> None:
    vectors = np.ones((1, 2), np.float32)
    assert cast(vectors, "float32") is vectors


def executions(engine: Engine, model: str) -> tuple[int, int, dict[int | None, int]]:
    """Return how many rows of a model were answered, by how many runs, and how many runs had how many rows."""
    found = engine.metrics.statistics()[model, max(engine.repository.versions(model))]
    batches = {rows: duration.count for (rows, phase), duration in found.stages.items() if phase == INFER}
    assert sum(batches.values()) == found.outcomes["success"].count
    batches.pop(0, None)  # requests in the run of another one
    return found.rows, sum(batches.values()), batches


def answers_together(engine: Engine, asked: list[tuple[str, str | None, TokenRequest]]) -> list[EmbedResult]:
    async def together() -> list[EmbedResult]:
        models = [engine.repository.get(name, version) for name, version, _ in asked]
        return await asyncio.gather(*(ask_engine(engine, m, r) for m, (_, _, r) in zip(models, asked, strict=True)))

    return asyncio.run(together())


def bits(answer: EmbedResult) -> list[object]:
    arrays = {"next": answer.next_offset, "lengths": answer.lengths, **answer.arrays}
    return [answer.version, answer.dtype, *((name, array.shape, array.tobytes()) for name, array in arrays.items())]


def test_batched_requests_equal_single_requests_bit_for_bit(tiny_repository: Path) -> None:
    """Both versions of one model and another, every output, type and pooling, random company."""
    with open_engine(tiny_repository) as engine:
        random, asked = np.random.default_rng(5), []
        for _ in range(300):
            name, version = [("bert", "1"), ("bert", "2"), ("gpt", None)][random.integers(3)]
            outputs = [["embeddings"], ["token_embeddings"], ["embeddings", "token_embeddings"]]
            dtypes = ["float32", "float16", "bfloat16"]
            options = {"output": outputs[random.integers(3)], "dtype": dtypes[random.integers(3)]}
            fields = random_request(random, name)
            request = read_embed(fields | options).request
            assert isinstance(request, TokenRequest)
            pooled = "attention_mask" not in fields and random.integers(4) == 0
            asked.append((name, version, replace(request, pooling="mean") if pooled else request))
        together = answers_together(engine, asked)
        assert sum(executions(engine, name)[1] for name in ("bert", "gpt")) < 20
        for answer, (name, version, request) in zip(together, asked, strict=True):
            alone = asyncio.run(ask_engine(engine, engine.repository.get(name, version), request))
            assert bits(answer) == bits(alone)


def test_failing_requests_do_not_fail_their_batch(tmp_path: Path) -> None:
    """One has an id beyond the vocabulary, and one a value beyond its dtype."""
    copy_artifact("gpt-huge-value", tmp_path, "gpt")
    with open_engine(tmp_path) as engine:
        model = engine.repository.get("gpt")
        requests = [read_embed({"input_ids": [id_], "dtype": "float16"}).request for id_ in (1, 3, 7, 2)]

        async def together() -> list[EmbedResult | BaseException]:
            return await asyncio.gather(*(ask_engine(engine, model, r) for r in requests), return_exceptions=True)

        first, *refused, last = asyncio.run(together())
        assert [type(error) for error in refused] == [Invalid, Invalid]
        for answer, request in ((first, requests[0]), (last, requests[-1])):
            assert isinstance(answer, EmbedResult)
            assert bits(answer) == bits(asyncio.run(ask_engine(engine, model, request)))


def test_models_with_projection_are_not_batched(tmp_path: Path) -> None:
    copy_artifact("projected", tmp_path)
    with open_engine(tmp_path) as engine:
        request = read_embed({"input_ids": [1]}).request
        assert isinstance(request, TokenRequest)
        answers_together(engine, [("projected", None, request)] * 3)
        assert executions(engine, "projected") == (3, 3, {1: 3})
