"""Cache torch's own tables between exports: reading them is more than half the time of a small export."""

import functools

import pytest
from torch._export.utils import _collect_all_valid_cia_ops
from torch.onnx._internal.exporter._registration import ONNXRegistry


def read_once(patch: pytest.MonkeyPatch) -> None:
    """Cache torch's table of translations to ONNX, and its list of composite operators.

    torch reads the list again since others may add operators to it; no test adds any.
    """
    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
    once = functools.cache(_collect_all_valid_cia_ops)
    patch.setattr("torch.export.exported_program._collect_all_valid_cia_ops", once)
