"""Check the places of n-gram tables, before the service maps their rows."""

from pathlib import Path

from preblock.service.artifacts.manifest import Artifact, Manifest, NgramTable
from preblock.service.artifacts.names import DATA, MANIFEST, NGRAM_IDS_GRAPH, NGRAMS_GRAPH
from preblock.service.artifacts.onnx_check import MAX_GRAPH_BYTES, TYPES, parse
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import read_file


def check_ngram_tables(folder: Path, manifest: Artifact) -> None:
    """Compare the `ngram_tables` of the artifact in `folder` with its graphs, after `check_graphs`.

    Raises:
        ArtifactError: a layer has no table, or its table is none of `ngrams.onnx`; or a table lies in another file.

    """
    if not isinstance(manifest, Manifest) or not manifest.ngram_tables:
        return
    outputs = manifest.graphs[NGRAM_IDS_GRAPH].outputs if NGRAM_IDS_GRAPH in manifest.graphs else ()
    layers = outputs[0].shape[2:3] if outputs else ()
    if layers != (len(manifest.ngram_tables),):
        count = layers[0] if layers else 0
        raise ArtifactError(
            f"{MANIFEST} ngram_tables", len(manifest.ngram_tables), f"{count}, as {NGRAM_IDS_GRAPH} has"
        )
    if manifest.references:
        return  # `check_references` compares the tables with those files
    places = _find_places(folder) if NGRAMS_GRAPH in manifest.graphs else set()
    for number, table in enumerate(manifest.ngram_tables):
        field = f"{MANIFEST} ngram_tables.{number}"
        parts = [(part.file, part.rows, part.scales) for part in table.parts]
        if parts != [(DATA, table.rows, None)]:
            raise ArtifactError(f"{field}.parts", table.parts, f"one part of {table.rows} rows in {DATA}")
        if (table.parts[0].begin, table.rows, table.width, table.dtype) not in places:
            raise ArtifactError(field, _describe(table), f"a table of {NGRAMS_GRAPH}")


def _find_places(folder: Path) -> set[tuple[int, int, int, str]]:
    """Return begin, rows, width and type of each table of `ngrams.onnx` in the data file."""
    places = set()
    for tensor in parse(NGRAMS_GRAPH, read_file(folder / NGRAMS_GRAPH, MAX_GRAPH_BYTES)).graph.initializer:
        begins = [int(entry.value) for entry in tensor.external_data if entry.key == "offset"]
        if begins and len(tensor.dims) == 2:
            places.add((begins[0], tensor.dims[0], tensor.dims[1], TYPES[tensor.data_type][0]))
    return places


def _describe(table: NgramTable) -> str:
    return f"{table.rows} rows of {table.width} {table.dtype} from byte {table.parts[0].begin}"
