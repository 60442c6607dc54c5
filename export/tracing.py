"""Traces a module to ONNX with the exporter of torch, and leaves no traces of this machine in the graph."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import torch
from google.protobuf.message import Message
from torch import nn

from preblock.export.errors import ExportError
from preblock.export.external_data import save_program
from preblock.export.progress import Report

OPSET = 20


def export_program(module: nn.Module, folder: Path, report: Report, **options: Any) -> onnx.ModelProto:
    """Trace `module` (in evaluation mode), write its data file into `folder`, and return the model over it.

    `options` are arguments of `torch.onnx.export`; `report` receives the progress of a long step.

    Raises:
        ExportError: the exporter cannot trace the module.

    """
    report("tracing the module")
    try:
        with quiet_exporter():
            program = torch.onnx.export(module.eval(), (), dynamo=True, opset_version=OPSET, verbose=False, **options)
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ExportError(f"the exporter of torch cannot follow the module: {reason}") from error
    assert program is not None
    model = save_program(program, folder, report)
    _forget_machine(model)
    return model


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's messages about unused libraries and its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _forget_machine(message: Message) -> None:
    """Clear the exporter's metadata at every depth: source paths and stack traces of this machine."""
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in [value] if isinstance(value, Message) else value:
                _forget_machine(part)
