"""Modules exported to ONNX."""

import warnings
from typing import Any

import onnx
import onnxruntime
import torch
from torch import nn


def graph_of(module: nn.Module, inputs: dict[str, Any], shapes: Any = None) -> onnx.ModelProto:
    """Export `module` from sample inputs; `shapes` are its dynamic ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        program = torch.onnx.export(
            module.eval(), kwargs=inputs, dynamo=True, opset_version=20, dynamic_shapes=shapes, verbose=False
        )
    assert program is not None
    return program.model_proto


def session_of(graph: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, ["CPUExecutionProvider"])
