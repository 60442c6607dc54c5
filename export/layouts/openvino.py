"""Layout of OpenVINO: the text embeddings models of a pipeline in OpenVINO's own format, each a graph over a table.

https://docs.openvino.ai/2026/documentation/openvino-ir-format/operation-sets/operation-specs/movement/gather-8.html

Letters: V rows and D width of the table, N layers, P width of an input of a layer.
"""

import math
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np

from preblock.export.layouts.token_lookup import INPUT_IDS, INPUTS_EMBEDS, TokenLookup

NAME = "openvino_text_embeddings_model"
INPUT = "input"
LAYERS_NAME, LAYERS_OUTPUT = "openvino_text_embeddings_per_layer_model", "text_embeds_per_layer"
"""Names of optimum-intel, optimum/exporters/openvino/model_configs.py at e1de5be."""
GRAPH = """<?xml version="1.0"?>
<net name={name} version="11">
  <layers>
    <layer id="0" name="{input}" type="Parameter" version="opset1">
      <data shape="?,?" element_type="i64"/>
      <output><port id="0" precision="I64" names="{input}"><dim>-1</dim><dim>-1</dim></port></output>
    </layer>
    <layer id="1" name="table" type="Const" version="opset1">
      <data element_type="f32" shape="{rows}, {sizes}" offset="0" size="{size}"/>
      <output><port id="0" precision="FP32"><dim>{rows}</dim>{dims}</port></output>
    </layer>
    <layer id="2" name="axis" type="Const" version="opset1">
      <data element_type="i64" shape="" offset="{size}" size="8"/>
      <output><port id="0" precision="I64"/></output>
    </layer>
    <layer id="3" name="{output}" type="Gather" version="opset8">
      <data batch_dims="0"/>
      <input>
        <port id="0" precision="FP32"><dim>{rows}</dim>{dims}</port>
        <port id="1" precision="I64"><dim>-1</dim><dim>-1</dim></port>
        <port id="2" precision="I64"/>
      </input>
      <output>
        <port id="3" precision="FP32" names="{output}"><dim>-1</dim><dim>-1</dim>{dims}</port>
      </output>
    </layer>
    <layer id="4" name="{output}/sink_port_0" type="Result" version="opset1">
      <input><port id="0" precision="FP32"><dim>-1</dim><dim>-1</dim>{dims}</port></input>
    </layer>
  </layers>
  <edges>
    <edge from-layer="1" from-port="0" to-layer="3" to-port="0"/>
    <edge from-layer="0" from-port="0" to-layer="3" to-port="1"/>
    <edge from-layer="2" from-port="0" to-layer="3" to-port="2"/>
    <edge from-layer="3" from-port="3" to-layer="4" to-port="0"/>
  </edges>
</net>
"""


def write_openvino(lookup: TokenLookup, folder: Path) -> None:
    """Write the text embeddings model, and for a model with per-layer inputs the model of its inputs of layers.

    - `openvino_text_embeddings_model.xml` and `.bin`: `input`, int64, to `inputs_embeds`, float32.
    - `openvino_text_embeddings_per_layer_model.xml` and `.bin`: `input_ids`, int64, to `text_embeds_per_layer`, float32
      (B, L, N, P), the token part.

    A table is (V, D) or (V, N, P) in float32, whatever the dtype of the artifact, and holds the bits of its vectors.
    """
    _write_table(lookup, folder / NAME, INPUT, INPUTS_EMBEDS)
    if lookup.per_layer is not None:
        _write_table(lookup.per_layer, folder / LAYERS_NAME, INPUT_IDS, LAYERS_OUTPUT)


def _write_table(lookup: TokenLookup, file: Path, given: str, output: str) -> None:
    """Write the vectors of all ids, and the graph that gathers them; `file` has no suffix."""
    rows = lookup.manifest.vocab_size
    with file.with_suffix(".bin").open("xb") as stream:
        for vectors in lookup.rows():
            stream.write(np.ascontiguousarray(vectors, "<f4").data)
        stream.write(bytes(8))  # the axis, 0
    graph = GRAPH.format(
        name=quoteattr(lookup.manifest.family),
        input=given,
        output=output,
        rows=rows,
        sizes=", ".join(map(str, lookup.shape)),
        dims="".join(f"<dim>{size}</dim>" for size in lookup.shape),
        size=4 * rows * math.prod(lookup.shape),
    )
    file.with_suffix(".xml").write_text(graph, encoding="utf-8")
