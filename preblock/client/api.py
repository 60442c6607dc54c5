"""The requests of a client and the readers of their answers, without I/O.

Both clients turn each public function into a method with the same docstring. The method sends the returned request.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote, urlencode

import numpy as np
from numpy.typing import NDArray

from preblock.client.errors import ServerError, invalid, of_problem
from preblock.client.results import Embeddings, Model, Vectors
from preblock.client.safetensors import read_safetensors, write_safetensors

T = TypeVar("T")


class TensorLike(Protocol):
    """The part of torch.Tensor used here; torch need not be installed."""

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        """Return the values as an array."""
        ...


Row = Sequence[int] | NDArray[np.integer[Any]] | TensorLike
Rows = Row | Sequence[Row]

JSON, SAFETENSORS = "application/json", "application/x-safetensors"


@dataclass(frozen=True)
class HttpResponse:
    """An HTTP response; `headers` ignores the case of names."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


@dataclass(frozen=True)
class ApiRequest(Generic[T]):
    """A request, and the reader of its answer."""

    method: str
    path: str
    read: Callable[[HttpResponse], T]
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def result(self, reply: HttpResponse) -> T:
        """Return the result in a response.

        Raises:
            ServiceError: the response is an error, or not from this service.

        """
        if reply.status != 200:
            raise of_problem(reply.status, reply.body)
        try:
            return self.read(reply)
        except (KeyError, TypeError, ValueError) as error:
            detail = f"{self.path}: the answer is not from Preblock ({error!r})"
            raise ServerError({"status": reply.status, "detail": detail}) from error


def embed(
    ids: Rows,
    *,
    model: str,
    version: int | None = None,
    offset: int | Row | None = None,
    position_ids: Rows | None = None,
    attention_mask: Rows | None = None,
    truncate: str | None = None,
    output: str = "embeddings",
    dtype: str = "float32",
    **indices: Rows,
) -> ApiRequest[Embeddings]:
    """Return the vectors that enter block 0.

    Args:
        ids: rows of token ids: lists, an integer array (B, L), or tensors. Rows may differ in length; a flat list is
            one row. Arrays and tensors of one length are fastest.
        model: name of the model.
        version: version of the model; default the highest.
        offset: real tokens fed before, one number or one for each row; default 0.
        position_ids: position index of each token, like `ids`; excludes `offset`.
        attention_mask: 1 for a real token, 0 for padding, like `ids`; default 1.
        truncate: "left" or "right", the side to cut of a row over the limit; default is an error.
        output: name of the output.
        dtype: "float32", "float16" or "bfloat16".
        indices: `token_type_ids` and further inputs of the model, like `ids`.

    Raises:
        ServiceError: the service refuses the request, or cannot answer it.
        NoAnswer: no answer came.

    """
    rows = _given(input_ids=ids, offset=offset, position_ids=position_ids, attention_mask=attention_mask, **indices)
    names = _given(truncate=truncate, output=output, dtype=dtype)
    path = model_path(model, version, "embed")
    if isinstance(offset, int) and isinstance(rows["input_ids"], np.ndarray):
        rows["offset"] = np.array([offset])
    if not all(isinstance(value, np.ndarray) for value in rows.values()):
        return _post(path, rows | names, SAFETENSORS, lambda reply: _embeddings(reply, output))
    headers = {"Accept": SAFETENSORS, "Content-Type": SAFETENSORS}
    body = write_safetensors(rows)
    return ApiRequest("POST", f"{path}?{urlencode(names)}", lambda reply: _embeddings(reply, output), body, headers)


def text(
    text: str | Sequence[str],
    *,
    model: str,
    version: int | None = None,
    offset: int | Row | None = None,
    truncate: str | None = None,
    output: str = "embeddings",
    dtype: str = "float32",
    return_tokens: bool = False,
) -> ApiRequest[Embeddings]:
    """Return the vectors of texts, for a model with a tokenizer.

    Args:
        text: one text for each row, or a single text.
        model: name of the model.
        version: version of the model; default the highest.
        offset: real tokens fed before, one number or one for each row; default 0.
        truncate: "left" or "right", the side to cut of a row over the limit; default is an error.
        output: name of the output.
        dtype: "float32", "float16" or "bfloat16".
        return_tokens: whether the result has `input_ids` and `spans`.

    Raises:
        ServiceError: the service refuses the request, or cannot answer it.
        NoAnswer: no answer came.

    """
    options = _given(offset=offset, truncate=truncate, output=output, dtype=dtype, return_tokens=return_tokens)
    fields = {"text": text, **options}
    return _post(model_path(model, version, "embed"), fields, SAFETENSORS, lambda reply: _embeddings(reply, output))


