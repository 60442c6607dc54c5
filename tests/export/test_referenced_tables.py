"""Places of n-gram tables in files that lack them. The tables of real checkpoints: test_references.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from preblock.export.errors import ExportError
from preblock.export.referenced_tables import ReferencedTables, reference_tables
from preblock.models.checkpoints.ngram_tensors import TableTensor
from preblock.models.embeddings import GPT2Embeddings
from preblock.models.frontend_data import FrontEndData
from preblock.models.modules.ngram_config import NgramConfig

NGRAMS = NgramConfig(layers=(0,), size=3, heads=2, width=8, base=11, multiple=4, seed=1, reset_id=0, referenced=True)
FRONT_END = FrontEndData(replace(GPT2Embeddings(5, 8, 6).config, ngrams=NGRAMS), {})
WIDTH = NGRAMS.width // NGRAMS.heads_of_layer
(ROWS,) = NGRAMS.table_rows


def locate(file: Path, key: str = "table") -> ReferencedTables:
    return reference_tables([[TableTensor(file, key, None)]], FRONT_END)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"table": np.ones((ROWS, WIDTH), np.float32)}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_table_is_placed_after_the_header(file: Path) -> None:
    ((part,),) = (table.parts for table in locate(file).tables)
    assert (part.file, part.rows) == (str(file), ROWS)
    assert part.begin == file.stat().st_size - ROWS * WIDTH * 4


def test_missing_file_or_tensor_is_named(file: Path) -> None:
    with pytest.raises(ExportError, match=rf"^{file}: no tensor other$"):
        locate(file, "other")
    with pytest.raises(ExportError, match=r"none: No such file or directory$"):
        locate(file.parent / "none")


def test_file_of_another_format_is_named(file: Path) -> None:
    file.write_bytes(b"no header")
    with pytest.raises(ExportError, match=str(file)):
        locate(file)
