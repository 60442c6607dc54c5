"""The place of n-gram tables in the data file of an artifact."""

from pathlib import Path

from preblock.export.external_data import place_of
from preblock.export.stored_tables import read_tensors
from preblock.export.torch_tables import DTYPES
from preblock.service.artifacts.manifest import NgramTable, TablePart
from preblock.service.artifacts.names import DATA, NGRAM_IDS_GRAPH


def describe_tables(folder: Path) -> tuple[NgramTable, ...]:
    """Return the place of each n-gram table of the artifact in `folder`.

    Empty without `ngram.ids.onnx`, for integers with scales, and for small tables inside the graphs.
    """
    tensors = read_tensors(folder) if (folder / NGRAM_IDS_GRAPH).is_file() else {}
    found: list[NgramTable] = []
    while table := tensors.get(f"ngrams.tables.{len(found)}.weight"):
        dtype = str(DTYPES[table.data_type]).removeprefix("torch.")
        if dtype not in ("float32", "float16", "bfloat16") or not table.external_data:
            return ()
        rows, width = table.dims
        part = TablePart(file=DATA, begin=place_of(table)[0], rows=rows)
        found.append(NgramTable(rows=rows, width=width, dtype=dtype, parts=(part,)))
    return tuple(found)
