"""Compares an exported front-end, run in a bare onnxruntime, with its published model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from preblock.export.parity import difference
from preblock.models.config import FrontEndConfig
from preblock.service.artifacts.names import TOKEN_GRAPHS
from preblock.service.runtime.session import Session
from tests.families import stems
from tests.families.library_models import TransformersModel
from tests.families.published_models import VOCABULARY

BATCH, FED, NEXT = 2, 9, 5


@dataclass(frozen=True)
class Difference:
    """The largest difference of one case, absolute and in ULP of the largest value of the row."""

    case: str
    max_abs: float
    max_ulp: float


def compare(model: TransformersModel, artifact: Path, config: FrontEndConfig) -> Iterator[Difference]:
    """Yield plain, left-padded and right-padded rows, rows with segments, and rows continued after 9 tokens by 5."""
    session = onnxruntime.InferenceSession(artifact / "model.onnx", providers=["CPUExecutionProvider"])
    for case in ("plain", "left", "right", *(["segments"] if config.indices else []), "continued"):
        ids, mask = _ids(config, case)
        random = np.random.default_rng(1)
        indices = {
            name: random.integers(0, count, ids.shape) * (case == "segments") for name, count in config.indices.items()
        }
        given = mask if config.needs_mask else None
        expected = model.first_block_input(ids, given, **(indices if case == "segments" else {}))
        chunks = [(0, FED), (FED, FED + NEXT)] if case == "continued" else [(0, FED + NEXT)]
        found = [_run(session, ids, mask, indices, config, begin, end) for begin, end in chunks]
        yield Difference(case, *difference(np.concatenate(found, axis=1), expected))


def check_rows_of_one(artifact: Path, config: FrontEndConfig) -> None:
    """Compare requests of several lengths and offsets with calls of one token each, bit for bit."""
    random = np.random.default_rng(3)
    calls = []
    for batch, length, offset in ((1, 1, 0), (1, 7, 3), (3, 1, 11), (2, 5, 6), (1, 1, 13)):
        ids = random.integers(3, VOCABULARY - 1, (batch, length))
        feeds = {name: random.integers(0, count, ids.shape) for name, count in config.indices.items()}
        calls.append(feeds | {"input_ids": ids, "attention_mask": ids * 0 + 1, "offset": np.array([offset])})
        if config.ngrams is not None:
            calls[-1]["context"] = random.integers(0, VOCABULARY, (batch, config.ngrams.history))
    names = [name for name in calls[0] if name not in ("offset", "context")]
    together = {name: np.concatenate([call[name].reshape(-1, 1) for call in calls]) for name in names}
    if config.ngrams is not None:
        together["context"] = np.concatenate([_token_contexts(call["context"], call["input_ids"]) for call in calls])
    positions = [call["offset"] + np.indices(call["input_ids"].shape)[1] for call in calls]
    together["offset"] = np.concatenate([rows.ravel() for rows in positions])
    for graph in filter(lambda name: (artifact / name).exists(), TOKEN_GRAPHS):
        session = Session(artifact, graph=graph)
        alone = [session.run(call) for call in calls]
        for name, found in session.run(together).items():
            expected = [
                np.broadcast_to(one[name], (*call["input_ids"].shape, *found.shape[2:])).reshape(
                    -1, 1, *found.shape[2:]
                )
                for one, call in zip(alone, calls, strict=True)
            ]
            assert found.tobytes() == np.concatenate(expected).tobytes(), (graph, name)


def _token_contexts(context: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ids before each token of some rows, one row for each."""
    rows = [[*before, *row] for before, row in zip(context.tolist(), ids.tolist(), strict=True)]
    history = context.shape[1]
    return np.array([row[end - history : end] for row in rows for end in range(history, len(row))])


def compare_rotary(model: TransformersModel, artifact: Path) -> Iterator[Difference]:
    """Yield the largest difference, in ULP of 1, of each rotary output: in one pass, and after 9 tokens for 5 more."""
    session = onnxruntime.InferenceSession(artifact / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = {node.name for node in session.get_inputs()}
    names = [node.name for node in session.get_outputs()][1:]
    ids = np.random.default_rng(0).integers(3, VOCABULARY - 1, (BATCH, FED + NEXT))
    expected = model.rotary(ids)
    assert sorted(expected) == sorted(names)
    for case, chunks in (("plain", [(0, FED + NEXT)]), ("continued", [(0, FED), (FED, FED + NEXT)])):
        found: list[list[NDArray[np.float32]]] = []
        for begin, end in chunks:
            chunk = ids[:, begin:end]
            feeds = {"input_ids": chunk, "offset": np.array([begin])}
            feeds |= {"token_type_ids": chunk * 0, "attention_mask": chunk * 0 + 1}
            found.append(session.run(names, {name: feeds[name] for name in inputs}))
        for name, *parts in zip(names, *found, strict=True):
            max_abs = float(np.abs(np.concatenate(parts, axis=1) - expected[name]).max())
            yield Difference(f"{name}, {case}", max_abs, max_abs / float(np.spacing(np.float32(1))))


def _ids(config: FrontEndConfig, case: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ids (B, 14) and their mask; a continued row has left padding, which must not advance positions."""
    legal = np.setdiff1d(np.arange(3, VOCABULARY), config.refused_ids)
    ids = np.random.default_rng(0).choice(legal, (BATCH, FED + NEXT))
    mask = np.ones_like(ids)
    if case in ("left", "continued"):
        mask[0, :4] = 0
    elif case == "right":
        mask[0, -4:] = 0
    if config.padding_idx is not None:
        ids[mask == 0] = config.padding_idx
    return ids, mask


def _run(
    session: onnxruntime.InferenceSession,
    ids: NDArray[np.int64],
    mask: NDArray[np.int64],
    indices: dict[str, NDArray[np.int64]],
    config: FrontEndConfig,
    begin: int,
    end: int,
) -> NDArray[np.float32]:
    """Run one chunk; its offset is the number of real tokens before it, in each row."""
    skips = config.counts != "slots"
    offset = mask[:, :begin].sum(1) if skips else np.full(len(ids), begin)
    feeds = {"input_ids": ids[:, begin:end], "offset": offset}
    feeds |= {name: index[:, begin:end] for name, index in indices.items()}
    if config.needs_mask:
        feeds["attention_mask"] = mask[:, begin:end]
    vectors: NDArray[np.float32] = session.run(None, feeds)[0]
    return vectors


def compare_stem(name: str, artifact: Path) -> list[Difference]:
    """Compare an artifact with the input of the model's first block, at the native size and other image sizes."""
    session = onnxruntime.InferenceSession(artifact / "model.onnx", providers=["CPUExecutionProvider"])
    patch = {"vit": 8, "vision": 6, "clip": 6}.get(name, 0)
    sizes = [None, *((3 * patch, 5 * patch), (6 * patch, 4 * patch))] if patch else [None]
    differences = []
    for size in sizes:
        values = stems.sample(name, size=size)
        (given,) = session.get_inputs()
        found = session.run(None, {given.name: values.numpy()})[0]
        label = "native" if size is None else f"{size[0]} by {size[1]}"
        differences.append(Difference(label, *difference(found, stems.entering_block_0(name, values).numpy())))
    return differences
