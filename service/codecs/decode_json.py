"""JSON messages of a decode stream; `docs/decode.md` describes them."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from preblock.service.artifacts.names import EMBEDDINGS
from preblock.service.codecs.fields import drop_nulls, format_value, read_special_tokens_in_text, refuse_unknown
from preblock.service.codecs.native_json import build_document, read_dtype, read_encoding, read_outputs, write_json
from preblock.service.codecs.parts import read_parts, read_placeholder, refuse_beside_parts
from preblock.service.codecs.token_rows import (
    POSITIONS,
    read_integers,
    read_json_positions,
    read_json_rows,
    read_offset,
    row_fields,
    token_inputs,
)
from preblock.service.core.decode_ops import (
    BARE_OPS,
    INTEGER_OPS,
    AppendOp,
    DecodeMessage,
    DecodeOptions,
    Operation,
    RewindOp,
    RunningRows,
    Step,
)
from preblock.service.core.errors import Invalid
from preblock.service.core.types import EmbedResult, PartsRequest, TokenRequest, TokenRows
from preblock.service.runtime.model import TokenModel

OPEN = "open"
OPTIONS = ("offset", "context", "rows", "output", "dtype", "encoding", "special_tokens_in_text")
STEP_PARTS = ("parts", "placeholder", "offset")
"""Fields of a step of rows made of parts."""
OPERATIONS = (*INTEGER_OPS, *BARE_OPS)


def digest(message: bytes) -> bytes:
    """Return the digest of a message, to recognize its repetition."""
    return hashlib.blake2b(message, digest_size=16).digest()


def read_options(fields: Mapping[str, Any]) -> tuple[DecodeOptions, str]:
    """Read the options of a stream, and the encoding of its JSON answers.

    Raises:
        Invalid: a field is unknown, or of the wrong type.

    """
    refuse_unknown(fields, OPTIONS)
    offset = read_offset(fields.get("offset", 0))
    rows = fields.get("rows", len(offset))
    if type(rows) is not int or rows < 0:
        raise Invalid("rows", format_value(rows), "a number of rows")
    context = read_json_rows("context", fields["context"]) if "context" in fields else None
    outputs = read_outputs(fields.get("output", EMBEDDINGS))
    options = DecodeOptions(
        offset=offset,
        rows=rows,
        context=context,
        outputs=outputs,
        dtype=read_dtype(fields),
        special_tokens_in_text=read_special_tokens_in_text(fields),
    )
    return options, read_encoding(fields)


def read_open(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an opening message.

    Raises:
        Invalid: another type than a JSON object, or other fields beside it.

    """
    refuse_unknown(document, (OPEN,))
    fields = document[OPEN]
    if not isinstance(fields, dict):
        raise Invalid(OPEN, format_value(fields), "a JSON object")
    return drop_nulls(fields)


def read_number(document: Mapping[str, Any]) -> int:
    """Return the client's number of a message; default 0.

    Raises:
        Invalid: a value outside 0 to 2^32 - 1, or another type.

    """
    number = document.get("step", 0)
    if type(number) is not int or not 0 <= number < 2**32:
        raise Invalid("step", format_value(number), "0 to 4294967295")
    return number


def read_message(document: Mapping[str, Any], number: int, text: bytes, indices: Collection[str]) -> DecodeMessage:
    """Read one operation of a JSON object.

    Args:
        document: the object.
        number: the client's number, from `read_number`.
        text: the object as JSON text, for the digest.
        indices: names of the further inputs of the model.

    Raises:
        Invalid: several operations, or a field that is missing, unknown, or of the wrong type.

    """
    named = [name for name in OPERATIONS if name in document]
    if not named:
        operation: Operation = read_step(document, indices, ("step",))
    else:
        further = ("context",) if named[0] == AppendOp.name else ()
        refuse_unknown(document, (named[0], "step", *further))
        operation = _read_operation(named[0], document[named[0]], document.get("context"))
    return DecodeMessage(operation, number, digest(text) if number else b"")


