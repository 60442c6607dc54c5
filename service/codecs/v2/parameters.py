"""Parameters of the Open Inference Protocol, the same over HTTP and gRPC, and those of tensors in shared memory.

Source: Triton, "System shared memory extension" and "CUDA shared memory extension".
"""

import binascii
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64

from preblock.service.artifacts.names import STORED
from preblock.service.codecs.fields import IN_TEXT, format_value, read_choice, read_flag
from preblock.service.codecs.token_rows import read_integer
from preblock.service.codecs.v2.metadata import DATATYPES, Manifests, default_outputs, describe_outputs
from preblock.service.core import types
from preblock.service.core.errors import Forbidden, Invalid
from preblock.service.core.types import Int64, SequenceRef
from preblock.service.runtime.cuda_memory import DeviceMemory
from preblock.service.runtime.session import INLINE_MAX_VALUES
from preblock.service.runtime.shared_memory import Region, RegionRange, SharedFile

REGION, OFFSET, SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
SHARED_MEMORY = (REGION, OFFSET, SIZE)
"""Parameters of an input or of a requested output."""

ReadShared = Callable[[Sequence[RegionRange]], Sequence[bytes]]
"""Returns copies of the bytes of ranges."""
TEXT_OUTPUTS = ("input_ids", "spans")
"""Outputs of a request with text."""
ROW_OUTPUTS = ("lengths", "next_offset", "next_context", "position_delta", "truncated", *TEXT_OUTPUTS)
"""Names as in the native API. They are INT64, and metadata does not list them."""
HINTS = ("priority", "timeout")
"""Queue parameters of Triton. They are checked and ignored, because requests run in order."""
FINAL = "triton_enable_empty_final_response"
"""Parameter of Triton for streams with several answers to a request. Here each request has one answer."""
CONTENT_TYPE = "np"
"""The only supported codec of MLServer: it leaves a tensor unchanged."""
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
MAX_SEQUENCE_ID_BYTES = 128
"""The limit of Triton for text ids."""
REQUEST_PARAMETERS = (
    *("offset", "truncate", "pooling", "dtype", "placeholder_id", "binary_data_output", "content_type"),
    *(*SEQUENCE, *HINTS, FINAL, IN_TEXT),
)
INPUT_PARAMETERS = ("binary_data_size", "content_type", *SHARED_MEMORY)
OUTPUT_PARAMETERS = ("dtype", "binary_data", "content_type", *SHARED_MEMORY)
RESERVED = frozenset((*REQUEST_PARAMETERS, *INPUT_PARAMETERS, *OUTPUT_PARAMETERS, "classification", "headers"))
"""Names with a meaning in this protocol or in Triton. They are never ignored."""
RESERVED_PREFIX = "triton_"
DTYPES = {DATATYPES[dtype]: dtype for dtype in types.DTYPES} | {dtype: dtype for dtype in (*types.DTYPES, STORED)}
"""Output dtypes by their names in this protocol and in the other protocols."""


def read_cost(size: int, shared: bool) -> int:
    """Return the cost of reading a message of `size` bytes; its inputs in shared memory may be much larger."""
    return max(size, INLINE_MAX_VALUES + 1) if shared else size


def refuse_shared(_: Sequence[RegionRange]) -> Sequence[bytes]:
    """Raise Forbidden: this reader has no regions."""
    raise Forbidden("shared memory", "a tensor in shared memory", "tensors in the request")


def read_range(where: str, parameters: Mapping[str, Any]) -> RegionRange | None:
    """Return the range in `parameters`; None without one.

    Raises:
        Invalid: a parameter is missing, or has a wrong type or value.

    """
    given = [name for name in SHARED_MEMORY if name in parameters]
    if not given:
        return None
    region = parameters.get(REGION)
    if not isinstance(region, str) or not region:
        got = "nothing" if region is None else format_value(region)
        raise Invalid(f"{where}.{REGION}", got, "the name of a registered region")
    size = _read_count(f"{where}.{SIZE}", parameters.get(SIZE), 1)
    return RegionRange(where, region, _read_count(f"{where}.{OFFSET}", parameters.get(OFFSET, 0), 0), size)


