"""Builds one ONNX graph node by node, over the tensors that all graphs of an artifact share.

Letters: V rows and D width of a table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from preblock import __version__
from preblock.export.errors import ExportError
from preblock.export.external_data import MAX_INLINE_BYTES, DataFile
from preblock.export.table_formats import SCALE, WIDTH, TableFormat
from preblock.models.modules.signature import Signature, StemSignature

IR_VERSION, OPSET = 10, 20
DATA_TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
}
TypeName = Literal["float32", "float64", "float16", "bfloat16", "int64"]
Array = NDArray[Any]
Outputs = dict[str, tuple[str, TypeName, tuple[int | str, ...]]]
"""The outputs of a graph by name: the value, its type and its shape."""


class TensorStore:
    """The tensors of an artifact, written into its data file when a graph first needs them.

    Args:
        trained: the trained weights by name.
        data: receives the tensors.
        rounded: names of the tables to round to `format_`.
        format_: stored type of these tables; None for float32.

    """

    def __init__(
        self, trained: Mapping[str, Array], data: DataFile, rounded: Sequence[str], format_: TableFormat | None
    ) -> None:
        self.trained, self.format = trained, format_
        self._data, self._rounded = data, frozenset(rounded if format_ else ())
        self.tensors: dict[str, list[TensorProto]] = {}
        """The tensors of each weight, its parts if it is rounded, and of each derived table."""

    def weight(self, name: str) -> list[TensorProto]:
        """Return the tensors of the trained weight `name`: float32, or the parts of a rounded table."""
        if name not in self.tensors:
            values = self.trained[name]
            if self.format is not None and self.is_rounded(name):
                self.tensors[name] = self._data.write_rounded(name, values, self.format)
            else:
                self.tensors[name] = [self._data.write(name, values, np.float32)]
        return self.tensors[name]

    def derived(self, name: str, compute: Callable[[], Array]) -> list[TensorProto]:
        """Return the tensor of the derived table `name`, computed at its first use."""
        if name not in self.tensors:
            self.tensors[name] = [self._data.write(name, compute())]
        return self.tensors[name]

    def is_rounded(self, name: str) -> bool:
        """Return whether the trained weight `name` is a rounded table."""
        return name in self._rounded


@dataclass(frozen=True)
class Node:
    """A node of a graph, with the name of its only output."""

    op: str
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, Any]


class GraphBuilder:
    """The nodes of a graph, in their order, and the tensors that they need.

    A value is its name. Names contain a dot or a colon, which no name of an input contains.

    Args:
        store: the tensors of the artifact.

    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._nodes: list[Node] = []
        self._tensors: dict[str, TensorProto] = {}
        self._inputs: dict[str, onnx.ValueInfoProto] = {}
        self._shared: dict[str, str] = {}

    def input(self, name: str, *shape: int | str) -> str:
        """Declare an input, int64."""
        self._inputs[name] = helper.make_tensor_value_info(name, TensorProto.INT64, shape)
        return name

    def add(self, name: str, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with the output `name`, and return that name."""
        self._nodes.append(Node(op, inputs, name, attributes))
        return name

    def once(self, name: str, build: Callable[[], str]) -> str:
        """Return the value known as `name`; `build` adds its nodes at the first use."""
        if name not in self._shared:
            self._shared[name] = build()
        return self._shared[name]

    def cast(self, name: str, value: str, to: TypeName) -> str:
        """Convert `value` to another type."""
        return self.add(name, "Cast", value, to=DATA_TYPES[to])

    def number(self, value: float, dtype: TypeName) -> str:
        """Return a constant number."""
        return self._constant(f"{dtype}:{value}", np.array(value, dtype))

    def numbers(self, *values: int) -> str:
        """Return a constant list of integers."""
        return self._constant(f"int64:{list(values)}", np.array(values, np.int64))

    def weight(self, name: str) -> str:
        """Return the trained weight `name`, float32."""
        return self._use(self._store.weight(name))

    def derived(self, name: str, compute: Callable[[], Array]) -> str:
        """Return the derived table `name`; `compute` makes it at its first use in an artifact."""
        return self._use(self._store.derived(name, compute))

    def rows(self, name: str, table: str, index: str, axes: int = 2) -> str:
        """Return the rows `index` of the trained table `table` in float32, whatever its stored type.

        `axes` is the number of axes of `index`.
        """
        format_ = self._store.format
        if format_ is None or not self._store.is_rounded(table):
            return self.add(name, "Gather", self.weight(table), index, axis=0)
        self.weight(table)
        width = self._store.trained[table].shape[1]
        text = f"widen (int64[n] index) => (float[n] vectors) {{ {format_.nodes(width, axes)} }}"
        names = {"codes": table, "scale": table + SCALE, "width": table + WIDTH, "index": index, "vectors": name}
        for node in onnx.parser.parse_graph(text).node:
            attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
            inputs = [names.get(value, f"{name}.{value}") for value in node.input]
            self.add(names.get(node.output[0], f"{name}.{node.output[0]}"), node.op_type, *inputs, **attributes)
        return name

    def finish(self, outputs: Outputs) -> onnx.ModelProto:
        """Return the model with `outputs`; their values take these names in it."""
        names = {value: output for output, (value, _, _) in outputs.items()}
        nodes = [
            helper.make_node(
                node.op,
                [names.get(value, value) for value in node.inputs],
                [names.get(node.output, node.output)],
                **node.attributes,
            )
            for node in self._nodes
        ]
        results = [
            helper.make_tensor_value_info(name, DATA_TYPES[dtype], shape) for name, (_, dtype, shape) in outputs.items()
        ]
        graph = helper.make_graph(nodes, "graph", [*self._inputs.values()], results, [*self._tensors.values()])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)

    def _constant(self, name: str, values: Array) -> str:
        assert values.nbytes <= MAX_INLINE_BYTES
        return self._use([onnx.numpy_helper.from_array(values, name)])

    def _use(self, tensors: Sequence[TensorProto]) -> str:
        self._tensors |= {tensor.name: tensor for tensor in tensors}
        return tensors[0].name


def rounded_number(value: float, dtype: str) -> float:
    """Return `value` rounded to float32, then to `dtype`, as torch rounds a number to it."""
    return float(np.float32(value).astype(dtype))


def label(model: onnx.ModelProto, file: str, title: str, signature: Signature | StemSignature) -> None:
    """Write producer, name, `title` and limits into the model of the graph `file`, for use without its manifest.

    Equal front-ends get equal metadata: no path, no time, nothing of this machine.
    """
    properties = {
        f"preblock.{name}": str(value)
        for name in ("family", "vocab_size", "max_len", "image_size", "patch_size")
        if (value := getattr(signature, name, None)) is not None
    }
    indices = signature.indices if isinstance(signature, Signature) else {}
    properties |= {f"preblock.indices.{name}": str(count) for name, count in indices.items()}
    model.producer_name, model.producer_version = "preblock", __version__
    model.doc_string = title
    model.graph.name = Path(file).stem
    helper.set_model_props(model, properties)


def save_graph(model: onnx.ModelProto, file: Path) -> None:
    """Write `model` over its existing data file, and check both with ONNX; raise ExportError if ONNX rejects it."""
    onnx.save(model, file)
    try:
        onnx.checker.check_model(file, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{file.name}: ONNX rejects the graph: {' '.join(str(error).split())}") from error
