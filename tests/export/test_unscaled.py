"""The lookup without its embedding scale. Oracle: the rows of the table that the test wrote."""

from pathlib import Path

import numpy as np
import pytest
import torch

from preblock.export.exporter import ExportResult, export_loaded
from preblock.export.source import LoadedSource
from preblock.export.table_formats import find_format
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.steps import Positions, Scale, Tokens
from preblock.service.artifacts.manifest import Manifest, Source
from preblock.service.artifacts.names import TOKEN_EMBEDDINGS, UNSCALED, UNSCALED_GRAPH
from preblock.service.runtime.session import Session

IDS = np.arange(11).reshape(1, 11)


def frontend_of(lookup: int = 2, by: float = 3.0) -> FrontEnd:
    torch.manual_seed(0)
    steps = Tokens(rows=11, width=4), Scale(by=by), Positions(rows=20)
    return FrontEnd(FrontEndConfig(family="scaled", steps=steps, max_len=20, lookup=lookup, consumer_scales=False))


def exported(tmp_path: Path, dtype: str = "float32", lookup: int = 2, by: float = 3.0) -> ExportResult:
    loaded = LoadedSource(frontend_of(lookup, by).data(), Source(kind="module"))
    return export_loaded(loaded, "m", tmp_path, format_=find_format(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unscaled_output_matches_table_rows(dtype: str, tmp_path: Path) -> None:
    result = exported(tmp_path, dtype)
    assert isinstance(result.manifest, Manifest)
    lookup = result.manifest.token_embeddings
    assert lookup is not None
    assert (lookup.embedding_scale, lookup.scaled, lookup.output) == (3.0, True, TOKEN_EMBEDDINGS)
    rows = frontend_of().tokens.weight.detach().to(getattr(torch, dtype)).to(torch.float32).numpy()
    found = Session(result.folder, graph=UNSCALED_GRAPH).run({"input_ids": IDS})[UNSCALED]
    assert found[0].tobytes() == rows.tobytes()
    parity = result.parity.providers["CPUExecutionProvider"].outputs[UNSCALED]
    assert (parity.allowed_ulp, parity.max_abs) == (0, 0)
    assert verify(result.folder).providers["CPUExecutionProvider"].outputs[UNSCALED].max_abs == 0


@pytest.mark.parametrize(("lookup", "by"), [(1, 3.0), (2, 1.0), (3, 1.0)])
def test_lookup_without_embedding_scale_has_no_unscaled_output(lookup: int, by: float, tmp_path: Path) -> None:
    result = exported(tmp_path, lookup=lookup, by=by)
    assert isinstance(result.manifest, Manifest)
    assert UNSCALED_GRAPH not in result.manifest.graphs
    assert result.manifest.token_embeddings is not None
    assert not result.manifest.token_embeddings.scaled
    assert result.manifest.token_embeddings.embedding_scale == by
