"""Traces a module to ONNX with the exporter of torch, and leaves no traces of this machine in the graph."""

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import onnx
import torch
from google.protobuf.message import Message
from torch import nn

from preblock.export.errors import ExportError
from preblock.export.external_data import MAX_INLINE_BYTES, DataFile
from preblock.export.graph_builder import OPSET
from preblock.export.progress import Report, StepProgress
from preblock.service.artifacts.names import DATA, GRAPH

LOGGERS = ("torch.onnx", "torch.fx.experimental.symbolic_shapes")


def export_program(module: nn.Module, folder: Path, report: Report, **options: Any) -> onnx.ModelProto:
    """Trace `module` (in evaluation mode), write its data file into `folder`, and return the model over it.

    `options` are arguments of `torch.onnx.export`; `report` receives the progress of a long step.

    Raises:
        ExportError: the exporter cannot trace the module.

    """
    report("tracing the module")
    try:
        with interrupts_deferred(), quiet_exporter():
            program = torch.onnx.export(module.eval(), (), dynamo=True, opset_version=OPSET, verbose=False, **options)
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ExportError(f"the exporter of torch cannot follow the module: {reason}") from error
    assert program is not None
    model = _save_program(program, folder, report)
    _forget_machine(model)
    return model


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's messages about unused libraries, its own deprecations, and failed first attempts."""
    levels = {logger: logger.level for logger in map(logging.getLogger, LOGGERS)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):  # torch prints the graph of a failed attempt
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer the first SIGINT or SIGTERM to the end of the block; a second one interrupts the block.

    Tracing calls Python from C++. The exception of a handler would be dropped there, become another error, or abort the
    process. Only the main thread runs handlers: in another thread, this changes nothing.
    """
    deferred: list[signal.Signals] = []
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(number)) and threading.current_thread() is threading.main_thread()
    }

    def handle(number: int, frame: FrameType | None) -> None:
        deferred.append(signal.Signals(number))
        if len(deferred) > 1:
            handlers[deferred[-1]](number, frame)

    try:
        for number in handlers:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if deferred:
            handlers[deferred[0]](deferred[0], None)


def _forget_machine(message: Message) -> None:
    """Clear the exporter's metadata at every depth: source paths and stack traces of this machine."""
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in [value] if isinstance(value, Message) else value:
                _forget_machine(part)


def _save_program(program: torch.onnx.ONNXProgram, folder: Path, report: Report) -> onnx.ModelProto:
    """Write the data file of `program` into `folder`, and return the model over it.

    The weights follow one another. onnxruntime maps each from the start of its first page.
    """
    initializers = program.model.graph.initializers.items()
    weights = {name: value.const_value.numpy() for name, value in initializers if value.const_value is not None}
    program.save(folder / GRAPH, include_initializers=False)
    model = onnx.load(folder / GRAPH)
    step = "writing the graph"
    report(step)
    large = (values.nbytes for values in weights.values() if values.nbytes > MAX_INLINE_BYTES)
    progress = StepProgress(report, step, sum(large))
    with (folder / DATA).open("wb") as stream:
        data = DataFile(stream, progress)
        model.graph.initializer.extend([data.write(name, values) for name, values in weights.items()])
    return model