def read_step(fields: Mapping[str, Any], indices: Collection[str], ignored: tuple[str, ...] = ()) -> Step:
    """Read the tokens or the parts of a step; fields in `ignored` are allowed and not read.

    Raises:
        Invalid: a field is missing, unknown, or of the wrong type.

    """
    refuse_unknown(fields, (*row_fields(tuple(indices)), *STEP_PARTS, *ignored))
    if "parts" in fields or "placeholder" in fields:
        return _read_parts_step(fields, ignored)
    rows: dict[str, TokenRows] = {}
    further: tuple[TokenRows, ...] = ()
    for name, value in {"input_ids": None, **fields}.items():
        if name == POSITIONS:
            rows[name], *others = read_json_positions(value, empty=True)
            further = tuple(others)
        elif name not in ("offset", *ignored):
            rows[name] = read_json_rows(name, value, empty=True)
    offset = read_offset(fields["offset"]) if "offset" in fields else None
    return TokenRequest(offset=offset, further_positions=further, **token_inputs(rows))


def _read_parts_step(fields: Mapping[str, Any], ignored: tuple[str, ...]) -> PartsRequest:
    rows = read_parts(fields.get("parts"), empty=True)
    refuse_beside_parts(fields, (*STEP_PARTS, *ignored))
    return PartsRequest(
        rows=rows,
        placeholder=read_placeholder(fields["placeholder"]) if "placeholder" in fields else None,
        offset=read_offset(fields["offset"]) if "offset" in fields else None,
    )


@dataclass(frozen=True)
class Feed:
    """Known rows of ids or parts, the options of their stream, and `chunk`, the tokens of a row in one event."""

    options: DecodeOptions
    encoding: str
    step: Step
    chunk: int


def read_feed(fields: Mapping[str, Any], indices: Collection[str]) -> Feed:
    """Read the fields of a request with a known list of ids.

    Raises:
        Invalid: a field is missing, unknown, or of the wrong type.

    """
    refuse_unknown(fields, dict.fromkeys((*row_fields(tuple(indices)), *STEP_PARTS, *OPTIONS, "chunk")))
    options = {name: value for name, value in fields.items() if name in OPTIONS}
    chunk = fields.get("chunk", 1)
    if type(chunk) is not int or not 1 <= chunk < 2**31:
        raise Invalid("chunk", format_value(chunk), "1 or more")
    step = read_step({name: value for name, value in fields.items() if name not in (*OPTIONS, "chunk")}, indices)
    options.setdefault("rows", len(step.rows if isinstance(step, PartsRequest) else step.input_ids.lengths))
    return Feed(*read_options(options), step, chunk)


def _read_operation(name: str, value: Any, context: Any) -> Operation:
    if name in BARE_OPS:
        if value is not True:
            raise Invalid(name, format_value(value), "true")
        return BARE_OPS[name]()
    if name == RewindOp.name and type(value) is int:
        value = [value]
    if not isinstance(value, list):
        raise Invalid(name, format_value(value), "a list of integers")
    rows = None if context is None else read_json_rows("context", context)
    return INTEGER_OPS[name](read_integers(name, value), rows)


def write_answer(answer: EmbedResult, encoding: str, number: int) -> bytes:
    """Write the answer to a step."""
    document = build_document(answer, encoding)
    return write_json(document | {"step": number} if number else document)


def write_opened(model: TokenModel, running: RunningRows, outputs: tuple[str, ...]) -> bytes:
    """Write the answer to an opening message."""
    manifest = model.manifest
    return write_json(
        {
            "model": model.name,
            "version": model.version,
            "identity": model.identity,
            "max_len": manifest.max_len,
            "outputs": {output: manifest.widths[output] for output in outputs},
            "indices": list(manifest.indices),
            **_write_rows(running),
        }
    )


def _write_rows(running: RunningRows) -> dict[str, Any]:
    context = {} if running.context is None else {"next_context": running.context}
    return {"next_offset": np.ascontiguousarray(running.offset), **context}


def write_state(running: RunningRows, number: int = 0, closing: str | None = None) -> bytes:
    """Write the rows, in answer to another operation than a step; or a close message with its reason."""
    document: dict[str, Any] = {} if closing is None else {"closing": closing}
    document |= _write_rows(running)
    return write_json(document | {"step": number} if number else document)


def write_error(problem: bytes, number: int = 0) -> bytes:
    """Write an error message; `problem` is JSON."""
    document: dict[str, Any] = {"error": orjson.Fragment(problem)}
    return orjson.dumps(document | {"step": number} if number else document)
