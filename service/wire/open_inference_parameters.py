"""Parameters of the Open Inference Protocol: which a request may carry, and what they mean, HTTP and gRPC alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from incipit.service.errors import Invalid
from incipit.service.messages import Int64
from incipit.service.wire.open_inference_models import DATATYPES, Manifests, outputs_of
from incipit.service.wire.rows import integers

HINTS = ("priority", "timeout")
"""Triton's, for the order of a queue. They are read and change nothing, since no request overtakes another."""
FINAL = "triton_enable_empty_final_response"
"""Triton's, for streams of which a request has several answers; here each answer is the only one."""
CONTENT_TYPE = "np"
"""MLServer's codecs name themselves in a parameter; this one leaves a tensor as it is."""
REQUEST = ("offset", "dtype", "binary_data_output", "content_type", *HINTS, FINAL)
INPUT = ("binary_data_size", "content_type")
OUTPUT = ("dtype", "binary_data", "content_type")
DTYPES = {code: dtype for dtype, code in DATATYPES.items() if dtype != "int64"} | {
    dtype: dtype for dtype in DATATYPES if dtype != "int64"
}
"""Output types by the names of the protocol, and by those of the other doors."""


@dataclass(frozen=True)
class Wishes:
    """What parameters and requested outputs ask for.

    Args:
        binary: for each output, in the order of the answer, whether it is wanted as bytes; matters to HTTP only.
        dtype: of all, a key of `messages.DTYPES`.
        offset: int64 (1,); None where no parameter says so.

    """

    binary: Mapping[str, bool]
    dtype: str
    offset: Int64 | None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return tuple(self.binary)


def read_wishes(
    parameters: Mapping[str, Any], asked: Sequence[tuple[Any, Mapping[str, Any]]], manifest: Manifests
) -> Wishes:
    """Read the parameters of a request, and the name and the parameters of each output asked for; none for the first.

    Raises:
        Invalid: an unknown name, or a value that is not allowed.

    """
    _check("parameters", parameters, REQUEST)
    for hint in HINTS:
        value = parameters.get(hint, 0)
        if type(value) is not int or value < 0:
            raise Invalid(f"parameters.{hint}", value, "an integer, 0 or more")
    _flag(f"parameters.{FINAL}", parameters.get(FINAL, False))
    default = _flag("parameters.binary_data_output", parameters.get("binary_data_output", False))
    dtype = _dtype("parameters.dtype", parameters.get("dtype", "FP32"))
    known = outputs_of(manifest)
    binary: dict[str, bool] = {}
    dtypes: list[str] = []
    for index, (name, own) in enumerate(asked):
        where = f"outputs[{index}].parameters"
        if not isinstance(name, str) or name not in known or name in binary:
            raise Invalid(f"outputs[{index}].name", name, f"{', '.join(known)}, each once")
        _check(where, own, OUTPUT)
        binary[name] = _flag(f"{where}.binary_data", own.get("binary_data", default))
        dtypes.append(_dtype(f"{where}.dtype", own["dtype"]) if "dtype" in own else dtype)
        if dtypes[index] != dtypes[0]:
            allowed = f"{DATATYPES[dtypes[0]]}, as outputs[0] has: one type for all"
            raise Invalid(f"{where}.dtype", DATATYPES[dtypes[index]], allowed)
    return Wishes(
        binary=binary or {next(iter(known)): default},
        dtype=dtypes[0] if dtypes else dtype,
        offset=integers("parameters.offset", [parameters["offset"]], lambda _: "") if "offset" in parameters else None,
    )


def check_input(where: str, parameters: Mapping[str, Any]) -> None:
    """Check the names of the parameters of an input.

    Raises:
        Invalid: one is unknown.

    """
    _check(where, parameters, INPUT)


def _check(where: str, parameters: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise Invalid for a parameter that is not known: ignored, it might change what is meant."""
    for name in parameters:
        if name.startswith("sequence_"):  # every step would stand at position 0
            raise Invalid(where, name, "the input offset, which says where a row goes on")
        if name not in known:
            raise Invalid(where, name, ", ".join(known))
    if parameters.get("content_type", CONTENT_TYPE) != CONTENT_TYPE:
        raise Invalid(f"{where}.content_type", parameters["content_type"], f"{CONTENT_TYPE}, a tensor as it is")


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Invalid(field, value, "true or false")
    return value


def _dtype(field: str, value: Any) -> str:
    if not isinstance(value, str) or value not in DTYPES:
        raise Invalid(field, value, ", ".join(DTYPES))
    return DTYPES[value]
