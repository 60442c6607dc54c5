"""JSON of the native API: requests with their fields and query parameters, and responses."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from preblock.service.artifacts.names import EMBEDDINGS, TOKEN_EMBEDDINGS
from preblock.service.codecs.chunks import MAX_JSON_VALUES, Base64Chunks, JsonFloats, LazyText, Part, as_bytes, join
from preblock.service.codecs.fields import (
    IN_TEXT,
    drop_nulls,
    read_choice,
    read_one_text,
    read_special_tokens_in_text,
    refuse_beside_text,
    refuse_special_tokens_in_text,
    refuse_unknown,
)
from preblock.service.codecs.output_uses import use_of
from preblock.service.codecs.parts import read_parts, read_placeholder, refuse_beside_parts
from preblock.service.codecs.prompt_embeds import PROMPT_EMBEDS, write_prompt_embeds
from preblock.service.codecs.token_rows import (
    INTEGER,
    POSITIONS,
    read_array_positions,
    read_array_rows,
    read_integer,
    read_integer_list,
    read_json_positions,
    read_json_rows,
    read_offset,
    read_rows,
    row_fields,
    token_inputs,
)
from preblock.service.core.errors import Invalid, Malformed, TooLarge, read_items, unique_names
from preblock.service.core.types import (
    ChunkedTensor,
    EmbedResult,
    PairwiseBiasRequest,
    PartsRequest,
    Result,
    RowsRequest,
    Tensor,
    TextRequest,
    TokenRequest,
    TokenRows,
)

ENCODINGS = ("base64", "float")
TEXT_FIELDS = ("return_tokens", "special_tokens", "special_tokens_in_text")
"""Options of texts alone."""
OPTIONS = (
    *("text", "offset", "context", "truncate", "pooling", "output", "dtype", "encoding"),
    *(*TEXT_FIELDS, "parts", "placeholder"),
)
PARTS_FIELDS = ("parts", "placeholder", "offset", "context", "output", "dtype", "encoding", "special_tokens_in_text")
"""Fields of rows made of parts."""
ARRAY_FIELDS = ("offset", "context", "lengths")
"""Fields other than token inputs in a body of arrays; `lengths` separates the rows of (T,) arrays."""
TEXT_PARAMETERS = ("truncate", "pooling", "output", "dtype", "encoding", "shape", "special_tokens_in_text")
"""Query parameters with plain text as value; the values of others are JSON."""
NAME_PATTERN = re.compile(rb'"\s*:')
"""Matches the end of every name of an object; a text may match too."""
MAX_HEADER_ROWS = 512
"""Most rows with one number each in a response header: 4 kB, which every HTTP client accepts."""


@dataclass(eq=False, slots=True)
class EmbedMessage:
    """A request, and the encoding of its vectors in a JSON response."""

    request: RowsRequest
    encoding: str

    @property
    def fields_reason(self) -> str:
        """Why the response needs fields, such as the outputs by name; "" if one tensor and headers suffice."""
        request = self.request
        if isinstance(request, TextRequest) and request.spans:
            return "with return_tokens"
        if len(request.outputs) > 1:
            return "for several outputs"
        if isinstance(request, TokenRequest):
            rows = len(request.input_ids.lengths)
        else:
            rows = len(request.text if isinstance(request, TextRequest) else request.rows)
        if rows > MAX_HEADER_ROWS and (not isinstance(request, TokenRequest) or request.truncate is not None):
            return f"for text or truncate with more than {MAX_HEADER_ROWS} rows, to state their lengths"
        return ""


def has_more_values(text: bytes, most: int, chunk_bytes: int = 2**20) -> bool:
    """Return whether a JSON text has more than `most` values; an empty list or object counts as one.

    Parsing it would take ten times its memory, and hold the GIL.

    Commas outside of strings separate values. It reads `chunk_bytes` at a time, up to the answer. NumPy releases the
    GIL, so other requests go on. For invalid JSON, the answer has no meaning.
    """
    if len(text) <= most:
        return False
    count, inside, rest = 0, False, b""
    for begin in range(0, len(text), chunk_bytes):
        chunk = rest + text[begin : begin + chunk_bytes]
        rest = b""
        if b"\\" in chunk:  # removes escaped backslashes, then escaped quotes
            chunk = chunk.replace(rb"\\", b"")
            if chunk.endswith(b"\\"):
                chunk, rest = chunk[:-1], b"\\"
            chunk = chunk.replace(rb"\"", b"")
        content = np.frombuffer(chunk, np.uint8)
        commas, quotes = content == ord(","), content == ord('"')
        if quotes.any():
            in_string = np.bitwise_xor.accumulate(quotes) ^ inside
            commas &= ~in_string
            inside = bool(in_string[-1])
        elif inside:
            continue
        count += int(np.count_nonzero(commas))
        if count >= most:
            return True
    return False


def read_json(body: bytes, max_values: int | None = None) -> dict[str, Any]:
    """Read a JSON object without repeated names. Its null fields count as absent, and are left out.

    Args:
        body: the JSON text.
        max_values: maximum values in it; default None: any number.

    Raises:
        TooLarge: the text has more values; it is not parsed then.
        Malformed: another value, or a repeated name at any depth.

    """
    if max_values is not None and has_more_values(body, max_values):
        raise TooLarge("body", f"more than {max_values} JSON values", f"at most {max_values} JSON values")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        message = f"body: not valid JSON ({error}), expected a JSON object"
        raise Malformed("body", "invalid JSON", "a JSON object", message=message) from error
    if not isinstance(document, dict):
        got = "null" if document is None else f"a JSON {type(document).__name__}"
        raise Malformed("body", got, "a JSON object")
    try:
        # orjson drops repeated names. Equal counts prove that none was dropped; else a text may look like a name.
        if len(NAME_PATTERN.findall(body)) != _count_names(document):
            json.loads(body, object_pairs_hook=unique_names, parse_int=str, parse_float=str)
    except RecursionError as error:
        raise Malformed("body", "a JSON object of too many levels", "a JSON object") from error
    except ValueError as error:
        raise Malformed("body", str(error), "each name of an object once") from error
    return drop_nulls(document)


def _count_names(document: dict[str, Any]) -> int:
    """Return the number of names in an object and in all nested objects."""
    count = len(document)
    for value in document.values():
        if isinstance(value, dict):
            count += _count_names(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            count += sum(_count_names(item) for item in value if isinstance(item, dict))
    return count


def read_query(query: Mapping[str, str]) -> dict[str, Any]:
    """Read fields from query parameters: names as they are, all else as JSON. Null, as JSON, is left out.

    Raises:
        Malformed: a value is not JSON.

    """
    fields: dict[str, Any] = {}
    for name, text in query.items():
        try:
            fields[name] = text if name in TEXT_PARAMETERS else orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise Malformed(name, text, "JSON, such as 5 or [[0,1]]") from error
    return drop_nulls(fields)


class RequestOptions(NamedTuple):
    """Options of a request without its tokens: arguments of `EmbedOptions`, and the encoding of values in JSON."""

    wanted: Mapping[str, Any]
    encoding: str

    def of(self, ids: NDArray[Any]) -> EmbedMessage:
        """Return the request for an array of ids; raise Invalid as `read_array_rows` does."""
        return EmbedMessage(TokenRequest(input_ids=read_array_rows("input_ids", ids), **self.wanted), self.encoding)


def read_array_options(query: Mapping[str, str], indices: Collection[str]) -> RequestOptions | None:
    """Read the query parameters of a body with one array of ids; None where they hold further rows.

    Raises:
        Malformed, Invalid: as `read_query` and `read_embed`.

    """
    fields = read_query(query)
    fields.pop("shape", None)
    in_rows = row_fields(tuple(indices))
    if not fields.keys().isdisjoint((*in_rows, *TEXT_FIELDS, "text", "parts", "placeholder", "lengths")):
        return None
    refuse_unknown(fields, (*in_rows, *OPTIONS))
    return _read_options(fields)


def read_embed(fields: Mapping[str, Any], indices: Collection[str] = ()) -> EmbedMessage:
    """Read the fields of an embed request; inputs may be arrays. `indices` names the further inputs of the model.

    Raises:
        Invalid: a field is missing, unknown, or of the wrong type.

    """
    in_rows = row_fields(tuple(indices))
    arrays = [name for name, value in fields.items() if isinstance(value, np.ndarray)]
    refuse_unknown(fields, (*in_rows, *OPTIONS, "lengths") if arrays else (*in_rows, *OPTIONS))
    for name in arrays:
        if name not in in_rows and name not in ARRAY_FIELDS:
            raise Invalid(name, "a tensor", "a query parameter")
    lengths = read_integer_list("lengths", fields["lengths"]) if "lengths" in fields else None
    rows: dict[str, TokenRows] = {}
    further: tuple[TokenRows, ...] = ()
    for name, value in fields.items():
        if name not in in_rows:
            continue
        if name == POSITIONS:
            rows[name], *others = read_array_positions(value, lengths) if name in arrays else read_json_positions(value)
            further = tuple(others)
        else:
            rows[name] = read_array_rows(name, value, lengths) if name in arrays else read_json_rows(name, value)
    text, spans = fields.get("text"), fields.get("return_tokens", False)
    if "parts" in fields or "placeholder" in fields:
        return _read_parts(fields)
    if text is None and "input_ids" not in rows:
        message = "input_ids, text or parts is required: rows of token ids, texts, or rows made of parts"
        raise Invalid("input_ids", "nothing", "rows of token ids, text, or parts", message=message)
    if text is not None:
        refuse_beside_text(rows)
    if type(spans) is not bool or (spans and text is None):
        raise Invalid("return_tokens", spans, "true or false, and true only with text")
    if text is None:
        refuse_special_tokens_in_text(fields.get(IN_TEXT))
    special = fields.get("special_tokens")
    if special is not None and (type(special) is not bool or text is None):
        raise Invalid("special_tokens", special, "true or false, and only with text")
    wanted, encoding = _read_options(fields)
    if text is None:
        return EmbedMessage(TokenRequest(**wanted, **token_inputs(rows), further_positions=further), encoding)
    request = TextRequest(text=read_text("text", text), spans=spans, special_tokens=special, **wanted)
    return EmbedMessage(request, encoding)


def _read_parts(fields: Mapping[str, Any]) -> EmbedMessage:
    """Read a request with rows made of parts."""
    rows = read_parts(fields.get("parts"))
    refuse_beside_parts(fields, PARTS_FIELDS)
    wanted, encoding = _read_options(fields)
    placeholder = read_placeholder(fields["placeholder"]) if "placeholder" in fields else None
    return EmbedMessage(PartsRequest(rows=rows, placeholder=placeholder, **wanted), encoding)


def _read_options(fields: Mapping[str, Any]) -> RequestOptions:
    encoding = read_encoding(fields, (*ENCODINGS, PROMPT_EMBEDS))
    wanted = {
        "offset": read_offset(fields["offset"]) if "offset" in fields else None,
        "context": read_rows("context", fields["context"]) if "context" in fields else None,
        "truncate": fields.get("truncate"),
        "pooling": fields.get("pooling", "none"),
        "special_tokens_in_text": read_special_tokens_in_text(fields),
        "outputs": read_outputs(fields.get("output", TOKEN_EMBEDDINGS if encoding == PROMPT_EMBEDS else EMBEDDINGS)),
        "dtype": read_dtype(fields),
    }
    return RequestOptions(wanted, encoding)


def read_text(field: str, value: Any) -> tuple[str, ...]:
    """Read a text, or a list of texts.

    Raises:
        Invalid: another type, or an empty text.

    """
    if not isinstance(value, list):
        return (read_one_text(field, value),)
    if not value:
        raise Invalid(field, "[]", "at least one text")
    if set(map(type, value)) == {str} and all(value):
        return tuple(value)
    return tuple(read_items(value, lambda row, text: read_one_text(f"{field}[{row}]", text)))


def read_bias(fields: Mapping[str, Any]) -> tuple[PairwiseBiasRequest, str]:
    """Read the fields of a bias request; return it with the encoding of its values in JSON.

    Raises:
        Invalid: a field is missing, unknown, or of the wrong type.

    """
    refuse_unknown(fields, ("query_length", "key_length", "query_offset", "dtype", "encoding"))
    lengths = {name: read_integer(name, fields.get(name)) for name in ("query_length", "key_length")}
    if "query_offset" in fields:
        lengths["query_offset"] = read_integer("query_offset", fields["query_offset"])
    return PairwiseBiasRequest(**lengths, dtype=read_dtype(fields)), read_encoding(fields)


def read_position_query(query: Mapping[str, str]) -> tuple[int, int | None, str]:
    """Return the parameters `first` (default 0), `count` (None without one) and `encoding`.

    Raises:
        Invalid: a parameter is unknown or of the wrong type.

    """
    refuse_unknown(query, ("first", "count", "encoding"))
    return _read_query_integer(query, "first") or 0, _read_query_integer(query, "count"), read_encoding(query)


def read_neighbour_query(query: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the parameters `id` (required) and `count` (None without one).

    Raises:
        Invalid: a parameter is missing, unknown or of the wrong type.

    """
    refuse_unknown(query, ("id", "count"))
    token = _read_query_integer(query, "id")
    if token is None:
        raise Invalid("id", "nothing", "the id of a token")
    return token, _read_query_integer(query, "count")


