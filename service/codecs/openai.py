"""Requests, embeddings and errors of the OpenAI API."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.codecs.chunks import CHUNK_BYTES, MAX_JSON_VALUES, Buffer, LazyText, Part, body_chunks
from preblock.service.codecs.fields import (
    IN_TEXT,
    format_value,
    read_choice,
    read_flag,
    read_special_tokens_in_text,
    refuse_special_tokens_in_text,
    refuse_unknown,
    rename_field,
)
from preblock.service.codecs.native_json import (
    EmbedMessage,
    check_finite,
    read_text,
    to_base64,
    write_json_parts,
    write_numbers,
)
from preblock.service.codecs.token_rows import read_json_rows
from preblock.service.core.errors import (
    ClientFault,
    Forbidden,
    Invalid,
    NotFound,
    PreblockError,
    RateLimited,
    TooLarge,
    Unauthenticated,
)
from preblock.service.core.types import DTYPES, EmbedResult, Int64, TextRequest, TokenRequest

FIELDS = (
    *("model", "input", "encoding_format", "dimensions", "pooling", "truncate", "truncate_prompt_tokens"),
    *("truncation_side", "add_special_tokens", "special_tokens_in_text", "use_activation", "embed_dtype", "endianness"),
)
"""Fields of OpenAI, then those of vLLM and of Preblock."""
IGNORED = ("user", "input_type", "metadata", "priority", "request_id", "cache_salt", "mm_processor_kwargs")
"""Fields that OpenAI, vLLM and LiteLLM document, and that cannot change a vector here.

Every other name is an error: a misspelled or foreign option, such as `output_dimension`, would give other vectors.
"""
ENCODINGS = ("float", "base64")
ENDIANNESS = ("native", "little")
"""Byte orders of base64: vectors are little-endian, as those of every machine that runs the service."""
INPUT_FORMS = "a string, a list of strings, a list of token ids, or a list of such lists"
FIELD_NAMES = (
    (r"^(input_ids|text)\b", "input"),
    (r"^offset(\[\d+\]) \+ tokens$", r"input\1"),
    ("^encoding$", "encoding_format"),
    ("^dtype$", "embed_dtype"),
    ("^max_length$", "truncate_prompt_tokens"),
)
"""Patterns of native field names, and their names in the OpenAI API."""


def read_model(document: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return name and version of the requested model, given as `name` or `name:version`.

    Raises:
        Invalid: an unknown field, or no model.

    """
    refuse_unknown(document, (*FIELDS, *IGNORED))
    identifier = document.get("model")
    if identifier is None:
        raise Invalid("model", "nothing", "the name of a model", message="model is required: the name of a model")
    if not isinstance(identifier, str):
        raise Invalid("model", identifier, "the name of a model")
    return split_identifier(identifier)


def split_identifier(identifier: str) -> tuple[str, str | None]:
    """Return name and version of `name` or `name:version`."""
    name, colon, version = identifier.partition(":")
    return name, (version or identifier) if colon else None


def list_ignored(document: Mapping[str, Any]) -> list[str]:
    """Return the fields without effect; in vLLM too, `truncation_side` has one only with `truncate_prompt_tokens`."""
    names = IGNORED if "truncate_prompt_tokens" in document else (*IGNORED, "truncation_side")
    return [name for name in document if name in names]


