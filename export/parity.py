"""Proves a graph equal to its reference, over a grid of calls through the session code of the service.

Letters: B batch, L length.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from preblock.export.errors import ParityError
from preblock.export.parity_cases import UNLIMITED_LENGTH, arguments_of, feeds_of, grid
from preblock.export.reference import Described, Reference
from preblock.models.modules.bias import RelativeSinusoidConfig
from preblock.models.modules.rotary_config import attention_factor
from preblock.models.steps import Project
from preblock.service.artifacts.names import EMBEDDINGS
from preblock.service.artifacts.parity import OutputParity, ParityCase
from preblock.service.runtime.session import Session

ALLOWED_ULP = 8.0
"""For a front-end with a norm or a projection, whose sums may have any order. Others must be bit for bit equal."""
NARROW_ULP = {"float32": 0.0, "float16": 2.0**14, "bfloat16": 2.0**17}
"""Added if every step is rounded to a narrower type: two units of that type. A sum in another order may round to the
next value there, and a projection spreads the difference."""
ROOT_ULP = 4.0
"""Added for the square root of the number of products in a sum of a projection."""
ROTARY_ULP = 1.0
"""For cosines and sines, in ULP of the largest: float32 of torch against rounded float64; 0.5 measured up to 2^31."""
SINUSOID_ULP = 1.0
"""ULP of 1, for sines of the same float32 angle by two libraries. Other biases must be bit for bit equal."""
ULP_OF_ONE = float(np.spacing(np.float32(1)))
COMPARED_CHUNK_VALUES = 2**18
"""Values compared at once."""
Float32 = NDArray[np.float32]
Arguments = dict[str, JsonValue]


def allowed_ulp(described: Described) -> float:
    """Return the allowed error of a vector, in ULP of the largest value of its row."""
    config = described.config
    if described.signature.exact or config is None:
        return 0.0 if described.signature.exact else ALLOWED_ULP
    inputs = zip(config.steps, (0, *config.widths), strict=False)
    products = next((width for step, width in inputs if isinstance(step, Project)), 0)
    return ALLOWED_ULP + ROOT_ULP * math.sqrt(products) + NARROW_ULP[config.arithmetic]


def judge(output: str, cases: Sequence[ParityCase], allowed_ulp: float) -> OutputParity:
    """Return the parity of an output over `cases`.

    Raises:
        ParityError: a case differs by more than allowed; the error names the worst.

    """
    worst = max(cases, key=lambda case: case.max_ulp)
    if worst.max_ulp > allowed_ulp:
        raise ParityError(
            f"{output} of the graph differs from its reference by {size_of(worst, allowed_ulp)} "
            f"at {in_words(worst.arguments)}"
        )
    max_abs = max(case.max_abs for case in cases)
    return OutputParity(allowed_ulp=allowed_ulp, max_abs=max_abs, max_ulp=worst.max_ulp, cases=tuple(cases))


def size_of(case: ParityCase, allowed_ulp: float) -> str:
    """Return the size of a difference in words, for errors."""
    if math.isinf(case.max_abs):  # of `difference`
        return "NaN, infinity, or its shape"
    return f"{case.max_abs:.3g} ({case.max_ulp:.3g} ULP, expected {allowed_ulp:.3g})"


def per_layer_ulp(described: Described) -> float:
    """Return the allowed error of the combined inputs of layers, sums of D products in any order."""
    config = described.config
    return ALLOWED_ULP + ROOT_ULP * math.sqrt(config.widths[config.lookup - 1]) if config else 0.0


def bias_ulp(described: Described) -> float:
    """Return the allowed error of a bias: none except for sinusoids."""
    return SINUSOID_ULP if described.config and isinstance(described.config.bias, RelativeSinusoidConfig) else 0.0


def prove_rotary(reference: Reference, session: Session, alone: Session) -> dict[str, OutputParity]:
    """Compare the rotary outputs of `session` with those of `reference` over the legal part of the grid.

    A float16 output must be the rounding of numbers within the tolerance. `alone`, the graph without rotary outputs,
    must return the vectors of `session` bit for bit.

    Raises:
        ParityError: a case differs by more than allowed.

    """
    signature, rotary = reference.signature, reference.config.rotary if reference.config else ()
    limit = min((limit for limit in (signature.max_len, signature.rotary_len) if limit), default=UNLIMITED_LENGTH)
    largest = max(attention_factor(output.config) for output in rotary)
    unit = float(np.spacing(np.float32(largest)))
    narrow = {name for output in rotary if output.dtype == "float16" for name in output.names}
    cases: dict[str, list[ParityCase]] = {name: [] for name in signature.rotary}
    for case in grid(replace(signature, max_len=limit)):
        feeds, arguments = feeds_of(signature, case), arguments_of(case)
        found = session.run(feeds)
        if not np.array_equal(found[EMBEDDINGS], alone.run(feeds)[EMBEDDINGS]):
            raise ParityError(f"the graph of embeddings alone differs at {in_words(arguments)}")
        for name, wanted in reference.rotary_outputs(feeds["input_ids"], feeds["offset"]).items():
            if name in narrow:
                bounds = ((wanted + error).astype(np.float16) for error in (-ROTARY_ULP * unit, ROTARY_ULP * unit))
                wanted = np.clip(found[name], *(bound.astype(np.float32) for bound in bounds))
            cases[name].append(compare(found[name], wanted, arguments, unit))
    return {name: judge(name, compared, ROTARY_ULP) for name, compared in cases.items()}


def run_case(
    session: Session,
    feeds: Mapping[str, NDArray[Any]],
    expected: Float32,
    arguments: Arguments,
    output: str = EMBEDDINGS,
    unit: float | None = None,
) -> ParityCase:
    """Run `session`, and compare its `output` with `expected`; `unit` as in `difference`.

    Raises:
        ParityError: onnxruntime fails.

    """
    try:
        found = session.run(feeds, [output])[output]
    except Exception as error:  # onnxruntime's own exceptions share no narrower parent
        reason = " ".join(str(error).split())
        raise ParityError(f"the graph of {output} fails at {in_words(arguments)}: {reason}") from error
    return compare(found, expected, arguments, unit)


def in_words(arguments: Arguments) -> str:
    """Return the arguments of a case in words, for errors."""
    return ", ".join(f"{name} {value}" for name, value in arguments.items())


def compare(found: Float32, expected: Float32, arguments: Arguments, unit: float | None = None) -> ParityCase:
    """Return the comparison of two arrays; `unit` as in `difference`."""
    max_abs, max_ulp = difference(found, expected, unit)
    return ParityCase(arguments=arguments, max_abs=max_abs, max_ulp=max_ulp)


def difference(found: Float32, expected: Float32, unit: float | None = None) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest one in ULP.

    An ULP is `unit`, or by default the unit in the last place of the largest value of a row. Both results are infinite
    if the shapes differ or a value is not finite.
    """
    if found.shape != expected.shape:
        return np.inf, np.inf
    width = max(1, found.shape[-1])
    rows, others, count = found.reshape(-1, width), expected.reshape(-1, width), 1 + COMPARED_CHUNK_VALUES // width
    max_abs = max_ulp = 0.0
    for begin in range(0, len(rows), count):  # in chunks, because every temporary needs memory
        one, other = rows[begin : begin + count], others[begin : begin + count]
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            return np.inf, np.inf
        if np.array_equal(one, other):
            continue
        absolute = np.abs(one - other).max(axis=-1)
        ulp = unit or np.spacing(np.abs(other).max(axis=-1))
        max_abs, max_ulp = max(max_abs, float(absolute.max())), max(max_ulp, float((absolute / ulp).max()))
    return max_abs, max_ulp
