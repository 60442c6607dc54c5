"""Rows made of parts over the Open Inference Protocol, with tritonclient. Oracles: the native API, and NumPy."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from tests.service.api.http.native_requests import encode, vectors_of
from tests.service.api.http.native_requests import told as native
from tests.support.servers import Server

GIVEN = np.random.default_rng(5).standard_normal((3, 4), np.float32)
PARTS = [[{"input_ids": [1, 2]}, {"vectors": encode(GIVEN[:2])}], [{"vectors": encode(GIVEN[2:])}, {"input_ids": [3]}]]
Triton = tuple[Any, Any]
"""The module of a protocol, and its client."""


@pytest.fixture(scope="module", params=["http", "grpc"])
def triton(catalogue_server: Server, request: pytest.FixtureRequest) -> Iterator[Triton]:
    http = request.param == "http"
    module: Any = tritonclient.http if http else tritonclient.grpc
    with module.InferenceServerClient(catalogue_server.address[7:] if http else catalogue_server.grpc) as client:
        yield module, client


def tensor(module: Any, name: str, value: NDArray[Any] | list[str]) -> Any:
    """Return an input of an array, or of texts."""
    array = np.array([text.encode() for text in value], object) if isinstance(value, list) else value
    kind = {"O": "BYTES", "f": "FP32", "i": "INT64"}[array.dtype.kind]
    return module.InferInput(name, array.shape, kind).set_data_from_numpy(array)


def infer(triton: Triton, model: str, inputs: dict[str, Any], *outputs: str, **options: Any) -> Any:
    module, client = triton
    wanted = [module.InferRequestedOutput(name) for name in outputs or ("embeddings",)]
    return client.infer(model, [tensor(module, *given) for given in inputs.items()], outputs=wanted, **options)


def test_parts_equal_the_native_api(catalogue_http: httpx.Client, triton: Triton) -> None:
    text = [[{"input_ids": [1]}, {"text": "hello world"}]]  # without special tokens
    for model, parts, offset in (("gpt", PARTS, [1, 0]), ("bert", text, [0])):
        inputs = {"parts": [*map(json.dumps, parts)], "offset": np.array(offset)}
        result = infer(triton, model, inputs, "embeddings", "lengths", "next_offset")
        expected = native(catalogue_http, model, parts=parts, offset=offset)
        assert result.as_numpy("embeddings").tobytes() == vectors_of(expected).tobytes()
        assert result.as_numpy("next_offset").tolist() == expected["next_offset"]
        assert result.as_numpy("lengths").tolist() == expected.get("lengths", [3])


@pytest.mark.parametrize("in_parts", [False, True])
def test_placeholders_take_rows_of_a_tensor(catalogue_http: httpx.Client, triton: Triton, in_parts: bool) -> None:
    ids = np.array([[1, 99, 99], [99, 2, 3]])
    parts = [json.dumps([{"input_ids": row}]) for row in ids.tolist()]
    rows = {"parts": parts} if in_parts else {"input_ids": ids}
    result = infer(triton, "llama", rows | {"vectors": GIVEN}, parameters={"placeholder_id": 99})
    tokens = vectors_of(native(catalogue_http, "llama", input_ids=[1, 2, 3]))[0]
    expected = np.concatenate([tokens[:1], GIVEN, tokens[1:]]).reshape(2, 3, 4)
    assert np.array_equal(result.as_numpy("embeddings"), expected)


def test_request_without_parts_follows_one_with_parts(catalogue_http: httpx.Client, triton: Triton) -> None:
    ids = {"input_ids": np.array([[1, 2, 3]])}
    expected = vectors_of(native(catalogue_http, "llama", input_ids=[[1, 2, 3]]))
    for _ in range(2):
        assert infer(triton, "llama", ids).as_numpy("embeddings").tobytes() == expected.tobytes()
        given = infer(triton, "llama", ids | {"vectors": GIVEN[:1]}, parameters={"placeholder_id": 2})
        assert np.array_equal(given.as_numpy("embeddings")[0, 1], GIVEN[0])


@pytest.mark.parametrize(
    ("model", "output", "parts"),
    [("ngrams", "ngram_embeddings", [{"input_ids": [1, 2]}]), ("gpt", "embeddings", PARTS[0])],
)
def test_sequence_continues_after_parts(
    catalogue_http: httpx.Client, triton: Triton, model: str, output: str, parts: list[Any]
) -> None:
    infer(triton, model, {"parts": [json.dumps(parts)]}, output, sequence_id=7, sequence_start=True)
    last = infer(triton, model, {"input_ids": np.array([[4]])}, output, sequence_id=7, sequence_end=True)
    whole = native(catalogue_http, model, parts=[*parts, {"input_ids": [4]}], output=output)
    assert vectors_of(whole, output)[0, -1].tobytes() == last.as_numpy(output).tobytes()


def test_vector_in_a_sequence_with_history_is_rejected(triton: Triton) -> None:
    ids, vectors = {"input_ids": np.array([[5, 6]])}, {"parts": [json.dumps([{"vectors": encode(GIVEN)}])]}
    infer(triton, "ngrams", ids, "ngram_row_ids", sequence_id=8, sequence_start=True)
    with pytest.raises(InferenceServerException, match="vectors: got a value, expected token ids, since the sequence"):
        infer(triton, "ngrams", vectors, "token_embeddings", sequence_id=8)
    infer(triton, "ngrams", ids, "ngram_row_ids", sequence_id=8, sequence_end=True)


GOOD = json.dumps([{"input_ids": [1]}])
IDS, NAN = np.array([[1, 9]]), np.full((1, 4), np.nan, np.float32)
NINE = {"placeholder_id": 9}
BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *(("llama", {"parts": [GOOD, row]}, {}, "parts[1]: ") for row in ("[{", "{}", '[],"x":[]', "", "5")),
    ("llama", {"parts": ['[{"vectors":"AAAA"}]']}, {}, "parts[0][0].vectors: "),
    ("llama", {"parts": [GOOD], "input_ids": IDS}, {}, "input_ids cannot be used with parts"),
    ("llama", {"parts": [GOOD], "attention_mask": np.array([[1]])}, {}, "attention_mask cannot be used with parts"),
    ("llama", {"parts": [GOOD]}, {"pooling": "mean"}, "pooling cannot be used with parts"),
    ("llama", {"parts": [GOOD]}, {"truncate": "left"}, "truncate cannot be used with parts"),
    ("llama", {"input_ids": IDS, "vectors": GIVEN[:1]}, {}, "the input vectors and the parameter placeholder_id"),
    ("llama", {"input_ids": IDS}, NINE, "the input vectors and the parameter placeholder_id"),
    ("llama", {"vectors": GIVEN}, NINE, "inputs: got no input_ids"),
    ("llama", {"input_ids": IDS, "vectors": NAN}, NINE, "vectors: got nan"),
    ("llama", {"input_ids": IDS, "vectors": GIVEN[:, :3]}, NINE, "vectors.shape: got [3, 3]"),
    ("llama", {"input_ids": IDS, "vectors": GIVEN[:1]}, {"placeholder_id": "9"}, "parameters.placeholder_id: got '9'"),
    ("bert", {"text": ["hello"], "parts": [GOOD]}, {}, "parts cannot be used with text"),
    ("bert", {"text": ["hello"]}, NINE, "parameters.placeholder_id: got 9, expected none beside text"),
]


def test_bad_parts_are_rejected(catalogue_http: httpx.Client, triton: Triton) -> None:
    for model, inputs, parameters, message in BAD:
        with pytest.raises(InferenceServerException) as raised:
            infer(triton, model, inputs, parameters=parameters)
        assert message in str(raised.value), inputs
    many = {"name": "parts", "datatype": "BYTES", "shape": [1], "data": [json.dumps([{"input_ids": [1] * 2_000_000}])]}
    answer = catalogue_http.post("/v2/models/gpt/infer", json={"inputs": [many]})
    assert (answer.status_code, answer.json()["error"][:21]) == (413, "parts: got more than "), answer.text
