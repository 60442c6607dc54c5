"""The fast path of texts. Oracle: the general path of the engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from preblock.service.api.prepared import prepare_texts
from preblock.service.core.types import TextRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastRun, fast_path_of, tokenize_short
from tests.support.engines import ask_engine, open_engine


@pytest.fixture(scope="module")
def engine(tiny_repository: Path) -> Iterator[Engine]:
    with open_engine(tiny_repository, max_request_tokens=9) as engine:
        yield engine


def start(engine: Engine, text: tuple[str, ...], **options: Any) -> FastRun | None:
    model, request = engine.repository.get("bert"), TextRequest(text=("a",), **{"pooling": "mean", **options})
    asyncio.run(ask_engine(engine, model, request))  # opens the tokenizer
    path = fast_path_of(engine, model, request.outputs, request.dtype, "openai", pooling=request.pooling)
    call = tokenize_short(engine, model, text, request)
    assert path is not None
    return None if call is None else path.start(call, perf_counter())


@pytest.mark.parametrize("options", [{}, {"pooling": "first"}, {"pooling": "last", "normalize": True}])
@pytest.mark.parametrize("text", [("a b c",), ("a b", "c"), ("a", "b")])
def test_vectors_equal_general_path(engine: Engine, options: dict[str, Any], text: tuple[str, ...]) -> None:
    request, run = TextRequest(text=text, **{"pooling": "mean", **options}), start(engine, text, **options)
    assert run is not None
    found, expected = run.result(), asyncio.run(ask_engine(engine, engine.repository.get("bert"), request))
    run.end()
    assert [values.tobytes() for values in found] == [expected.arrays["embeddings"].tobytes()]
    assert (run.record.outcome, run.record.tokens, run.record.rows) == ("ok", expected.lengths.sum(), len(text))


def test_text_over_a_limit_is_not_started(engine: Engine) -> None:
    for text in (
        ("a b c d e f g",),  # 9 tokens, positions for 8
        ("a b", "a b", "a b"),  # 12 tokens of at most 9
        ("a" * 2**8,),  # too long for the event loop
    ):
        assert start(engine, text) is None
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
        assert prepare_texts(engine, model, request, b'{"input": "a"}', False, lambda *_: []) is None
