"""The parity proof accepts equal graphs and finds differences."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from preblock.export.errors import ExportError, ParityError
from preblock.export.exporter import export_loaded
from preblock.export.outputs import OUTPUTS
from preblock.export.parity import allowed_ulp, difference
from preblock.export.parity_cases import GridCase, feeds_of, grid
from preblock.export.source import LoadedSource
from preblock.export.torch_reference import TorchReference
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.embeddings import BertEmbeddings, GPT2Embeddings, TransformerEmbedding
from preblock.models.frontend import FrontEnd
from preblock.models.steps import Norm, Project, Tokens
from preblock.service.artifacts.io import describe, read, write
from preblock.service.artifacts.manifest import Manifest, Source
from preblock.service.artifacts.names import EMBEDDINGS, GRAPH
from preblock.service.artifacts.parity import OutputParity, ParityCase
from preblock.service.runtime.session import Session
from tests.support.shared import Shared
from tests.support.weights import seeded_

M = 20
BERT, GPT2, TRANSFORMER = BertEmbeddings(30, 8, M), GPT2Embeddings(30, 8, M), TransformerEmbedding(30, 8, M)


@pytest.fixture(scope="module")
def artifacts(shared: Shared) -> dict[str, Path]:
    """The artifact of each front-end."""
    frontends = {frontend.config.family: frontend for frontend in (BERT, GPT2, TRANSFORMER)}
    for seed, frontend in enumerate(frontends.values()):
        seeded_(frontend, seed)

    def fill(root: Path) -> dict[str, Path]:
        sources = {name: LoadedSource(frontend.data(), Source(kind="module")) for name, frontend in frontends.items()}
        return {name: export_loaded(source, name, root).folder for name, source in sources.items()}

    return shared.build("proven", fill)


def prove(reference: TorchReference, session: Session) -> OutputParity:
    """Compare the vectors of a graph with a module."""
    return OUTPUTS[GRAPH].prove(reference, session)[EMBEDDINGS]


def arguments(case: ParityCase) -> GridCase:
    values: dict[str, Any] = case.arguments
    return GridCase(**{**values, "offset": tuple(values["offset"])})


def test_parity_grid_covers_batch_length_offset_and_segments(artifacts: dict[str, Path]) -> None:
    parity = prove(TorchReference(BERT), Session(artifacts["bert"]))
    found = {(case.batch, case.length, case.offset, case.segments) for case in map(arguments, parity.cases)}
    expected = {
        (batch, length, offset, segments)
        for batch in (1, 2, 5)
        for length in (1, 2, 17, M)
        for offset in [(0,), (min(1, M - length),), (M - length,), tuple(np.linspace(0, M - length, batch, dtype=int))]
        for segments in (False, True)
        if batch > 1 or len(offset) == 1
    }
    assert found == expected
    assert len(parity.cases) == len(expected)


def test_parity_grid_shortens_rows_of_wide_batches() -> None:
    width, longest = 2**11, 4096
    lengths: dict[int, set[int]] = {}
    for case in grid(GPT2Embeddings(30, 8, longest).signature):
        lengths.setdefault(case.batch, set()).add(case.length)
    assert lengths == {batch: {1, 2, 17, longest} for batch in (1, 2, 5)}
    wide: dict[int, set[int]] = {}
    for case in grid(replace(GPT2Embeddings(30, 8, longest).signature, width=width)):
        assert case.batch == 1 or case.batch * case.length * width <= 2**23
        wide.setdefault(case.batch, set()).add(case.length)
        assert max(case.offset) + case.length <= longest
    assert wide == {1: {1, 2, 17, longest}, 2: {1, 2, 17, 2**11}, 5: {1, 2, 17, 2**23 // (5 * width)}}


@pytest.mark.parametrize(
    ("frontend", "name", "row", "by", "message"),
    [
        (GPT2, "tokens.weight", 0, 1e-8, "expected 0"),
        (GPT2, "tokens.weight", 29, 1e-3, ""),
        (GPT2, "positions.weight", 0, 1e-3, ""),
        # The last position is reached by the full length, and by the last offsets: position 19 alone is changed.
        (GPT2, "positions.weight", M - 1, 5.0, r"by 5 \(.*batch 1, length 1, offset \[19\], segments False"),
        (GPT2, "positions.weight", M - 1, np.nan, "inf"),
        (BERT, "segments.weight", 1, 1e-3, ""),
        (TRANSFORMER, "tokens.weight", 0, 1e-3, ""),
    ],
)
def test_parity_detects_one_changed_weight(
    artifacts: dict[str, Path], frontend: FrontEnd, name: str, row: int, by: float, message: str
) -> None:
    weights = {key: value.clone() for key, value in frontend.state_dict().items()}
    weights[name][row, 0] += by
    reference = TorchReference(FrontEnd.from_tensors(frontend.config, weights))
    with pytest.raises(ParityError, match=r"differs .* by .* at batch \d+, length \d+, offset \[.*\], seg") as error:
        prove(reference, Session(artifacts[frontend.config.family]))
    assert re.search(message, str(error.value))


def rehash(folder: Path, name: str) -> None:
    """Let the manifest vouch for `name` as it is now."""
    manifest = read(Manifest, folder / "manifest.json")
    files = manifest.files | {name: describe(folder / name)}
    write(manifest.model_copy(update={"files": files}), folder / "manifest.json")


def test_verify_detects_changed_graph(artifacts: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(artifacts["bert"], tmp_path / "1")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "Add").op_type = "Sub"
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(ExportError, match=r"model\.onnx: got sha256"):
        verify(folder)
    rehash(folder, "model.onnx")
    with pytest.raises(ParityError, match="differs from its reference"):
        verify(folder)


def test_difference_is_measured_in_ulp_of_largest_value() -> None:
    expected = np.array([[[1.0, 4.0], [0.25, 0.0]]], np.float32)
    found = expected + np.array([[[2**-21, 0.0], [0.0, 2**-25]]], np.float32)
    # numpy's spacing of 4 is 2^-21, and of 0.25 2^-25.
    assert difference(found, expected) == (2**-21, 1.0)
    assert difference(expected, expected) == (0.0, 0.0)


def test_difference_of_broken_vectors_is_infinite() -> None:
    sound, infinite = np.ones((1, 2, 3), np.float32), (np.inf, np.inf)
    for value in (np.nan, np.inf, -np.inf):
        broken = sound.copy()
        broken[0, 1, 2] = value
        assert difference(broken, sound) == difference(sound, broken) == difference(broken, broken) == infinite
    assert difference(sound, np.ones((2, 2, 3), np.float32)) == infinite


def test_parity_in_training_mode_ignores_dropout(artifacts: dict[str, Path]) -> None:
    torch.manual_seed(0)
    assert prove(TorchReference(GPT2.train()), Session(artifacts["gpt2"])).max_abs == 0


def test_allowed_ulp_of_projection_grows_with_its_columns() -> None:
    tables = Tokens(rows=30, width=64), Norm(eps=1e-12)
    norm = FrontEnd(FrontEndConfig(family="norm", steps=tables, max_len=9))
    projection = FrontEnd(FrontEndConfig(family="electra", steps=(*tables, Project(width=96)), max_len=9))
    assert (allowed_ulp(norm), allowed_ulp(projection)) == (8, 8 + 4 * 8)


def test_feeds_of_vocabulary_of_padding_alone_have_its_id() -> None:
    signature = BertEmbeddings(1, 4, 6, padding_idx=0).signature
    feeds = [feeds_of(signature, case)["input_ids"] for case in grid(signature)]
    assert feeds
    assert not any(ids.any() for ids in feeds)
