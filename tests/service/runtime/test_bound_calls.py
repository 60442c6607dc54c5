"""Calls that are kept ready. Oracle: the plain graph, which is proven equal to PyTorch."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import MANIFEST, POSITIONED_GRAPH, Manifest, describe, read, write
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.bound_calls import CALLS, LARGEST, OFTEN, ROOM, ROWS, ReadyCalls
from preblock.service.runtime.fused_embedding import BUILT, map_tokens
from preblock.service.runtime.position_table import map_positions, place
from preblock.service.runtime.repository import Model, Repository
from preblock.service.runtime.session import CPU, Session

Feeds = dict[str, NDArray[Any]]
Float32 = NDArray[np.float32]
WIDTH = 768
MOST = LARGEST // (4 * WIDTH)
"""Tokens of the largest call that is kept ready."""


class Graphs:
    """A model's plain graph, and the one that is given positions; where it may be, sums are made without it."""

    def __init__(self, folder: Path, without: bool = True) -> None:
        self.plain, self.positioned = Session(folder), Session(folder, graph=POSITIONED_GRAPH)
        self.positions = map_positions(folder, read(Manifest, folder / MANIFEST))
        self.tokens = map_tokens(folder, self.positions) if without else None

    def calls(self, often: int = 0) -> ReadyCalls:
        return ReadyCalls(self.positioned, self.positions, self.tokens, often)

    def feeds(self, batch: int, length: int, *offsets: int) -> Feeds:
        random = np.random.default_rng([batch, length, *offsets])
        feeds = {"input_ids": random.integers(0, 30000, (batch, length)), "offset": np.array(offsets or [0])}
        if "token_type_ids" in {tensor.name for tensor in self.plain.inputs}:
            feeds["token_type_ids"] = random.integers(0, 2, (batch, length))
        return feeds

    def expected(self, feeds: Feeds) -> bytes:
        return self.plain.run(feeds)["embeddings"].tobytes()


def feeds_of(batch: int, length: int, offset: int = 0) -> Feeds:
    ids = np.random.default_rng(batch * length + offset).integers(0, 30000, (batch, length))
    return {"input_ids": ids, "offset": np.array([offset])}


def run(calls: ReadyCalls, feeds: Feeds) -> Float32:
    found = calls.run(feeds)
    assert found is not None
    return found


def address(values: Float32) -> int:
    return int(values.__array_interface__["data"][0])


@pytest.fixture(params=["in one pass", "by onnxruntime"])
def without(request: pytest.FixtureRequest) -> bool:
    wanted: bool = request.param == "in one pass"
    if wanted and not BUILT:
        pytest.skip("_fused_embedding.c was not built")
    return wanted


@pytest.fixture(params=["gpt2-small", "transformer-base", "minilm"])
def graphs(request: pytest.FixtureRequest, repository: Path, without: bool) -> Graphs:
    graphs = Graphs(repository / request.param / "1", without)
    assert (graphs.tokens is not None) == (without and request.param != "minilm")  # which has a norm behind the sum
    return graphs


@pytest.fixture
def gpt2(repository: Path, without: bool) -> Graphs:
    return Graphs(repository / "gpt2-small/1", without)


def test_sums_are_made_in_place_where_positions_are_added_last(repository: Path) -> None:
    assert {name: Graphs(repository / name / "1").calls().in_place for name in ("gpt2-small", "minilm")} == {
        "gpt2-small": True,
        "minilm": False,
    }


