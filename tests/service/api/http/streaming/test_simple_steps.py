"""Simple steps of streams with a history. Oracle: the frames of the general path, byte for byte."""

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preblock.service.api.http.streaming import DecodeSession
from preblock.service.artifacts.manifest import Manifest, NgramTable, TableScales
from preblock.service.artifacts.names import DATA
from preblock.service.engine.engine import Engine
from preblock.service.runtime.model import ServedModel, TokenModel
from preblock.service.runtime.ngram_ids import open_ngram_ids
from preblock.service.runtime.ngram_rows import open_ngram_rows
from preblock.service.runtime.table_memory import TableMemory
from tests.service.api.http.streaming.frames import APPEND, DROP, REORDER, REWIND, operation, step
from tests.support.artifacts import copy_artifact
from tests.support.engines import open_engine
from tests.support.protocols import ERROR

END = 2
NGRAMS = {"output": ["ngram_embeddings"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ngrams")
    copy_artifact("ngrams", root)
    return root


@pytest.fixture(scope="module")
def engine(root: Path) -> Iterator[Engine]:
    with open_engine(root) as engine:
        yield engine


def as_float8(model: ServedModel, folder: Path) -> TokenModel:
    """Return the model with its tables read as float8: each row has the same bytes, and four times the numbers.

    The first bytes of the data file are the scales.
    """
    assert isinstance(model, TokenModel)
    tables = []
    for table in model.manifest.ngram_tables:
        width = 4 * table.width
        scales = TableScales(file=DATA, begin=0, dtype="float32", block_rows=table.rows, block_columns=width)
        parts = tuple(part.model_copy(update={"scales": scales}) for part in table.parts)
        tables.append(NgramTable(rows=table.rows, width=width, dtype="float8_e4m3fn", parts=parts))
    manifest = Manifest.model_validate(model.manifest.model_dump() | {"ngram_tables": tables})
    ids = open_ngram_ids(manifest, model.sessions["ngram.ids.onnx"])
    return replace(model, manifest=manifest, ngrams=open_ngram_rows(folder, manifest, ids, TableMemory(), {}))


def open_session(engine: Engine, **fields: Any) -> DecodeSession:
    return DecodeSession(engine, engine.repository.get("ngrams"), fields)


def answer_simple(session: DecodeSession, frame: bytes) -> bytes:
    """Answer a simple step as the step lane does."""
    run = session.begin(frame)
    assert run is not None
    answer = b"".join(session.finish(run))
    session.end(run, len(answer), 0.0)
    return answer


def answer(session: DecodeSession, frame: bytes) -> bytes:
    return asyncio.run(session.answer_frame(frame))


def random_step(random: np.random.Generator, rows: int, length: int, number: int) -> bytes:
    ids = random.integers(0, 99, (rows, length))
    ids[random.random(ids.shape) < 0.3] = END
    return step(ids.tolist(), number)


@pytest.mark.parametrize(
    ("outputs", "dtype"),
    [
        (["ngram_embeddings"], "stored"),
        (["ngram_row_ids", "ngram_embeddings"], "stored"),
        (["embeddings", "ngram_embeddings", "token_embeddings"], "float32"),
        (["embeddings", "token_embeddings"], "float32"),
    ],
)
def test_simple_steps_have_the_frames_of_general_ones(outputs: list[str], dtype: str, engine: Engine) -> None:
    options = {"output": outputs, "dtype": dtype, "rows": 2, "offset": [5, 0], "context": [[7, 8], [END, END]]}
    fast, general = (open_session(engine, **options) for _ in range(2))
    random, rows = np.random.default_rng(8), 2
    context = (1, 9) if fast.stream.history else ()
    changes = [
        (operation(REWIND, 8, 1), 2),
        (operation(REORDER, 1, 0, 1), 3),
        (operation(APPEND, 6, flags=8 if context else 0, context=context), 4),
        (operation(DROP, 0), 3),
        (operation(REWIND, 0), 3),
    ]
    for round_, (change, after) in enumerate(changes, 1):
        for number, length in ((0, 1), (2 * round_, 2), (0, 5), (2 * round_ + 1, 1)):
            frame = random_step(random, rows, length, number)
            assert answer_simple(fast, frame) == answer(general, frame)
        assert answer(fast, change) == answer(general, change)
        rows = after
    ragged = step([[1], [2, END], [3]])
    assert fast.begin(ragged) is None
    assert answer(fast, ragged) == answer(general, ragged)
    assert answer_simple(fast, step([[4]] * 3)) == answer(general, step([[4]] * 3))


def test_simple_steps_hold_rows_of_float8_with_scales(engine: Engine, root: Path) -> None:
    model = as_float8(engine.repository.get("ngrams"), root / "ngrams" / "1")
    for outputs, code in ((["ngram_embeddings"], 5), (["ngram_embeddings", "ngram_scales"], 255)):
        fast, general = (DecodeSession(engine, model, {"output": outputs, "dtype": "stored"}) for _ in range(2))
        for ids in ([5, 6], [7], [END, 8, 9]):
            found = answer_simple(fast, step([ids]))
            assert (found, found[20]) == (answer(general, step([ids])), code)


def test_repeated_simple_step_sees_the_history_before_it(engine: Engine) -> None:
    session = open_session(engine, **NGRAMS)
    answer_simple(session, step([[5, 6]]))
    first = answer_simple(session, step([[7]], 1))
    assert session.begin(step([[7]], 1)) is None
    assert answer(session, step([[7]], 1)) == first
    assert answer_simple(session, step([[8]], 2)) != first


def test_simple_steps_of_one_batch_keep_their_histories(engine: Engine) -> None:
    frames = [step([[7]]), step([[8, END, 9]]), step([[7]])]
    sessions, others = ([open_session(engine, **NGRAMS) for _ in frames] for _ in range(2))
    for place, session in enumerate(sessions + others):
        answer(session, step([[place % 3 + 10, place % 3 + 20]]))
    runs: list[Any] = [session.begin(frame) for session, frame in zip(sessions, frames, strict=True)]
    for session, run, other, frame in zip(sessions, runs, others, frames, strict=True):
        found = b"".join(session.finish(run))
        assert found == answer(other, frame)
        session.end(run, len(found), 0.0)
        assert run.record.batch in (0, 3)


def test_other_steps_take_the_general_path(engine: Engine) -> None:
    for fields, frame in (
        (NGRAMS, step([[5]], version=1)),
        (NGRAMS, step([[99]])),
        ({"dtype": "float16"}, step([[5]])),
    ):
        assert open_session(engine, **NGRAMS | fields).begin(frame) is None


def test_failed_simple_step_leaves_the_stream_unchanged(tmp_path: Path) -> None:
    copy_artifact("ngrams", tmp_path)
    with open_engine(tmp_path) as engine:
        session = open_session(engine, **NGRAMS)
        answer_simple(session, step([[5, 6]]))
        rows: Any = session.stream.model.ngrams
        rows.close()
        frame = answer_simple(session, step([[7]], 3))
        assert (frame[5], frame[8:12]) == (ERROR, struct.pack("<I", 3))
        assert b"a table of ngram_embeddings has changed since it was opened" in frame
        assert frame == answer(session, step([[7]], 3))
        running: Any = session.stream.running
        assert (running.offset.tolist(), running.context.tolist()) == ([2], [[5, 6]])
        outcomes = engine.metrics.statistics()["ngrams", 1].outcomes
        assert {outcome: duration.count for outcome, duration in outcomes.items()} == {"success": 1, "fail": 2}