def _read_query_integer(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise Invalid(name, repr(text), INTEGER)
    return read_integer(name, int(text))


def read_outputs(output: Any) -> tuple[str, ...]:
    """Read the names of outputs: a list, or text with commas between them.

    Raises:
        Invalid: another type, or a repeated name.

    """
    names = output.split(",") if isinstance(output, str) else output if isinstance(output, list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise Invalid("output", output, "the name of an output, or a list of names")
    if len(set(names)) < len(names):
        raise Invalid("output", names, "each name once")
    return tuple(names)


def read_dtype(fields: Mapping[str, Any]) -> str:
    """Read the output dtype; default float32."""
    dtype = fields.get("dtype", "float32")
    if not isinstance(dtype, str):
        raise Invalid("dtype", dtype, "a name")
    return dtype


def read_encoding(fields: Mapping[str, Any], encodings: tuple[str, ...] = ENCODINGS) -> str:
    """Read the encoding of values in JSON; default: the first of `encodings`."""
    return read_choice("encoding", fields.get("encoding", encodings[0]), encodings)


BASE64_PLACEHOLDER, FLOATS_PLACEHOLDER = orjson.Fragment(b'"\0"'), orjson.Fragment(b"\0")
"""Placeholders of base64 and of numbers in a document. Serialized JSON never holds a zero byte."""
TEXT_COPIES = 12
"""Memory of values, their text and three copies of the text, in sizes of the values as float32."""


def build_document(answer: Result, encoding: str) -> dict[str, Any]:
    """Return a result as a document for `write_json`: one output under its name, or several under `outputs`."""
    document: dict[str, Any] = {
        "model": answer.model,
        "version": answer.version,
        "dtype": answer.dtype,
        "encoding": encoding,
    }
    written = {name: _encode_tensor(answer, tensor, encoding) for name, tensor in answer.tensors.items()}
    if len(written) == 1:
        ((name, tensor),) = answer.tensors.items()
        use = use_of(name, answer.lookup_use)
        document |= {"dtype": tensor.dtype.name, "use_as": use, "shape": tensor.shape, name: written[name]}
    else:
        document["outputs"] = {
            name: {
                "use_as": use_of(name, answer.lookup_use),
                "dtype": answer.tensors[name].dtype.name,
                "shape": answer.tensors[name].shape,
                "data": data,
            }
            for name, data in written.items()
        }
    if isinstance(answer, EmbedResult):
        document |= answer.row_values
        if not answer.ragged:
            del document["lengths"]
        if answer.input_ids is not None and answer.spans is not None:
            ends = answer.input_ids.starts[1:]
            document |= {"input_ids": np.split(answer.input_ids.values, ends), "spans": np.split(answer.spans, ends)}
    return document


def _encode_tensor(answer: Result, tensor: Tensor, encoding: str) -> Any:
    if encoding == PROMPT_EMBEDS and isinstance(answer, EmbedResult):
        return write_prompt_embeds(tensor, answer.lengths)
    if encoding == "base64":
        return to_base64(tensor)
    return to_json_numbers(tensor)


def write_json_parts(document: Any) -> list[Part]:
    """Write a document or an array in parts; base64 and many values are written while they are sent."""
    values: list[Base64Chunks | JsonFloats | LazyText] = []

    def mark(value: object) -> orjson.Fragment:
        if not isinstance(value, Base64Chunks | JsonFloats | LazyText):
            raise TypeError(type(value).__name__)
        values.append(value)
        return BASE64_PLACEHOLDER if isinstance(value, Base64Chunks) else FLOATS_PLACEHOLDER

    text = orjson.dumps(document, mark, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS)
    if not values:  # avoids a copy of several megabytes
        return [text]
    before, *others = text.split(b"\0")
    return [before, *(part for pair in zip(values, others, strict=True) for part in pair)]


def write_json(document: dict[str, Any]) -> bytes:
    """Write a document with its arrays as one `bytes`."""
    return join(write_json_parts(document))


def to_base64(tensor: Tensor) -> Base64Chunks:
    """Return the values as a JSON string in base64 of little-endian bytes."""
    return Base64Chunks((as_bytes(tensor),))


def to_json_numbers(tensor: Tensor) -> NDArray[np.generic] | JsonFloats:
    """Return the values as JSON numbers; many are written while they are sent, and computed ones are checked before.

    Raises:
        Invalid: a value is infinite or NaN.

    """
    if not isinstance(tensor, ChunkedTensor):
        check_finite(tensor)
    return write_numbers(tensor)


def check_finite(tensor: NDArray[np.generic]) -> None:
    """Raise Invalid if a value is infinite or NaN."""
    if tensor.dtype.kind != "i" and not np.isfinite(_widen(tensor)).all():
        raise Invalid("encoding", "float", "base64, since JSON cannot hold an infinite value or NaN")


def write_numbers(tensor: Tensor, shape: tuple[int, ...] | None = None) -> NDArray[np.generic] | JsonFloats:
    """Return finite values, in another `shape` if it is given, as JSON numbers; many are written while they are sent.

    The text of a value takes several times its memory.
    """
    shape = tensor.shape if shape is None else shape
    if isinstance(tensor, ChunkedTensor):
        return JsonFloats(tensor, shape)
    return JsonFloats((tensor,), shape) if tensor.size > MAX_JSON_VALUES else _widen(tensor.reshape(shape))


def _widen(tensor: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return integers unchanged, and other values as float32; the conversion from narrower dtypes is exact."""
    return tensor if tensor.dtype.kind == "i" else tensor.astype(np.float32, copy=False)