def _read_count(field: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise Invalid(field, "nothing" if value is None else format_value(value), f"an integer, {least} or more")
    return value


def range_parameters(item: RegionRange, size: int) -> dict[str, str | int]:
    """Return the parameters of a response output of `size` bytes in a range."""
    offset = {OFFSET: item.offset} if item.offset else {}
    return {REGION: item.region, **offset, SIZE: size}


def region_document(region: Region) -> dict[str, str | int]:
    """Return the status of a region."""
    memory = region.memory
    if isinstance(memory, SharedFile):
        return {"name": region.name, "key": memory.key, "offset": region.offset, "byte_size": region.size}
    assert isinstance(memory, DeviceMemory)
    return {"name": region.name, "device_id": memory.device_id, "byte_size": region.size}


def read_handle(value: Any) -> bytes:
    """Return the bytes of a CUDA IPC handle, {"b64": text}; raise Invalid for anything else."""
    text = value.get("b64") if isinstance(value, dict) and value.keys() == {"b64"} else None
    if not isinstance(text, str):
        raise Invalid("raw_handle", "nothing" if value is None else value, 'an object {"b64": text in base64}')
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Invalid("raw_handle.b64", text, "base64 with padding") from error


@dataclass(frozen=True)
class InferOptions:
    """The options from parameters and requested outputs.

    Args:
        binary: for each output in order, whether it has the form of bytes over HTTP or in shared memory.
        regions: ranges in shared memory, by output; the response does not hold these outputs.
        dtype: of the vectors of all outputs, as in `EmbedOptions`.
        offset: int64 (1,); None without the parameter.
        truncate: as in `EmbedOptions`.
        pooling: as in `EmbedOptions`.
        placeholder_id: token that stands for the input `vectors`; None without the parameter.
        special_tokens_in_text: as in `EmbedOptions`; None without the parameter.
        sequence: of the request; None without a sequence id.
        ignored: names of unknown parameters, and of given hints.

    """

    binary: Mapping[str, bool]
    regions: Mapping[str, RegionRange]
    dtype: str
    offset: Int64 | None
    truncate: str | None
    pooling: str
    placeholder_id: int | None
    special_tokens_in_text: str | None
    sequence: SequenceRef | None
    ignored: tuple[str, ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs with vectors."""
        return tuple(name for name in self.binary if name not in ROW_OUTPUTS)

    @property
    def row_outputs(self) -> tuple[str, ...]:
        """The names of the other outputs."""
        return tuple(name for name in self.binary if name in ROW_OUTPUTS)

    @property
    def all_shared(self) -> bool:
        """Whether shared memory receives every output with vectors."""
        return all(name in self.regions for name in self.outputs)


def read_options(
    parameters: Mapping[str, Any],
    requested: Sequence[tuple[Any, Mapping[str, Any]]],
    manifest: Manifests,
    ignored: Sequence[str] = (),
) -> InferOptions:
    """Read the options of a request. A parameter of None counts as missing.

    Args:
        parameters: of the request.
        requested: name and parameters of each requested output; empty for `default_outputs`.
        manifest: of the model.
        ignored: names of the ignored parameters of the inputs.

    Raises:
        Invalid: an unknown output, a reserved parameter, or a value that is not allowed.

    """
    unknown = find_ignored("parameters", parameters, REQUEST_PARAMETERS)
    for hint in HINTS:
        value = parameters.get(hint, 0)
        if type(value) is not int or value < 0:
            raise Invalid(f"parameters.{hint}", value, "an integer, 0 or more")
    read_flag(f"parameters.{FINAL}", parameters.get(FINAL, False))
    default = read_flag("parameters.binary_data_output", parameters.get("binary_data_output", False))
    dtype = DTYPES[read_choice("parameters.dtype", parameters.get("dtype", "FP32"), DTYPES)]
    binary, regions, dtype, further = _read_outputs(requested, default, dtype, describe_outputs(manifest))
    return InferOptions(
        binary=binary or dict.fromkeys(default_outputs(manifest), default),
        regions=regions,
        dtype=dtype,
        offset=np.array([read_integer("parameters.offset", parameters["offset"])]) if "offset" in parameters else None,
        truncate=parameters.get("truncate"),
        pooling=parameters.get("pooling", "none"),
        placeholder_id=(
            read_integer("parameters.placeholder_id", parameters["placeholder_id"])
            if "placeholder_id" in parameters
            else None
        ),
        special_tokens_in_text=_read_special_tokens(parameters),
        sequence=_sequence(parameters),
        ignored=(*unknown, *ignored, *further),
    )


def _read_special_tokens(parameters: Mapping[str, Any]) -> str | None:
    if IN_TEXT not in parameters:
        return None
    return read_choice(f"parameters.{IN_TEXT}", parameters[IN_TEXT], types.SPECIAL_TOKENS_IN_TEXT)


def _read_outputs(
    requested: Sequence[tuple[Any, Mapping[str, Any]]], binary_default: bool, dtype: str, known: Collection[str]
) -> tuple[dict[str, bool], dict[str, RegionRange], str, list[str]]:
    """Read the requested outputs of a model with the outputs `known`; `dtype` is the type of a request without one.

    Return `binary`, `regions` and `dtype` of `InferOptions`, and the names of ignored parameters of the outputs.

    Raises:
        Invalid: an unknown output, a reserved parameter, or a value that is not allowed.

    """
    binary: dict[str, bool] = {}
    regions: dict[str, RegionRange] = {}
    dtypes: list[str] = []
    unknown: list[str] = []
    for index, (name, own) in enumerate(requested):
        where = f"outputs[{index}].parameters"
        if not isinstance(name, str) or name in binary or (name not in known and name not in ROW_OUTPUTS):
            raise Invalid(f"outputs[{index}].name", name, f"{', '.join((*known, *ROW_OUTPUTS))}, each once")
        unknown += find_ignored(where, own, OUTPUT_PARAMETERS)
        binary[name] = read_flag(f"{where}.binary_data", own.get("binary_data", binary_default))
        if (item := read_range(where, own)) is not None:
            if own.get("binary_data"):
                raise Invalid(where, "binary_data and shared_memory_region", "one of them")
            binary[name], regions[name] = True, item
        if name in ROW_OUTPUTS:
            continue
        dtypes.append(DTYPES[read_choice(f"{where}.dtype", own["dtype"], DTYPES)] if "dtype" in own else dtype)
        if dtypes[-1] != dtypes[0]:
            first, last = (DATATYPES.get(wanted, wanted) for wanted in (dtypes[0], dtypes[-1]))
            raise Invalid(f"{where}.dtype", last, f"{first}, because all outputs have one type")
    if requested and not dtypes:
        raise Invalid("outputs", ", ".join(binary), f"at least one of {', '.join(known)}")
    return binary, regions, dtypes[0] if dtypes else dtype, unknown


def find_ignored(where: str, parameters: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    """Return the names of the ignored parameters: hints, and unknown names as in Triton.

    Raises:
        Invalid: a reserved name outside `known`, or a codec that changes tensors.

    """
    if not parameters:
        return []
    for name in parameters:
        if name not in known and (name in RESERVED or name.startswith(RESERVED_PREFIX)):
            raise Invalid(where, f"the reserved name {name}", ", ".join(known))
    if parameters.get("content_type", CONTENT_TYPE) != CONTENT_TYPE:
        raise Invalid(f"{where}.content_type", parameters["content_type"], f"{CONTENT_TYPE}, an unchanged tensor")
    prefix = "" if where == "parameters" else f"{where}."
    return [prefix + name for name in parameters if name not in known or name in HINTS]


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
