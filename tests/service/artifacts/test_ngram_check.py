"""Places of n-gram tables in a manifest, in disagreement with the graphs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preblock.service.artifacts.names import MANIFEST
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from tests.support.artifacts import copy_artifact


def _drop_layer(tables: list[dict[str, Any]]) -> None:
    del tables[1]


def _set(**values: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda tables: tables[0].update(values)


def _set_part(**values: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda tables: tables[0]["parts"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_layer, "ngram_tables: got 1, expected 2, as ngram.ids.onnx has"),
        (_set(width=32), "ngram_tables.0: got 240 rows of 32 float32 from byte 1584, expected a table of ngrams.onnx"),
        (_set(dtype="float16"), "ngram_tables.0: got 240 rows of 16 float16 from byte 1584, expected a table"),
        (_set(dtype="int8"), "ngram_tables.0.dtype: got int8, expected"),
        (_set_part(begin=10**9), "ngram_tables.0: got 240 rows of 16 float32 from byte 1000000000, expected a table"),
        (_set_part(begin=-1), "ngram_tables.0.parts.0.begin: got -1, expected"),
        (_set_part(rows=241), "ngram_tables.0.parts: got "),
        (_set_part(file="/etc/passwd"), "ngram_tables.0.parts: got "),
        (_set(parts=[]), "ngram_tables.0.parts: got (), expected one part of 240 rows in model.onnx.data"),
    ],
)
def test_table_inconsistent_with_graph_is_rejected(
    change: Callable[[list[dict[str, Any]]], None], message: str, tmp_path: Path
) -> None:
    file = copy_artifact("ngrams", tmp_path) / MANIFEST
    document = json.loads(file.read_text())
    change(document["ngram_tables"])
    file.write_text(json.dumps(document))
    with pytest.raises(ArtifactError) as refused:
        Repository(tmp_path, CPU, 1)
    assert str(refused.value).startswith(f"ngrams/1/{MANIFEST} {message}")