def test_they_have_the_bits_of_the_plain_graph(graphs: Graphs) -> None:
    sums = graphs.calls()
    for shape in ((1, 1), (3, 7), (1, 200), (200, 1), (2, 300), (4, 128), (1, MOST // 2)):
        for offset in (0, 17, 17, 3):
            feeds = graphs.feeds(*shape, offset)
            found = run(sums, feeds)
            assert found.shape == (*shape, found.shape[2])
            assert address(found) % 64 == 0
            assert found.tobytes() == graphs.expected(feeds)


def test_rows_of_one_token_have_the_bits_of_the_plain_graph_at_offsets_of_their_own(graphs: Graphs) -> None:
    calls, last = graphs.calls(), graphs.positions.shape[1] - 1
    for offsets in ((0, last), (last, 3, 3), (5, 5), (9, 0, 1, 2), tuple(range(ROWS))):
        feeds = graphs.feeds(len(offsets), 1, *offsets)
        found, again = run(calls, feeds), run(calls, feeds)
        assert address(found) % 64 == 0
        assert found.tobytes() == again.tobytes() == graphs.expected(feeds)
    assert calls.run(graphs.feeds(ROWS + 1, 1, *range(ROWS + 1))) is None
    assert calls.run(graphs.feeds(2, 2, 0, 1)) is None
    both = graphs.feeds(2, 1, 4), graphs.feeds(2, 1, 4, 4)
    assert [run(calls, feeds).tobytes() for feeds in both] == [graphs.expected(feeds) for feeds in both]


def test_a_call_is_made_ready_when_its_shape_came_often(gpt2: Graphs) -> None:
    sums = gpt2.calls(OFTEN)
    for length in (2, 3):
        for _ in range(OFTEN):
            assert sums.run(feeds_of(1, length)) is None
    for length in (3, 2):
        feeds = feeds_of(1, length)
        assert run(sums, feeds).tobytes() == gpt2.expected(feeds)


def test_shapes_that_never_come_again_leave_nothing(gpt2: Graphs) -> None:
    sums = gpt2.calls(OFTEN)
    for number in range(3000):
        assert sums.run({"input_ids": np.zeros((1 + number, 1), np.int64), "offset": np.array([0])}) is None
    assert len(sums._came) < 1000
    assert not sums._ready


def test_memory_is_used_again_only_when_nobody_holds_any_of_it(gpt2: Graphs) -> None:
    sums, calls = gpt2.calls(), [feeds_of(1, 200, offset) for offset in range(CALLS)]
    held = [run(sums, feeds)[:, 1:, ::2] for feeds in calls]
    assert sums.run(feeds_of(1, 200, 99)) is None
    for values, feeds in zip(held, calls, strict=True):
        expected = np.frombuffer(gpt2.expected(feeds), np.float32).reshape(1, 200, WIDTH)
        assert values.tobytes() == expected[:, 1:, ::2].tobytes()
    places = {address(values) for values in held}
    assert len(places) == CALLS
    del values, held
    assert address(run(sums, calls[0])[:, 1:]) in places


def test_what_is_ready_takes_no_more_than_its_room(gpt2: Graphs) -> None:
    sums = gpt2.calls()
    assert sums.run(feeds_of(1, MOST + 1)) is None
    shapes = [(batch, MOST // batch) for batch in range(1, 3 + ROOM // (CALLS * LARGEST))]
    first = run(sums, feeds_of(*shapes[0]))
    for shape in shapes:
        feeds = feeds_of(*shape)
        assert run(sums, feeds).tobytes() == gpt2.expected(feeds)
    assert CALLS * LARGEST <= sum(ready.size for ready in sums._ready.values()) <= ROOM
    assert (*shapes[0], 1) not in sums._ready
    assert first.tobytes() == gpt2.expected(feeds_of(*shapes[0]))
    del first  # its shape is forgotten, and nobody minds


def test_ids_that_lie_apart_are_taken_in_order(gpt2: Graphs) -> None:
    feeds = feeds_of(2, 300)
    apart = np.repeat(feeds["input_ids"], 3, axis=1)[:, ::3]
    assert not apart.flags.c_contiguous
    sums = gpt2.calls()
    assert run(sums, feeds | {"input_ids": apart}).tobytes() == gpt2.expected(feeds)


def test_both_outputs_have_memory_of_their_own_where_both_are_wanted(gpt2: Graphs) -> None:
    feeds = feeds_of(1, 400)
    given = place(feeds, gpt2.positions)
    found = gpt2.positioned.run(given)
    assert found["embeddings"].tobytes() == gpt2.expected(feeds)
    assert (found["summand"] + given["position_embeddings"]).tobytes() == gpt2.expected(feeds)
    assert not np.shares_memory(found["summand"], found["embeddings"])


def test_a_call_that_fails_keeps_no_memory(gpt2: Graphs) -> None:
    sums, feeds = gpt2.calls(), feeds_of(1, 400)
    for _ in range(2 * CALLS):
        with pytest.raises(Exception, match=r"indices element out of data bounds|id: got 1000000, allowed 0 to 50256"):
            sums.run(feeds | {"input_ids": np.full((1, 400), 10**6)})
    assert run(sums, feeds).tobytes() == gpt2.expected(feeds)


def test_threads_do_not_meet(gpt2: Graphs) -> None:
    sums, calls = gpt2.calls(), [feeds_of(1 + seed % 3, 200 + seed % 5, seed) for seed in range(40)]
    expected = [gpt2.expected(feeds) for feeds in calls]

    def found(feeds: Feeds) -> bytes | None:
        values = sums.run(feeds)
        return None if values is None else values.tobytes()

    with ThreadPoolExecutor(2 * CALLS) as pool:
        for _ in range(5):
            answers = list(pool.map(found, calls))
            assert any(answers)
            assert all(answer in (None, right) for answer, right in zip(answers, expected, strict=True))


def test_models_keep_calls_ready(repository: Path) -> None:
    for model in Repository(repository, CPU, 1).all():
        assert isinstance(model, Model)
        feeds: Feeds = feeds_of(1, 50, 2) | {name: np.zeros((1, 50), np.int64) for name in model.manifest.indices}
        expected = model.sessions["model.onnx"].run(feeds)["embeddings"].tobytes()
        places = []
        for _ in range(OFTEN + 3):
            found = model.run(feeds, ("embeddings",))["embeddings"]
            assert found.tobytes() == expected
            places.append(address(found))
        assert model._ready is not None
        assert [*model._ready._ready] == [(1, 50, 1)]
        assert places[-1] in places[-3:-1]


def changed(folder: Path, to: Path, summand: str | None) -> Path:
    """Copy an artifact whose graph has another `summand`, or none, and return its repository."""
    shutil.copytree(folder, to / "changed/1")
    folder = to / "changed/1"
    graph = onnx.load(folder / POSITIONED_GRAPH, load_external_data=False)
    if summand is None:
        del graph.graph.output[1]
    else:
        for node in graph.graph.node:
            for names in (node.input, node.output):
                names[:] = ["other" if name == "summand" else name for name in names]
        graph.graph.node.append(onnx.helper.make_node(summand, ["embeddings"], ["summand"]))
    onnx.save(graph, folder / POSITIONED_GRAPH)
    manifest = read(Manifest, folder / MANIFEST)
    told = manifest.graphs[POSITIONED_GRAPH]
    outputs = told.outputs[:1] if summand is None else told.outputs
    graphs = dict(manifest.graphs) | {POSITIONED_GRAPH: told.model_copy(update={"outputs": outputs})}
    files = dict(manifest.files) | {POSITIONED_GRAPH: describe(folder / POSITIONED_GRAPH)}
    write(manifest.model_copy(update={"graphs": graphs, "files": files}), folder / MANIFEST)
    return to


def test_a_graph_that_returns_no_summand_is_served(repository: Path, tmp_path: Path) -> None:
    (model,) = Repository(changed(repository / "gpt2-small/1", tmp_path, None), CPU, 1).all()
    assert isinstance(model, Model)
    assert model._ready is not None
    assert not model._ready.in_place
    feeds = {"input_ids": np.full((1, 400), 5), "offset": np.array([3])}
    found = model.run(feeds, ("embeddings",))["embeddings"]
    assert found.tobytes() == model.sessions["model.onnx"].run(feeds)["embeddings"].tobytes()


def test_a_graph_that_returns_another_summand_is_refused(repository: Path, tmp_path: Path) -> None:
    """Both outputs in one place then hold what was written last."""
    with pytest.raises(ArtifactError, match=r"positions: got .*, allowed the table of model\.onnx"):
        Repository(changed(repository / "gpt2-small/1", tmp_path, "Neg"), CPU, 1)
