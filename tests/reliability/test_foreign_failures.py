"""A failure of a library on a file of other people: a graph that opens for minutes."""

import signal
import time
from pathlib import Path

import httpx
import onnx
from onnx import TensorProto, helper

from tests.service.artifacts.broken_artifacts import edit
from tests.support.artifacts import copy_artifact
from tests.support.servers import serve

PRODUCTS = 60
"""Products of 4096 x 4096 matrices: minutes on one core, while onnxruntime opens the graph."""


def add_products(model: onnx.ModelProto) -> None:
    """Add zero, computed by constant products, to the output of a graph."""
    graph = model.graph
    numbers = {"size": [4096, 4096], "first": [0], "end": [1], "column": [1]}
    graph.initializer.extend(helper.make_tensor(name, TensorProto.INT64, [len(n)], n) for name, n in numbers.items())
    graph.initializer.append(helper.make_tensor("one", TensorProto.FLOAT, [1, 1], [1.0]))
    graph.initializer.append(helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0]))
    (output,) = graph.output
    (last,) = [node for node in graph.node if output.name in node.output]
    last.output[0] = "sum"
    products = [helper.make_node("MatMul", [f"p{i}", "p0"], [f"p{i + 1}"]) for i in range(PRODUCTS)]
    for node in reversed([helper.make_node("Expand", ["one", "size"], ["p0"]), *products]):
        graph.node.insert(0, node)
    graph.node.append(helper.make_node("Gather", [f"p{PRODUCTS}", "first"], ["row"]))
    graph.node.append(helper.make_node("Slice", ["row", "first", "end", "column"], ["cell"]))
    graph.node.append(helper.make_node("Mul", ["cell", "zero"], ["nothing"]))
    graph.node.append(helper.make_node("Add", ["sum", "nothing"], [output.name]))


def test_graph_that_opens_for_minutes_holds_up_nothing(tmp_path: Path) -> None:
    models = tmp_path / "models"
    copy_artifact("gpt", models)
    options = ("--model-control", "explicit", "--load-model", "*", "--model-open-timeout-seconds", "2")
    with serve(models, *options) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        edit(copy_artifact("gpt", models, "slow"), add_products)
        copy_artifact("bert", models)
        began = time.monotonic()
        refused = client.post("/v2/repository/models/slow/load")
        assert (refused.status_code, time.monotonic() - began < 20) == (500, True)
        assert "the graphs did not open and run within 2 s" in refused.json()["error"]
        assert client.post("/v2/repository/models/bert/load").status_code == 200
        assert client.post("/models/bert/embed", json={"input_ids": [[1]]}).status_code == 200
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)  # onnxruntime still multiplies
        server.process.wait(30)
        assert time.monotonic() - began < 10
