"""The HTTP calls of a client: each is a request as bytes, and a function to read its answer."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlencode

import numpy as np

from preblock.client.errors import ServerError, invalid
from preblock.client.parts import Parts, Placeholder, write_parts
from preblock.client.results import Embeddings, Model, Vectors
from preblock.client.safetensors import read_safetensors, write_safetensors
from preblock.client.token_ids import to_json, to_plain
from preblock.client.transport import model_path, quote_model

T = TypeVar("T")

Dtype = Literal["float32", "float16", "bfloat16"]
TableDtype = Literal["float32", "float16", "bfloat16", "stored"]
Side = Literal["left", "right"]
Pooling = Literal["mean", "first", "last"]
InText = Literal["allow", "refuse", "plain"]
JSON, SAFETENSORS = "application/json", "application/x-safetensors"


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and `parse` to read the body of its answer."""

    method: str
    path: str
    parse: Callable[[bytearray], T]
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def read(self, answer: bytearray) -> T:
        """Return the result in the answer.

        Raises:
            ServerError: the answer is not one of Preblock.

        """
        try:
            return self.parse(answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            detail = f"{self.path}: the answer is not from Preblock ({error!r})"
            raise ServerError({"status": 200, "detail": detail}) from error


def embed(
    model: str,
    version: int | None,
    inputs: Mapping[str, Any],
    parts: Parts | None,
    placeholder: Placeholder | None,
    output: str,
    **options: Any,
) -> Call[Embeddings]:
    """Return the call for rows of ids or of parts; `inputs` holds `input_ids`, `offset` and others by name."""
    check_names(output, options.get("dtype"))
    rows, names = _given(**inputs), _given(output=output, **options)
    path, parse = model_path(model, version, "embed"), partial(_read_embeddings, output, "pooling" in names)
    made, offset = write_parts(parts, placeholder), rows.get("offset")
    if isinstance(offset, int):
        rows["offset"] = np.array([offset])
    if made or not all(isinstance(value, np.ndarray) and value.dtype.kind in "iu" for value in rows.values()):
        return _post(path, rows | _given(offset=offset) | made | names, SAFETENSORS, parse)
    headers = {"Accept": SAFETENSORS, "Content-Type": SAFETENSORS}
    return Call("POST", f"{path}?{urlencode(names)}", parse, write_safetensors(rows), headers)


def text(model: str, version: int | None, output: str, **options: Any) -> Call[Embeddings]:
    """Return the call for texts."""
    check_names(output, options.get("dtype"))
    pooled = options.get("pooling") is not None
    path, parse = model_path(model, version, "embed"), partial(_read_embeddings, output, pooled)
    return _post(path, _given(output=output, **options), SAFETENSORS, parse)


def prompt_embeds(
    model: str, version: int | None, output: str, parts: Parts | None, placeholder: Placeholder | None, **options: Any
) -> Call[list[str]]:
    """Return the call for the field `prompt_embeds` of vLLM."""
    check_names(output, options.get("dtype"))
    document = _given(output=output, encoding="prompt_embeds", **options) | write_parts(parts, placeholder)
    return _post(model_path(model, version, "embed"), document, JSON, partial(_read_prompts, output))


def bias(model: str, version: int | None, **options: Any) -> Call[Vectors]:
    """Return the call for an attention bias."""
    check_dtype(options.get("dtype"))
    return _post(model_path(model, version, "bias"), _given(**options), SAFETENSORS, _read_only_tensor)


def list_names() -> Call[list[str]]:
    """Return the call for the names of the ready models, without aliases that no path can hold."""
    return Call("GET", "/models", _read_names)


def describe(name: str, version: int | None) -> Call[Model]:
    """Return the call for the description of a model."""
    return Call("GET", model_path(name, version), lambda body: _read_model(json.loads(body)))


def control(name: str, action: Literal["load", "unload"]) -> Call[None]:
    """Return the call to load or unload a model, a part of the Open Inference Protocol."""
    path = f"/v2/repository/models/{quote_model(name)}/{action}"
    return Call("POST", path, lambda _: None, b"{}", {"Content-Type": JSON})


def _post(path: str, document: Mapping[str, Any], accept: str, parse: Callable[[bytearray], T]) -> Call[T]:
    return Call("POST", path, parse, to_json(document).encode(), {"Accept": accept, "Content-Type": JSON})


def _given(**options: Any) -> dict[str, Any]:
    """Return the options other than None, tensors as arrays."""
    return {name: to_plain(name, value) for name, value in options.items() if value is not None}


def check_names(output: Any, dtype: Any, companions: Any = ()) -> None:
    """Check the names of an output, of a type, and of the further outputs of a stream; None is the default type.

    Raises:
        RequestError: a name is no text, such as the type `numpy.float16`; or a list and a name are confused.

    """
    if not isinstance(output, str) or "," in output:
        raise invalid("output", repr(output), "the name of one output")
    check_dtype(dtype)
    if isinstance(companions, str) or not isinstance(companions, Iterable):
        raise invalid("companions", repr(companions), "a list of names")


def check_dtype(dtype: Any) -> None:
    """Check the name of a type; None is the default type; raise RequestError for a type such as `numpy.float16`."""
    if not isinstance(dtype, str | None):
        raise invalid("dtype", repr(dtype), "a name such as 'float16'")


def _read_embeddings(output: str, pooled: bool, body: bytearray) -> Embeddings:
    tensors, metadata = read_safetensors(body)
    lengths = tensors["lengths"]
    input_ids, spans = (
        np.split(tensors[name], np.cumsum(lengths)[:-1]) if name in tensors else None for name in ("input_ids", "spans")
    )
    return Embeddings(
        model=metadata["model"],
        version=int(metadata["version"]),
        vectors=tensors[output],
        pooled=pooled,
        use_as=metadata[f"use_as.{output}"],
        lengths=lengths,
        next_offset=tensors["next_offset"],
        next_context=tensors.get("next_context"),
        position_delta=tensors.get("position_delta"),
        truncated=tensors.get("truncated"),
        input_ids=input_ids,
        spans=spans,
    )


def _read_only_tensor(body: bytearray) -> Vectors:
    tensors, _ = read_safetensors(body)
    (tensor,) = tensors.values()
    return tensor


def _read_prompts(output: str, body: bytearray) -> list[str]:
    prompts = json.loads(body)[output]
    return [prompts] if isinstance(prompts, str) else list(prompts)


def _read_names(body: bytearray) -> list[str]:
    names = [str(model["name"]) for model in json.loads(body) if model["ready"]]
    return [name for name in names if "/" not in name]


def _read_model(document: Mapping[str, Any]) -> Model:
    """Read a model. Unknown fields, of a later service, are ignored."""
    return Model(**{known.name: document[known.name] for known in fields(Model)})
