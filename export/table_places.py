"""The places of tables in the data file of a written artifact, for the manifest: from the config and `model.onnx`."""

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from preblock.export.external_data import place_of
from preblock.export.graph_builder import rounded_number
from preblock.models.config import FrontEndConfig
from preblock.models.frontend_file import STORED_TYPES
from preblock.models.steps import Positions, Scale, Tokens
from preblock.service.artifacts.manifest import Kernel, KernelTokens, NgramTable, PositionTable, TablePart
from preblock.service.artifacts.names import DATA

TOKENS = "tokens.weight"


def find_kernel(config: FrontEndConfig, tensors: Mapping[str, TensorProto]) -> Kernel | None:
    """Return the tables from which the fused kernel computes `embeddings`.

    Return None unless each vector is a row of one float32 table in the data file, optionally scaled, plus a row of
    another, whose rows of all positions are consecutive.
    """
    match config.steps:
        case (Tokens(), Positions() as positions):
            scale = 1.0
        case (Tokens(), Scale() as step, Positions() as positions):
            scale = rounded_number(step.by, "float32")
        case _:
            return None
    name = "positions.weight" if positions.table == "learned" else "positions.table"
    tokens, table = tensors[TOKENS], tensors.get(name)
    counted = positions.counts == "slots" and positions.table != "hybrid" and config.arithmetic == "float32"
    if table is None or config.max_len is None or not counted:
        return None
    if any(tensor.data_type != TensorProto.FLOAT or not tensor.external_data for tensor in (tokens, table)):
        return None
    begins = [place_of(tensor)[0] for tensor in (tokens, table)]
    rows, width = tokens.dims
    return Kernel(
        tokens=KernelTokens(begin=begins[0], rows=rows, width=width, scale=scale),
        positions=PositionTable(begin=begins[1], rows=table.dims[0], first=positions.first),
    )


def find_ngram_tables(config: FrontEndConfig, tensors: Mapping[str, TensorProto]) -> tuple[NgramTable, ...]:
    """Return the place of each n-gram table.

    Empty without such tables, for integers with scales, and for small tables inside the graphs.
    """
    ngrams = config.ngrams
    if ngrams is None or ngrams.referenced:
        return ()
    tables = [tensors[f"ngrams.tables.{number}.weight"] for number in range(len(ngrams.layers))]
    dtypes = [onnx.helper.tensor_dtype_to_np_dtype(table.data_type).name for table in tables]
    if not {*dtypes} <= {*STORED_TYPES} or not all(table.external_data for table in tables):
        return ()
    found = []
    for table, dtype in zip(tables, dtypes, strict=True):
        rows, width = table.dims
        part = TablePart(file=DATA, begin=place_of(table)[0], rows=rows)
        values = {"rows": rows, "width": width, "dtype": dtype, "parts": (part,)}
        found.append(NgramTable.model_validate(values))
    return tuple(found)
