"""The fast path of texts. Oracle: the general path of the engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from preblock.service.core.types import TextRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.text_path import TextPath, text_path_of
from tests.support.engines import ask_engine, open_engine


@pytest.fixture(scope="module")
def engine(tiny_repository: Path) -> Iterator[Engine]:
    with open_engine(tiny_repository, max_request_tokens=9) as engine:
        yield engine


def path_of(engine: Engine, as_numbers: bool = False, **options: Any) -> TextPath:
    request = TextRequest(text=("a",), **{"pooling": "mean", **options})
    model = engine.repository.get("bert")
    asyncio.run(ask_engine(engine, model, request))  # opens the tokenizer
    found = text_path_of(engine, model, request, as_numbers)
    assert found is not None
    return found


@pytest.mark.parametrize("options", [{}, {"pooling": "first"}, {"pooling": "last", "normalize": True}])
@pytest.mark.parametrize("text", [("a b c",), ("a b", "c"), ("a", "b")])
def test_vectors_equal_general_path(engine: Engine, options: dict[str, Any], text: tuple[str, ...]) -> None:
    path, request = path_of(engine, **options), TextRequest(text=text, **{"pooling": "mean", **options})
    run = path.start("openai", text, None, perf_counter())
    assert run is not None
    found, expected = run.result(), asyncio.run(ask_engine(engine, path.model, request))
    run.end()
    assert found.arrays["embeddings"].tobytes() == expected.arrays["embeddings"].tobytes()
    assert np.array_equal(found.lengths, expected.lengths)
    assert np.array_equal(found.next_offset, expected.next_offset)
    assert (run.record.outcome, run.record.tokens, run.record.rows) == ("ok", expected.lengths.sum(), len(text))


def test_text_over_a_limit_is_not_started(engine: Engine) -> None:
    for text, as_numbers in (
        (("a b c d e f g",), False),  # 9 tokens, positions for 8
        (("a b", "a b", "a b"), False),  # 12 tokens of at most 9
        (("a" * 2**8,), False),  # too long for the event loop
        (("a",) * 2**13, True),
    ):
        assert path_of(engine, as_numbers).start("openai", text, None, perf_counter()) is None
        assert engine.metrics.requests_running == 0


def test_options_without_fast_path_have_none(engine: Engine) -> None:
    bert, gpt = (engine.repository.get(name) for name in ("bert", "gpt"))
    for model, pooling, truncate, dtype in (
        (bert, "none", None, "float32"),
        (bert, "mean", "left", "float32"),
        (bert, "mean", None, "float16"),
        (gpt, "mean", None, "float32"),  # has no tokenizer
    ):
        request = TextRequest(text=("a",), pooling=pooling, truncate=truncate, dtype=dtype)
        assert text_path_of(engine, model, request, False) is None
