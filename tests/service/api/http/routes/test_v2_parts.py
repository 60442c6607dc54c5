"""Rows made of parts over the Open Inference Protocol, with tritonclient. Oracles: the native API, and NumPy."""

import base64
import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.servers import Server

GIVEN = np.random.default_rng(5).standard_normal((3, 4), np.float32)
ROWS = ("embeddings", "lengths", "next_offset")


@pytest.fixture(scope="module", params=["http", "grpc"])
def triton(catalogue_server: Server, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """The module of a protocol, and its client."""
    if request.param == "http":
        with tritonclient.http.InferenceServerClient(catalogue_server.address.removeprefix("http://")) as client:
            yield tritonclient.http, client
    else:
        with tritonclient.grpc.InferenceServerClient(catalogue_server.grpc) as client:
            yield tritonclient.grpc, client


def encode(vectors: NDArray[np.float32]) -> str:
    return base64.b64encode(vectors.tobytes()).decode()


def text_input(module: Any, name: str, *texts: str) -> Any:
    array = np.array([text.encode() for text in texts], object)
    return module.InferInput(name, [len(texts)], "BYTES").set_data_from_numpy(array)


def array_input(module: Any, name: str, array: NDArray[Any]) -> Any:
    kind = "FP32" if array.dtype == np.float32 else "INT64"
    return module.InferInput(name, array.shape, kind).set_data_from_numpy(array)


def infer(triton: tuple[Any, Any], model: str, *inputs: Any, outputs: Any = ROWS, **options: Any) -> Any:
    module, client = triton
    wanted = [module.InferRequestedOutput(name) for name in outputs]
    return client.infer(model, list(inputs), outputs=wanted, **options)


def native(server: Server, model: str, **fields: Any) -> Any:
    answer = httpx.post(f"{server.address}/models/{model}/embed", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


PARTS = [[{"input_ids": [1, 2]}, {"vectors": encode(GIVEN[:2])}], [{"vectors": encode(GIVEN[2:])}, {"input_ids": [3]}]]


def test_parts_equal_the_native_api(catalogue_server: Server, triton: tuple[Any, Any]) -> None:
    given = text_input(triton[0], "parts", *map(json.dumps, PARTS))
    result = infer(triton, "gpt", given, array_input(triton[0], "offset", np.array([1, 0])))
    expected = native(catalogue_server, "gpt", parts=PARTS, offset=[1, 0])
    assert result.as_numpy("embeddings").tobytes() == base64.b64decode(expected["embeddings"])
    assert result.as_numpy("lengths").tolist() == expected["lengths"] == [4, 2]
    assert result.as_numpy("next_offset").tolist() == expected["next_offset"] == [5, 2]


@pytest.mark.parametrize("in_parts", [False, True])
def test_placeholders_take_rows_of_a_tensor(catalogue_server: Server, triton: tuple[Any, Any], in_parts: bool) -> None:
    ids = np.array([[1, 99, 99], [99, 2, 3]])
    given = array_input(triton[0], "input_ids", ids)
    if in_parts:
        given = text_input(triton[0], "parts", *(json.dumps([{"input_ids": row}]) for row in ids.tolist()))
    vectors = array_input(triton[0], "vectors", GIVEN)
    result = infer(triton, "llama", given, vectors, parameters={"placeholder_id": 99})
    alone = native(catalogue_server, "llama", input_ids=[1, 2, 3])
    tokens = np.frombuffer(base64.b64decode(alone["embeddings"]), np.float32).reshape(3, 4)
    expected = np.concatenate([tokens[:1], GIVEN, tokens[1:]]).reshape(2, 3, 4)
    assert np.array_equal(result.as_numpy("embeddings"), expected)


def test_vectors_lie_in_shared_memory(catalogue_server: Server, triton: tuple[Any, Any]) -> None:
    module, client = triton
    region = shared_memory.create_shared_memory_region("given", f"preblock-parts-{catalogue_server.pid}", GIVEN.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [GIVEN])
        client.register_system_shared_memory("given", f"preblock-parts-{catalogue_server.pid}", GIVEN.nbytes)
        vectors = module.InferInput("vectors", GIVEN.shape, "FP32")
        vectors.set_shared_memory("given", GIVEN.nbytes)
        ids = array_input(module, "input_ids", np.array([[9, 9, 9]]))
        result = infer(triton, "llama", ids, vectors, parameters={"placeholder_id": 9})
        assert np.array_equal(result.as_numpy("embeddings")[0], GIVEN)
    finally:
        client.unregister_system_shared_memory("given")
        shared_memory.destroy_shared_memory_region(region)


def test_text_in_parts_has_no_special_tokens(catalogue_server: Server, triton: tuple[Any, Any]) -> None:
    row = [{"input_ids": [1]}, {"text": "hello world"}]
    result = infer(triton, "bert", text_input(triton[0], "parts", json.dumps(row)))
    expected = native(catalogue_server, "bert", parts=row)
    assert result.as_numpy("embeddings").tobytes() == base64.b64decode(expected["embeddings"])


def test_request_without_parts_follows_one_with_parts(catalogue_server: Server, triton: tuple[Any, Any]) -> None:
    ids = np.array([[1, 2, 3]])
    expected = base64.b64decode(native(catalogue_server, "llama", input_ids=ids.tolist())["embeddings"])
    for _ in range(2):
        plain = infer(triton, "llama", array_input(triton[0], "input_ids", ids), outputs=("embeddings",))
        assert plain.as_numpy("embeddings").tobytes() == expected
        vectors = array_input(triton[0], "vectors", GIVEN[:1])
        given = infer(
            triton, "llama", array_input(triton[0], "input_ids", ids), vectors, parameters={"placeholder_id": 2}
        )
        assert np.array_equal(given.as_numpy("embeddings")[0, 1], GIVEN[0])


@pytest.mark.parametrize("context", [False, True])
def test_sequence_continues_after_parts(catalogue_server: Server, triton: tuple[Any, Any], context: bool) -> None:
    model, outputs = ("ngrams", ("ngram_embeddings",)) if context else ("gpt", ("embeddings",))
    rows = [{"input_ids": [1, 2]}] if context else PARTS[0]
    given = text_input(triton[0], "parts", json.dumps(rows))
    infer(triton, model, given, outputs=outputs, sequence_id=7, sequence_start=True)
    ids = array_input(triton[0], "input_ids", np.array([[4]]))
    last = infer(triton, model, ids, outputs=outputs, sequence_id=7, sequence_end=True)
    whole = native(catalogue_server, model, parts=[*rows, {"input_ids": [4]}], output=outputs[0])
    found = last.as_numpy(outputs[0]).tobytes()
    assert base64.b64decode(whole[outputs[0]]).endswith(found)
    assert found


def test_vector_in_a_sequence_with_history_is_rejected(triton: tuple[Any, Any]) -> None:
    ids = array_input(triton[0], "input_ids", np.array([[5, 6]]))
    infer(triton, "ngrams", ids, outputs=("ngram_row_ids",), sequence_id=8, sequence_start=True)
    given = text_input(triton[0], "parts", json.dumps([{"vectors": base64.b64encode(bytes(4 * 32)).decode()}]))
    with pytest.raises(InferenceServerException, match="vectors: got a value, expected token ids, since the sequence"):
        infer(triton, "ngrams", given, outputs=("token_embeddings",), sequence_id=8)
    infer(triton, "ngrams", ids, outputs=("ngram_row_ids",), sequence_id=8, sequence_end=True)


def test_grpc_stream_carries_parts(catalogue_server: Server) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(catalogue_server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        given = text_input(tritonclient.grpc, "parts", json.dumps(PARTS[0]))
        outputs = [tritonclient.grpc.InferRequestedOutput("embeddings")]
        client.async_stream_infer("gpt", [given], outputs=outputs)
        result, error = answers.get(timeout=30)
    assert error is None
    expected = native(catalogue_server, "gpt", parts=PARTS[0])
    assert result.as_numpy("embeddings").tobytes() == base64.b64decode(expected["embeddings"])


def test_metadata_does_not_list_parts(catalogue_server: Server) -> None:
    """perf_analyzer fills every input of the metadata."""
    inputs = {item["name"] for item in httpx.get(f"{catalogue_server.address}/v2/models/gpt").json()["inputs"]}
    assert inputs.isdisjoint(("parts", "vectors"))


GOOD = json.dumps([{"input_ids": [1]}])
NAN = np.full((1, 4), np.nan, np.float32)
IDS = np.array([[1, 9]])
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(({"parts": [row]}, {}, "parts[0]: ") for row in ("[{", "{}", '[],"x":[]', '[{"text":"a","text":"b"}]', "")),
    ({"parts": [GOOD, "5"]}, {}, "parts[1]: "),
    ({"parts": [GOOD, "[]"]}, {}, "parts[1]: "),
    ({"parts": ['[{"ids":[1]}]']}, {}, "parts[0][0]: "),
    ({"parts": ['[{"input_ids":[99]}]']}, {}, "input_ids[0][0]: "),
    ({"parts": ['[{"vectors":"AAAA"}]']}, {}, "parts[0][0].vectors: "),
    ({"parts": [GOOD], "input_ids": IDS}, {}, "input_ids cannot be used with parts"),
    ({"parts": [GOOD], "attention_mask": np.array([[1]])}, {}, "attention_mask cannot be used with parts"),
    ({"parts": [GOOD]}, {"pooling": "mean"}, "pooling cannot be used with parts"),
    ({"parts": [GOOD]}, {"truncate": "left"}, "truncate cannot be used with parts"),
    ({"input_ids": IDS, "vectors": GIVEN[:1]}, {}, "the input vectors and the parameter placeholder_id"),
    ({"input_ids": IDS}, {"placeholder_id": 9}, "the input vectors and the parameter placeholder_id"),
    ({"vectors": GIVEN}, {"placeholder_id": 9}, "inputs: got no input_ids"),
    ({"input_ids": IDS, "vectors": GIVEN}, {"placeholder_id": 9}, "vectors: got 3 vectors"),
    ({"input_ids": IDS, "vectors": NAN}, {"placeholder_id": 9}, "vectors: got nan"),
    ({"input_ids": IDS, "vectors": GIVEN[:, :3]}, {"placeholder_id": 9}, "vectors.shape: got [3, 3]"),
    ({"input_ids": IDS, "vectors": GIVEN[:1]}, {"placeholder_id": "9"}, "parameters.placeholder_id: got '9'"),
    ({"input_ids": IDS, "vectors": GIVEN[:1], "attention_mask": IDS}, {"placeholder_id": 9}, "attention_mask cannot"),
]


def test_bad_parts_are_rejected(triton: tuple[Any, Any]) -> None:
    for inputs, parameters, message in BAD:
        tensors = [
            text_input(triton[0], name, *value) if isinstance(value, list) else array_input(triton[0], name, value)
            for name, value in inputs.items()
        ]
        with pytest.raises(InferenceServerException) as raised:
            infer(triton, "llama", *tensors, parameters=parameters)
        assert message in str(raised.value), inputs


def test_text_excludes_parts(triton: tuple[Any, Any]) -> None:
    text, parts = text_input(triton[0], "text", "hello"), text_input(triton[0], "parts", GOOD)
    with pytest.raises(InferenceServerException, match="parts cannot be used with text"):
        infer(triton, "bert", text, parts)
    with pytest.raises(InferenceServerException, match=r"parameters\.placeholder_id: got 3, expected none beside text"):
        infer(triton, "bert", text, parameters={"placeholder_id": 3})
    with pytest.raises(InferenceServerException, match="spans needs the input text"):
        infer(triton, "bert", parts, outputs=("embeddings", "spans"))


def test_output_that_needs_ids_is_rejected(triton: tuple[Any, Any]) -> None:
    given = text_input(triton[0], "parts", json.dumps(PARTS[0]))
    with pytest.raises(InferenceServerException, match="output embeddings of this model cannot be computed from given"):
        infer(triton, "bert", given)


def test_many_values_in_parts_are_rejected(catalogue_server: Server) -> None:
    row = json.dumps([{"input_ids": [1] * 2_000_000}])
    document = {"inputs": [{"name": "parts", "datatype": "BYTES", "shape": [1], "data": [row]}]}
    answer = httpx.post(f"{catalogue_server.address}/v2/models/gpt/infer", json=document, timeout=60)
    assert (answer.status_code, answer.json()["error"][:21]) == (413, "parts: got more than "), answer.text
