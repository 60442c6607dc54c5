"""Layout of OpenVINO: the text embeddings model of a pipeline in OpenVINO's own format, a graph in XML over a table.

https://docs.openvino.ai/2026/documentation/openvino-ir-format/operation-sets/operation-specs/movement/gather-8.html

Letters: V rows and D width of the table.
"""

from pathlib import Path
from xml.sax.saxutils import quoteattr

from preblock.export.layouts.token_lookup import INPUTS_EMBEDS, TokenLookup

NAME = "openvino_text_embeddings_model"
INPUT = "input"
GRAPH = """<?xml version="1.0"?>
<net name={name} version="11">
  <layers>
    <layer id="0" name="{input}" type="Parameter" version="opset1">
      <data shape="?,?" element_type="i64"/>
      <output><port id="0" precision="I64" names="{input}"><dim>-1</dim><dim>-1</dim></port></output>
    </layer>
    <layer id="1" name="table" type="Const" version="opset1">
      <data element_type="f32" shape="{rows}, {width}" offset="0" size="{size}"/>
      <output><port id="0" precision="FP32"><dim>{rows}</dim><dim>{width}</dim></port></output>
    </layer>
    <layer id="2" name="axis" type="Const" version="opset1">
      <data element_type="i64" shape="" offset="{size}" size="8"/>
      <output><port id="0" precision="I64"/></output>
    </layer>
    <layer id="3" name="{output}" type="Gather" version="opset8">
      <data batch_dims="0"/>
      <input>
        <port id="0" precision="FP32"><dim>{rows}</dim><dim>{width}</dim></port>
        <port id="1" precision="I64"><dim>-1</dim><dim>-1</dim></port>
        <port id="2" precision="I64"/>
      </input>
      <output>
        <port id="3" precision="FP32" names="{output}"><dim>-1</dim><dim>-1</dim><dim>{width}</dim></port>
      </output>
    </layer>
    <layer id="4" name="{output}/sink_port_0" type="Result" version="opset1">
      <input><port id="0" precision="FP32"><dim>-1</dim><dim>-1</dim><dim>{width}</dim></port></input>
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
    """Write `openvino_text_embeddings_model.xml` and `.bin`: `input`, int64, to `inputs_embeds`, float32.

    The table is (V, D) in float32, whatever the dtype of the artifact, and holds the bits of its vectors.
    """
    rows, width = lookup.manifest.vocab_size, lookup.width
    with (folder / f"{NAME}.bin").open("xb") as stream:
        for vectors in lookup.rows():
            stream.write(vectors.astype("<f4", copy=False).data)
        stream.write(bytes(8))  # the axis, 0
    graph = GRAPH.format(
        name=quoteattr(lookup.manifest.family),
        input=INPUT,
        output=INPUTS_EMBEDS,
        rows=rows,
        width=width,
        size=4 * rows * width,
    )
    (folder / f"{NAME}.xml").write_text(graph, encoding="utf-8")