def read_embeddings(document: Mapping[str, Any], model: str, manifest: Manifest) -> EmbedMessage:
    """Read a request for vectors of a model. Only a sentence embedding has a default of `pooling`: the mean.

    Source of the fields from `truncate_prompt_tokens` on: vLLM, `entrypoints/pooling/base/protocol.py`.

    Raises:
        Invalid: a field is missing, or its value is not allowed.

    """
    pooling, activation = document.get("pooling"), document.get("use_activation")
    if pooling is None:
        if manifest.sentence is None:
            message = f'{lacks_sentences(model)}; or set pooling to "mean", "first", "last" or "none" for these vectors'
            raise Invalid("pooling", "nothing", "mean, first, last or none", message=message)
        pooling = "mean"
    encoding = read_choice("encoding_format", document.get("encoding_format", "float"), ENCODINGS)
    read_choice("endianness", document.get("endianness", "native"), ENDIANNESS)
    if activation is not None and read_flag("use_activation", activation) and pooling == "none":
        raise Invalid(
            "use_activation", activation, "false, or another pooling, since only pooled vectors are normalized"
        )
    embed_dtype = read_choice("embed_dtype", document.get("embed_dtype", "float32"), DTYPES)
    wanted: dict[str, Any] = {
        "pooling": pooling,
        "dimensions": read_dimensions(document.get("dimensions"), pooling, manifest),
        "normalize": activation,
        "dtype": embed_dtype if encoding == "base64" else "float32",
        **_read_truncation(document, manifest.limit),
    }
    return EmbedMessage(read_inputs(document, "input", wanted, special_tokens=read_added_tokens(document)), encoding)


def read_added_tokens(document: Mapping[str, Any]) -> bool | None:
    """Return whether the tokenizer adds its special tokens to a text; None for the default of the model."""
    value = document.get("add_special_tokens")
    return None if value is None else read_flag("add_special_tokens", value)


def read_inputs(
    document: Mapping[str, Any], field: str, wanted: Mapping[str, Any], **of_text: Any
) -> TextRequest | TokenRequest:
    """Read texts, or rows of token ids, with the options of both and those of texts alone.

    Raises:
        Invalid: `field` is missing, or a value is not allowed.

    """
    value, wanted = document.get(field), {**wanted, IN_TEXT: read_special_tokens_in_text(document)}
    if value is None:
        raise Invalid(field, "nothing", INPUT_FORMS, message=f"{field} is required: {INPUT_FORMS}")
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
        return TextRequest(text=read_text(field, value), **of_text, **wanted)
    if not isinstance(value, list):
        raise Invalid(field, value, INPUT_FORMS)
    refuse_special_tokens_in_text(document.get(IN_TEXT))
    return TokenRequest(input_ids=read_json_rows(field, value), **wanted)


def lacks_sentences(model: str) -> str:
    """Return the error of a request for sentence embeddings of another model than a static embedding model."""
    return (
        f"model {model} has no sentence embeddings: its vectors enter block 0, and their mean compares no meanings. "
        "Use a static embedding model, such as wordllama (docs/static-models.md)"
    )


def read_dimensions(dimensions: Any, pooling: Any, manifest: Manifest) -> int | None:
    """Return the number of leading columns to keep: fewer than all only of a sentence embedding.

    Raises:
        Invalid: another number.

    """
    width = manifest.width
    if dimensions is None or (type(dimensions) is int and dimensions == width):
        return None
    shorter = manifest.sentence is not None and pooling != "none"
    if type(dimensions) is not int or not (shorter and 1 <= dimensions < width):
        allowed = f"1 to {width}" if shorter else f"{width}, the width of this model"
        raise Invalid("dimensions", format_value(dimensions), f"{allowed}, or nothing")
    return dimensions


