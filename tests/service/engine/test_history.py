"""N-gram embeddings: rows of any lengths, padding, positions, chunks and pooling. Oracle: the graph, row by row."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid
from preblock.service.core.types import ChunkedTensor, Chunks, EmbedResult, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import fast_path_of
from tests.support.artifacts import copy_artifact
from tests.support.engines import answer_of, ask_engine, open_engine

END, LAYERS, WIDTH = 2, 2, 64
OUTPUT = ("ngram_embeddings",)
ROW_IDS = "ngram_row_ids"
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("ngrams")
    copy_artifact("ngrams", root)
    copy_artifact("gpt", root)
    with open_engine(root) as engine:
        yield engine


def rows_of(*rows: list[int]) -> TokenRows:
    return TokenRows(np.concatenate([np.array(row, np.int64) for row in rows]), np.array([len(row) for row in rows]))


def random_rows(*lengths: int) -> list[list[int]]:
    """Return rows of ids, about one in five of them the end of a sequence."""
    random = np.random.default_rng(sum(lengths))
    return [[END if random.random() < 0.2 else int(id_) for id_ in random.integers(0, 99, n)] for n in lengths]


def run(engine: Engine, ids: list[int], context: list[int], output: str = OUTPUT[0]) -> Float32:
    """Return the vectors (L, N, E), or the row ids (L, N, H), of one row."""
    feeds = {"input_ids": np.array([ids]), "context": np.array([context])}
    graph = "ngram.ids.onnx" if output == ROW_IDS else "ngrams.onnx"
    vectors: Float32 = engine.repository.get("ngrams").sessions[graph].run(feeds)[output][0]
    return vectors


def read(result: EmbedResult, output: str = OUTPUT[0]) -> Float32:
    """Return the vectors (T, N, E), or the row ids (T, N, H), of a result, buffered or in chunks."""
    tensor = result.tensors[output]
    whole: Any = np.concatenate([part.reshape(-1) for part in tensor]) if isinstance(tensor, ChunkedTensor) else tensor
    return np.asarray(whole).reshape(-1, LAYERS, tensor.shape[-1])


CONTEXTS = [[5, 6], [END, 97], [8, END]]


@pytest.mark.parametrize("lengths", [(4, 4, 4), (1, 1, 1), (3, 1, 7), (5000, 1, 1), (4000, 4000, 4000)])
@pytest.mark.parametrize(("chunks", "dtype"), [("none", "float32"), ("sent", "float32"), ("sent", "stored")])
def test_each_row_has_its_own_history(lengths: tuple[int, ...], chunks: Chunks, dtype: str, engine: Engine) -> None:
    rows = random_rows(*lengths)
    offset = np.array([7, 1, 0])
    request = TokenRequest(
        input_ids=rows_of(*rows), offset=offset, context=rows_of(*CONTEXTS), outputs=(*OUTPUT, ROW_IDS)
    )
    request = replace(request, dtype=dtype, chunks=chunks)
    result = answer_of(engine, "ngrams", request)
    for output in request.outputs:
        expected = [run(engine, row, context, output) for row, context in zip(rows, CONTEXTS, strict=True)]
        found = read(result, output)
        assert found.dtype == expected[0].dtype
        assert np.array_equal(found, np.concatenate(expected))
    assert result.next_context is not None
    ends = [(context + row)[-2:] for row, context in zip(rows, CONTEXTS, strict=True)]
    assert result.next_context.tolist() == ends
    assert result.next_offset.tolist() == (offset + lengths).tolist()


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
def test_padding_is_no_part_of_a_history(mask: list[int], engine: Engine) -> None:
    ids, real = [11, 12, 13, 14, 15], np.array(mask, bool)
    request = TokenRequest(
        input_ids=rows_of(ids, ids),
        attention_mask=rows_of(mask, [1] * 5),
        offset=np.array([2]),
        context=rows_of([30, 31], [40, 41]),
        outputs=OUTPUT,
    )
    result = answer_of(engine, "ngrams", request)
    kept = [id_ for id_, one in zip(ids, mask, strict=True) if one]
    if kept:
        assert np.array_equal(read(result)[:5][real], run(engine, kept, [30, 31]))
    assert np.array_equal(read(result)[5:], run(engine, ids, [40, 41]))
    assert result.next_context is not None
    assert result.next_context.tolist() == [[30, 31, *kept][-2:], [14, 15]]


def test_explicit_positions_need_a_context_beyond_the_first(engine: Engine) -> None:
    def request(*first: int, **further: Any) -> TokenRequest:
        positions = rows_of(*([start, start + 1, start + 2] for start in first))
        rows = rows_of(*([5, 6, 7] for _ in first))
        return TokenRequest(input_ids=rows, position_ids=positions, outputs=OUTPUT, **further)

    assert np.array_equal(read(answer_of(engine, "ngrams", request(0))), run(engine, [5, 6, 7], [END, END]))
    found = read(answer_of(engine, "ngrams", request(4, 0, context=rows_of([8, 9], [END, END]))))
    assert np.array_equal(found[:3], run(engine, [5, 6, 7], [8, 9]))
    with pytest.raises(Invalid, match=r"^context: got nothing, .* since row 1 begins"):
        answer_of(engine, "ngrams", request(0, 4))
    masked = request(4, attention_mask=rows_of([0, 0, 0]))
    assert answer_of(engine, "ngrams", masked).next_context is not None


def test_pooled_rows_use_their_history(engine: Engine) -> None:
    rows = random_rows(3, 5, 2)
    wanted: dict[str, Any] = {"input_ids": rows_of(*rows), "context": rows_of(*CONTEXTS), "outputs": OUTPUT}
    found = answer_of(engine, "ngrams", TokenRequest(pooling="last", **wanted)).arrays["ngram_embeddings"]
    expected = [run(engine, row, context)[-1] for row, context in zip(rows, CONTEXTS, strict=True)]
    assert np.array_equal(found.reshape(3, LAYERS, WIDTH), np.stack(expected))


def test_micro_batch_keeps_each_history(engine: Engine) -> None:
    rows, model = random_rows(3, 1, 6), engine.repository.get("ngrams")

    async def ask() -> list[EmbedResult]:
        requests = [
            TokenRequest(input_ids=rows_of(row), context=rows_of(context), outputs=OUTPUT)
            for row, context in zip(rows, CONTEXTS, strict=True)
        ]
        return await asyncio.gather(*(ask_engine(engine, model, request) for request in requests))

    for result, row, context in zip(asyncio.run(ask()), rows, CONTEXTS, strict=True):
        assert np.array_equal(read(result), run(engine, row, context))


def test_other_outputs_need_no_context(engine: Engine) -> None:
    result = answer_of(engine, "ngrams", TokenRequest(input_ids=rows_of([5, 6]), offset=np.array([9])))
    assert result.next_context is None
    model = engine.repository.get("ngrams")
    assert fast_path_of(engine, model, ("embeddings",), "float32", "native") is not None
    assert fast_path_of(engine, model, OUTPUT, "float32", "native") is None
    assert fast_path_of(engine, model, OUTPUT, "float32", "native", of_stream=True) is not None


ONE, TWO = {"input_ids": rows_of([5, 6])}, {"input_ids": rows_of([5], [6]), "outputs": OUTPUT}


@pytest.mark.parametrize(
    ("model", "fields", "field", "got"),
    [
        ("ngrams", {"input_ids": rows_of([99], [6]), "context": rows_of([1, 2])}, "input_ids[0][0]", "99"),
        ("ngrams", TWO | {"context": rows_of([1, 2])}, "context", "1 rows"),
        ("ngrams", TWO | {"context": rows_of([1, 2, 3], [3, 4])}, "context[0]", "3 ids"),
        ("ngrams", TWO | {"context": rows_of([1, -2], [3, 9])}, "context[0][1]", "-2"),
        ("gpt", ONE | {"context": rows_of([1, 2])}, "context", "a value"),
        ("ngrams", ONE | {"outputs": ("embeddings", *OUTPUT), "dtype": "stored"}, "dtype", "stored"),
        ("gpt", ONE | {"dtype": "stored"}, "dtype", "stored"),
        ("ngrams", ONE | {"outputs": (ROW_IDS,), "pooling": "mean"}, "pooling", "mean"),
        ("ngrams", ONE | {"outputs": OUTPUT, "pooling": "last", "dtype": "stored"}, "pooling", "last"),
        ("ngrams", ONE | {"outputs": ("ngram_scales",)}, "output", "ngram_scales"),
        ("ngrams", ONE | {"outputs": (ROW_IDS,), "offset": np.array([3])}, "context", "nothing"),
    ],
)
def test_bad_requests_are_refused(engine: Engine, model: str, fields: dict[str, Any], field: str, got: str) -> None:
    with pytest.raises(Invalid) as refused:
        answer_of(engine, model, TokenRequest(**fields))
    assert (refused.value.field, refused.value.got) == (field, got)