def prompt_embeds(
    ids: Rows, *, model: str, version: int | None = None, dtype: str = "float32"
) -> ApiRequest[list[str]]:
    """Return each row for the field `prompt_embeds` of vLLM: a tensor saved by torch, in base64.

    Args:
        ids: rows of token ids, as for `embed`.
        model: name of the model; its manifest must say who applies the embedding scale.
        version: version of the model; default the highest.
        dtype: "float32", "float16" or "bfloat16".

    Raises:
        ServiceError: the service refuses the request, or cannot answer it.
        NoAnswer: no answer came.

    """
    fields = {"input_ids": _plain(ids), "dtype": dtype, "encoding": "prompt_embeds"}
    return _post(model_path(model, version, "embed"), fields, JSON, _prompts)


def bias(
    query_length: int,
    key_length: int,
    *,
    model: str,
    version: int | None = None,
    query_offset: int | None = None,
    dtype: str = "float32",
) -> ApiRequest[Vectors]:
    """Return the attention bias for distances between queries and keys: (1, heads, Q, K); of a sinusoid (rows, D).

    Args:
        query_length: queries, Q.
        key_length: keys, K, at positions 0 to K - 1.
        model: name of a model with an attention bias.
        version: version of the model; default the highest.
        query_offset: keys fed before the first query; default 0.
        dtype: "float32", "float16" or "bfloat16".

    Raises:
        ServiceError: the service refuses the request, or cannot answer it.
        NoAnswer: no answer came.

    """
    lengths = {"query_length": query_length, "key_length": key_length}
    options = _given(query_offset=query_offset, dtype=dtype)
    return _post(model_path(model, version, "bias"), lengths | options, SAFETENSORS, _only_tensor)


def models() -> ApiRequest[list[Model]]:
    """Return every model, in its highest version.

    Raises:
        ServiceError: the service cannot answer.
        NoAnswer: no answer came.

    """
    return ApiRequest("GET", "/models", lambda reply: [_model(document) for document in json.loads(reply.body)])


def model(name: str, version: int | None = None) -> ApiRequest[Model]:
    """Return one model; default in its highest version.

    Raises:
        ServiceError: no such model or version (kind "NotFound"), or the service cannot answer.
        NoAnswer: no answer came.

    """
    return ApiRequest("GET", model_path(name, version), lambda reply: _model(json.loads(reply.body)))


def from_torch(value: Any) -> Any:
    """Return a tensor as an array, and any other value unchanged."""
    return value.numpy(force=True) if hasattr(value, "detach") else value


def model_path(model: str, version: int | None, *action: str) -> str:
    """Return the path of a model, or of an action such as "decode"."""
    versions = () if version is None else ("versions", str(version))
    return "/".join(("", "models", quote(model, safe=""), *versions, *action))


def _post(path: str, document: Mapping[str, Any], accept: str, read: Callable[[HttpResponse], T]) -> ApiRequest[T]:
    body = json.dumps(document, default=_listed).encode()
    return ApiRequest("POST", path, read, body, {"Accept": accept, "Content-Type": JSON})


def _given(**options: Any) -> dict[str, Any]:
    """Return the options other than None, converted by `_plain`."""
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return a tensor as an array, an array not of integers as lists, and any other value unchanged."""
    value = from_torch(value)
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind not in "iu" else value


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array, a tensor, or one of their scalars
        return value.tolist()
    raise invalid("request", f"a {type(value).__name__}", "numbers, and lists, arrays or tensors of them")


def _embeddings(reply: HttpResponse, output: str) -> Embeddings:
    tensors, metadata = read_safetensors(reply.body)
    lengths = tensors["lengths"]
    input_ids, spans = (
        np.split(tensors[name], np.cumsum(lengths)[:-1]) if name in tensors else None for name in ("input_ids", "spans")
    )
    return Embeddings(
        model=metadata["model"],
        version=int(metadata["version"]),
        vectors=tensors[output],
        lengths=lengths,
        next_offset=tensors["next_offset"],
        truncated=tensors.get("truncated"),
        input_ids=input_ids,
        spans=spans,
    )


def _only_tensor(reply: HttpResponse) -> Vectors:
    tensors, _ = read_safetensors(reply.body)
    (tensor,) = tensors.values()
    return tensor


def _prompts(reply: HttpResponse) -> list[str]:
    prompts = json.loads(reply.body)["token_embeddings"]
    return [prompts] if isinstance(prompts, str) else list(prompts)


def _model(document: Mapping[str, Any]) -> Model:
    """Read a model. Unknown fields, of a later service, are ignored."""
    return Model(**{known.name: document[known.name] for known in fields(Model)})