def _read_truncation(document: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return the arguments of `EmbedOptions`; `truncate_prompt_tokens` alone cuts on the right, as vLLM does."""
    field = "truncate_prompt_tokens"
    most, side, vllm_side = (document.get(name) for name in (field, "truncate", "truncation_side"))
    if vllm_side is not None:
        read_choice("truncation_side", vllm_side, ("left", "right"))
        if side is not None:
            raise Invalid("truncation_side", "truncate and truncation_side", "one of them")
    if most is None:
        return {"truncate": side}
    if type(most) is not int or not (most == -1 or 1 <= most <= limit):
        raise Invalid(field, format_value(most), f"1 to {limit}, or -1 for the maximum context length of this model")
    return {"truncate": side or vllm_side or "right", "max_length": None if most == -1 else most}


def write_embeddings(answer: EmbedResult, message: EmbedMessage) -> list[Part]:
    """Write a vector for each input; with the pooling "none" a vector for each token, and their shape."""
    (tensor,) = answer.arrays.values()
    rows = answer.lengths if message.request.pooling == "none" else None
    tokens = int(answer.lengths.sum())
    return write_vectors(answer.model, answer.version, message.encoding, tensor, tokens, rows, answer.truncated)


def write_vectors(
    model: str,
    version: int,
    encoding: str,
    tensor: NDArray[np.generic],
    tokens: int,
    rows: Int64 | None = None,
    truncated: Int64 | None = None,
) -> list[Part]:
    """Write the vectors of inputs.

    Args:
        model: that has computed them.
        version: of the model.
        encoding: of the vectors.
        tensor: one vector for each input, (B, width), or one for each token, (B, L, width) or (T, width).
        tokens: T, tokens of all inputs.
        rows: tokens of each input, int64 (B,); None for one vector for each input.
        truncated: removed tokens of each input, int64 (B,); None without truncation.

    """
    write = to_base64 if encoding == "base64" else write_numbers
    if encoding == "float":
        check_finite(tensor)
    parts = tensor if rows is None else np.split(tensor.reshape(-1, tensor.shape[-1]), np.cumsum(rows)[:-1])
    data = (
        {"object": "embedding", "index": index, "embedding": write(part)}
        | ({} if rows is None else {"shape": part.shape})
        for index, part in enumerate(parts)
    )
    later = tensor.nbytes > CHUNK_BYTES if encoding == "base64" else tensor.size > MAX_JSON_VALUES
    document: dict[str, Any] = {
        "object": "list",
        "model": model,
        "version": version,
        "data": LazyText(write_list(data)) if later else list(data),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    if truncated is not None:
        document["truncated"] = truncated
    return write_json_parts(document)


def write_list(items: Iterable[Any]) -> Iterator[Buffer]:
    """Yield the text of a list of at least one object or array."""
    separator = b"["
    for item in items:
        first, *others = body_chunks(write_json_parts(item))
        yield b"".join((separator, first))
        yield from others
        separator = b","
    yield b"]"


def error_document(error: PreblockError, status: int) -> dict[str, Any]:
    """Return an error with the field names, the message, the type and the code of the OpenAI API."""
    param: str | None
    param, message = rename_field(error, FIELD_NAMES, (r"\binput_ids\b", "input"))
    code = kind = None
    match error:
        case NotFound() | Forbidden() if error.field in ("model", "version"):
            message, param, code = _missing_model(error), "model", "model_not_found"
        case Unauthenticated():
            hint = "Send a key of this service in the header Authorization: Bearer KEY."
            message, param, code = f"The API key is missing or incorrect. {hint}", None, "invalid_api_key"
        case Invalid() if error.field == "field":
            message, param, code = str(error), error.got, "unknown_parameter"
        case RateLimited():
            param, code, kind = None, "rate_limit_exceeded", "requests"
        case Invalid() if error.field.endswith("+ tokens"):
            message, code = _too_long(error, param), "context_length_exceeded"
        case TooLarge() if error.got.endswith(" tokens"):
            code = kind = "max_tokens_per_request"
    document = error_body(message, status, param if isinstance(error, ClientFault) else None, code, kind)
    return {"error": document["error"] | error.item_fields}


def _missing_model(error: NotFound | Forbidden) -> str:
    if isinstance(error, Forbidden):
        return f"This API key may not use the model {error.got}."
    hint = f" ({error.hint})" if error.hint else ""
    if error.field == "version":
        return f"The model has no version {error.got}. Its versions: {error.expected}.{hint}"
    return f"The model {error.got} does not exist. Available models: {error.expected}.{hint}"


def _too_long(error: PreblockError, param: str) -> str:
    """Return the message for a row over the limit, from `got` "0 + 9 = 9" and `expected` "at most 8, …"."""
    most = re.search(r"\d+", error.expected)
    assert most is not None
    has = f"{param} has {error.got.rpartition(' ')[2]} tokens{error.items_text}"
    hint = "Shorten the input, or set truncate_prompt_tokens to -1."
    return f"This model's maximum context length is {most[0]} tokens, but {has}. {hint}"


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None, kind: str | None = None
) -> dict[str, Any]:
    """Return a message as an error of the OpenAI API; the default of `kind`, its type, follows the status."""
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
