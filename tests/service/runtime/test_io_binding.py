"""Calls in memory that stays, as a GPU has it; here it is the CPU's. Oracles: the same graph without, and PyTorch."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from numpy.typing import NDArray

from preblock.export.exporter import export
from preblock.export.parity import prove
from preblock.export.stem import export_stem, prove_stem
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.modules.stems import PatchConfig, PatchStem
from preblock.service.core.errors import ArtifactError
from preblock.service.core.results import ChunkedTensor
from preblock.service.core.types import TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastRun, plain
from preblock.service.engine.scheduler import Scheduler
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.cuda_memory import Bytes
from preblock.service.runtime.io_binding import PART, PARTS
from preblock.service.runtime.repository import Model, Repository
from preblock.service.runtime.session import CPU, CUDA, Session

MODELS = ("gpt2-small", "minilm", "transformer-base")
Feeds = dict[str, NDArray[np.int64]]
Float32 = NDArray[np.float32]


class Memory:
    """Memory of the CPU, and what of it was given away."""

    def __init__(self) -> None:
        self.parts: list[Bytes] = []

    def __call__(self, size: int) -> Bytes:
        self.parts.append(np.full(size, 255, np.uint8))
        return self.parts[-1]

    def has(self, values: NDArray[Any]) -> bool:
        return any(np.shares_memory(values, part) for part in self.parts)


def feeds_of(session: Session, batch: int, length: int, offsets: int = 1, seed: int = 0) -> Feeds:
    random = np.random.default_rng(seed)
    shapes = {"offset": (offsets,)}
    high = {"offset": 300, "token_type_ids": 2}
    return {
        tensor.name: random.integers(0, high.get(tensor.name, 30000), shapes.get(tensor.name, (batch, length)))
        for tensor in session.inputs
    }


def same(left: Mapping[str, Float32], right: Mapping[str, Float32]) -> bool:
    return (
        all(left[name].tobytes() == values.tobytes() for name, values in right.items()) and left.keys() == right.keys()
    )


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def bound(repository: Path, memory: Memory) -> Session:
    return Session(repository / "gpt2-small/1", memory=memory)


@pytest.mark.parametrize("graph", ["model.onnx", "token.onnx"])
@pytest.mark.parametrize("model", MODELS)
def test_bound_calls_give_the_bits_of_others(repository: Path, memory: Memory, model: str, graph: str) -> None:
    bound, other = (Session(repository / model / "1", graph=graph, memory=given) for given in (memory, None))
    assert (bound.bound, other.bound) == (True, False)
    for seed, (batch, length, offsets) in enumerate([(1, 1, 1), (3, 7, 1), (3, 7, 3), (1, 200, 1), (200, 1, 200)]):
        feeds = feeds_of(other, batch, length, offsets, seed)
        found = bound.run(feeds)
        assert all(map(memory.has, found.values()))
        assert same(found, other.run(feeds))
        (output,) = (tensor.name for tensor in other.outputs)
        assert bound.run_single(feeds, output).tobytes() == found[output].tobytes()
    assert len(memory.parts) <= 2


def test_the_grid_of_proofs_holds_for_bound_calls(checkpoint: Path, repository: Path, memory: Memory) -> None:
    parity = prove(read_frontend(checkpoint), Session(repository / "minilm/1", memory=memory))
    assert 0 < len(memory.parts) <= PARTS
    assert parity.max_ulp <= 4


def test_outputs_of_other_shapes_are_right_too(tmp_path: Path, memory: Memory) -> None:
    """Angles, of which there is a row for each offset, and patches, whose number the graph computes."""
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8
    )
    transformers.LlamaModel(config).save_pretrained(tmp_path / "llama")
    folder = export(str(tmp_path / "llama"), "llama", tmp_path).folder
    bound, other = Session(folder, memory=memory), Session(folder)
    for offset in ([4], [4, 9]):
        feeds = {"input_ids": np.array([[1, 2, 3], [4, 5, 6]]), "offset": np.array(offset)}
        found = bound.run(feeds)
        assert found["rotary_cos"].shape == (len(offset), 3, 4)
        assert same(found, other.run(feeds))
        assert all(map(memory.has, found.values()))
    stem = PatchStem(PatchConfig(family="vit", width=8, channels=3, image_size=12, patch_size=4)).eval()
    (tmp_path / "stem").mkdir()
    export_stem(stem, tmp_path / "stem")
    prove_stem(stem, Session(tmp_path / "stem", memory=memory))


def test_memory_is_used_again_only_when_nobody_holds_any_of_it(
    bound: Session, repository: Path, memory: Memory
) -> None:
    other = Session(repository / "gpt2-small/1")
    calls = [feeds_of(other, 2, 5, seed=seed) for seed in range(PARTS + 3)]
    expected = [other.run(feeds)["embeddings"] for feeds in calls]
    held = [bound.run(feeds)["embeddings"][1:, ::2] for feeds in calls]
    assert [memory.has(values) for values in held] == [True] * PARTS + [False] * 3
    for values, right in zip(held, expected, strict=True):
        assert values.tobytes() == right[1:, ::2].tobytes()
    del values, held
    assert memory.has(bound.run(calls[0])["embeddings"])
    assert len(memory.parts) == PARTS


def test_a_call_that_is_too_large_has_memory_of_its_own(bound: Session, repository: Path, memory: Memory) -> None:
    tokens = PART // (4 * 768)
    feeds = feeds_of(bound, tokens, 1)
    found = bound.run(feeds)
    assert not memory.has(found["embeddings"])
    assert same(found, Session(repository / "gpt2-small/1").run(feeds))
    smaller = feeds_of(bound, tokens - 10, 1)
    assert memory.has(bound.run(smaller)["embeddings"])


def test_a_call_that_fails_keeps_no_memory(bound: Session, memory: Memory) -> None:
    feeds = feeds_of(bound, 1, 1)
    for _ in range(2 * PARTS):
        with pytest.raises(Exception, match="indices element out of data bounds"):
            bound.run(feeds | {"input_ids": np.array([[10**6]])})
    assert memory.has(bound.run(feeds)["embeddings"])
    assert len(memory.parts) <= 2


def test_where_there_is_no_more_memory_calls_are_not_bound(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    def none(size: int) -> Bytes:
        raise OSError(f"{size} bytes are too many")

    session, other = Session(repository / "minilm/1", memory=none), Session(repository / "minilm/1")
    feeds = feeds_of(other, 2, 3)
    for _ in range(3):
        assert same(session.run(feeds), other.run(feeds))
    assert [record.message for record in caplog.records] == [f"calls are not bound: {PART} bytes are too many"]


def test_threads_do_not_meet(bound: Session, repository: Path, memory: Memory) -> None:
    other = Session(repository / "gpt2-small/1")
    calls = [feeds_of(other, 1 + seed % 5, 1 + seed % 7, seed=seed) for seed in range(40)]
    expected = [other.run(feeds) for feeds in calls]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(same, pool.map(bound.run, calls), expected))
    assert len(memory.parts) <= PARTS


class Seen(Session):
    """Notes how many tokens it is run for."""

    def run(self, feeds: Mapping[str, NDArray[Any]], *outputs: Any) -> dict[str, Float32]:
        self.sizes = [*getattr(self, "sizes", ()), feeds["input_ids"].size]
        return super().run(feeds, *outputs)


def test_it_is_warmed_for_as_many_tokens_as_run_together(memory: Memory, repository: Path) -> None:
    for given, sizes in ((memory, [1, 2, 16, 128, 1024]), (None, [1])):
        session = Seen(repository / "minilm/1", memory=given)
        session.warm(feeds_of(session, 1, 1))
        assert session.sizes == sizes


def test_tables_that_a_gpu_has_no_room_for_are_refused(repository: Path) -> None:
    folder = repository / "minilm/1"
    size = (folder / "model.onnx.data").stat().st_size
    with pytest.raises(ArtifactError) as refused:
        Session(folder, provider=CUDA, gpu_mem_limit_bytes=size - 1)
    assert str(refused.value) == (
        f"model.onnx.data: got {size} bytes, allowed at most {size - 1}, which is gpu_mem_limit_bytes"
    )
    Session(folder, gpu_mem_limit_bytes=1)  # of the CPU it says nothing


@pytest.fixture
def engine(repository: Path) -> Iterator[Engine]:
    scheduler = Scheduler(1, 8)
    yield Engine(Repository(repository, CPU, 1), scheduler, Metrics(), 65536)
    scheduler.close()


@pytest.fixture
def with_memory(engine: Engine, repository: Path, memory: Memory) -> Callable[[str], Model]:
    """A model as it is served on a GPU: without the graphs that are the CPU's, and with memory that stays."""

    def model(name: str) -> Model:
        found = engine.repository.get(name)
        graphs = ("model.onnx", "token.onnx")
        sessions = {graph: Session(repository / name / "1", graph=graph, memory=memory) for graph in graphs}
        return dataclasses.replace(found, sessions=sessions, positions=None)

    return model


