"""Torch's tables, read before commands are forked: the last of what `tests.support.commands` preloads."""

import pytest
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from preblock.export.graph_builder import OPSET
from preblock.export.own_modules.tracing import quiet_exporter
from tests.support.torchlib import read_once

torch.set_num_threads(1)
read_once(pytest.MonkeyPatch())
with quiet_exporter():
    ONNXRegistry.from_torchlib(opset_version=OPSET)
