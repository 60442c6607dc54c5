"""Parameters of the Open Inference Protocol, the same over HTTP and gRPC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from preblock.service.codecs.fields import format_value, read_choice, read_flag, refuse_unknown
from preblock.service.codecs.token_rows import read_integer
from preblock.service.codecs.v2.metadata import DATATYPES, Manifests, describe_outputs
from preblock.service.core import types
from preblock.service.core.errors import Invalid
from preblock.service.core.types import Int64, SequenceRef

HINTS = ("priority", "timeout")
"""Queue parameters of Triton. They are checked and ignored, because requests run in order."""
FINAL = "triton_enable_empty_final_response"
"""Parameter of Triton for streams with several answers to a request. Here each request has one answer."""
CONTENT_TYPE = "np"
"""The only supported codec of MLServer: it leaves a tensor unchanged."""
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
MAX_SEQUENCE_ID_BYTES = 128
"""The limit of Triton for text ids."""
REQUEST_PARAMETERS = ("offset", "dtype", "binary_data_output", "content_type", *SEQUENCE, *HINTS, FINAL)
INPUT_PARAMETERS = ("binary_data_size", "content_type")
OUTPUT_PARAMETERS = ("dtype", "binary_data", "content_type")
DTYPES = {DATATYPES[dtype]: dtype for dtype in types.DTYPES} | {dtype: dtype for dtype in types.DTYPES}
"""Output dtypes by their names in this protocol and in the other protocols."""


@dataclass(frozen=True)
class InferOptions:
    """The options from parameters and requested outputs.

    Args:
        binary: for each output in order, whether HTTP sends it as bytes.
        dtype: of all outputs, a key of `types.DTYPES`.
        offset: int64 (1,); None without the parameter.
        sequence: of the request; None without a sequence id.

    """

    binary: Mapping[str, bool]
    dtype: str
    offset: Int64 | None
    sequence: SequenceRef | None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return tuple(self.binary)


def read_options(
    parameters: Mapping[str, Any], requested: Sequence[tuple[Any, Mapping[str, Any]]], manifest: Manifests
) -> InferOptions:
    """Read the options of a request.

    Args:
        parameters: of the request.
        requested: name and parameters of each requested output; empty for the first output.
        manifest: of the model.

    Raises:
        Invalid: an unknown name, or a value that is not allowed.

    """
    check_parameters("parameters", parameters, REQUEST_PARAMETERS)
    for hint in HINTS:
        value = parameters.get(hint, 0)
        if type(value) is not int or value < 0:
            raise Invalid(f"parameters.{hint}", value, "an integer, 0 or more")
    read_flag(f"parameters.{FINAL}", parameters.get(FINAL, False))
    default = read_flag("parameters.binary_data_output", parameters.get("binary_data_output", False))
    dtype = DTYPES[read_choice("parameters.dtype", parameters.get("dtype", "FP32"), DTYPES)]
    known = describe_outputs(manifest)
    binary: dict[str, bool] = {}
    dtypes: list[str] = []
    for index, (name, own) in enumerate(requested):
        where = f"outputs[{index}].parameters"
        if not isinstance(name, str) or name not in known or name in binary:
            raise Invalid(f"outputs[{index}].name", name, f"{', '.join(known)}, each once")
        check_parameters(where, own, OUTPUT_PARAMETERS)
        binary[name] = read_flag(f"{where}.binary_data", own.get("binary_data", default))
        dtypes.append(DTYPES[read_choice(f"{where}.dtype", own["dtype"], DTYPES)] if "dtype" in own else dtype)
        if dtypes[index] != dtypes[0]:
            allowed = f"{DATATYPES[dtypes[0]]}, as outputs[0] has: one type for all"
            raise Invalid(f"{where}.dtype", DATATYPES[dtypes[index]], allowed)
    return InferOptions(
        binary=binary or {next(iter(known)): default},
        dtype=dtypes[0] if dtypes else dtype,
        offset=np.array([read_integer("parameters.offset", parameters["offset"])]) if "offset" in parameters else None,
        sequence=_sequence(parameters),
    )


def check_parameters(where: str, parameters: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise Invalid for an unknown parameter, because ignoring it could change the result."""
    refuse_unknown(parameters, known, where)
    if parameters.get("content_type", CONTENT_TYPE) != CONTENT_TYPE:
        raise Invalid(f"{where}.content_type", parameters["content_type"], f"{CONTENT_TYPE}, an unchanged tensor")


def _sequence(parameters: Mapping[str, Any]) -> SequenceRef | None:
    """Return the sequence of a request; None for the id 0 and the empty text."""
    field = "parameters.sequence_id"
    id_ = parameters.get("sequence_id", 0)
    start, end = (read_flag(f"parameters.{name}", parameters.get(name, False)) for name in SEQUENCE[1:])
    if isinstance(id_, str):
        if (size := len(id_.encode())) > MAX_SEQUENCE_ID_BYTES:
            raise Invalid(field, f"{size} bytes", f"at most {MAX_SEQUENCE_ID_BYTES} bytes of text")
    elif type(id_) is not int or not -(2**63) <= id_ < 2**64:
        raise Invalid(field, format_value(id_), "an integer of 64 bits, or a text")
    else:
        id_ %= 2**64  # gRPC clients send the larger half as negative integers
    if id_ in (0, "") and (start or end):
        raise Invalid(field, format_value(id_), "the id of a sequence, since the request starts or ends one")
    return SequenceRef(id_, start, end) if id_ not in (0, "") else None