def rows_of(*lengths: int) -> TokenRows:
    return TokenRows(np.random.default_rng(len(lengths)).integers(0, 30000, sum(lengths)), np.array(lengths))


@pytest.mark.parametrize("name", MODELS)
def test_a_large_answer_is_computed_ahead_and_the_same(
    engine: Engine, with_memory: Callable[[str], Model], name: str, memory: Memory
) -> None:
    request = TokenRequest(input_ids=rows_of(*[200] * 40), offset=np.array([5]), in_pieces=True)
    answers = [
        asyncio.run(engine.embed(model, request)).tensors["embeddings"]
        for model in (with_memory(name), engine.repository.get(name))
    ]
    found: list[bytes] = []
    for answer in answers:
        assert isinstance(answer, ChunkedTensor)
        found.append(b"".join(piece.tobytes() for piece in answer))
    assert found[0] == found[1]
    assert len(memory.parts) >= 3


def test_requests_of_any_small_size_share_a_call_where_more_cost_nothing(
    engine: Engine, with_memory: Callable[[str], Model], memory: Memory
) -> None:
    def batches(model: Model) -> list[int]:
        found = plain(engine, model, ("embeddings",), "float32")
        assert found is not None
        runs = [
            FastRun(found, "native", rows_of(length).values.reshape(1, -1), np.array([3])) for length in (1, 150, 40)
        ]
        vectors = [run.finish() for run in runs]
        expected = [engine.repository.get("gpt2-small").run(run._member.feeds, ("embeddings",)) for run in runs]
        assert [values.tobytes() for values in vectors] == [each["embeddings"].tobytes() for each in expected]
        return [run.execution.batch for run in runs]

    assert batches(with_memory("gpt2-small")) == [3, 0, 0]
    assert batches(engine.repository.get("gpt2-small")) == [1, 1, 1]
    assert memory.parts
