"""Requests with the ids before each row. Oracle: one run of onnxruntime."""

from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from preblock.client.sync_client import Client
from preblock.service.runtime.session import Session
from tests.client.history.rows import END, IDS, OUTPUT, VALUES, whole
from tests.support.servers import Server


def test_answers_continue_with_the_context_of_the_last(ngram_client: Client, ngram_session: Session) -> None:
    assert ngram_client.model("ngrams").history == 2
    assert ngram_client.model("gpt").history == 0
    expected, offset, context = whole(ngram_session, IDS), None, None
    for begin, end in ((0, 1), (1, 5), (5, 12)):
        ids: Any = np.array([IDS[begin:end]]) if begin else [IDS[begin:end]]  # safetensors and JSON
        answer = ngram_client.embed(ids, model="ngrams", output=OUTPUT, offset=offset, context=context)
        assert answer.vectors.reshape(-1, VALUES).tobytes() == expected[begin:end].tobytes()
        assert answer.use_as == "n-gram embeddings of some layers"
        offset, context = answer.next_offset, answer.next_context
    assert context is not None
    assert context.tolist() == [IDS[-2:]]
    assert ngram_client.embed([IDS], model="ngrams").next_context is None


def test_headers_and_query_carry_contexts(ngram_server: Server, ngram_session: Session) -> None:
    url = f"{ngram_server.address}/models/ngrams/embed?output={OUTPUT}&offset=[4,7]&context=[[1,2],[3,4]]&shape=2,2"
    headers = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
    for _ in range(2):  # the second would come from a template, if there were one
        response = httpx.post(url, content=np.array([[5, 6], [7, 8]], "<i8").tobytes(), headers=headers)
        expected = np.concatenate((whole(ngram_session, [5, 6], (1, 2)), whole(ngram_session, [7, 8], (3, 4))))
        assert response.content == expected.tobytes()
        assert response.headers["Preblock-Next-Context"] == "5,6,7,8"
        assert response.headers["Preblock-Next-Offset"] == "6,9"


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"offset": 3}, "context: got nothing, expected the last 2 ids before each row, since row 0 begins at 3"),
        ({"context": [[1]]}, "context[0]: got 1 ids, expected 2 ids, the last ones before the row"),
        ({"context": [1, 2, 3]}, "context: got 3 ids, expected 2 ids"),
        ({"context": [[1, 2], [3, 4]]}, "context: got 2 rows, expected 1 rows"),
        ({"context": [[1, 99]]}, "context[0][1]: got 99, expected 0 to 98"),
        ({"context": [[1, "a"]]}, "context[0][1]: got 'a', expected a 64-bit integer"),
        ({"context": 5}, "context: got 5, expected a list of integers"),
    ],
)
def test_bad_contexts_are_refused(ngram_server: Server, fields: dict[str, Any], detail: str) -> None:
    body = {"input_ids": [5], "output": OUTPUT} | fields
    response = httpx.post(f"{ngram_server.address}/models/ngrams/embed", json=body)
    assert response.status_code == 422
    assert response.json()["detail"].startswith(detail)


def test_other_models_take_no_context(ngram_server: Server) -> None:
    response = httpx.post(f"{ngram_server.address}/models/gpt/embed", json={"input_ids": [5], "context": [1, 2]})
    assert response.status_code == 422
    assert response.json()["detail"].startswith("context is not an input")


def test_open_inference_protocol_over_http(ngram_server: Server, ngram_session: Session) -> None:
    triton = triton_http.InferenceServerClient(ngram_server.address.removeprefix("http://"))
    inputs = [triton_http.InferInput(name, shape, "INT64") for name, shape in INPUTS]
    for tensor, values in zip(inputs, TENSORS, strict=True):
        tensor.set_data_from_numpy(values)
    outputs = [triton_http.InferRequestedOutput(name) for name in (OUTPUT, "next_context")]
    check_infer(triton.infer("ngrams", inputs, outputs=outputs), ngram_session)
    assert {"name": "context", "datatype": "INT64", "shape": [-1, 2]} in triton.get_model_metadata("ngrams")["inputs"]
    with pytest.raises(Exception, match="next_context needs an n-gram output"):
        triton.infer(
            "ngrams", inputs, outputs=[triton_http.InferRequestedOutput(n) for n in ("embeddings", "next_context")]
        )
    with pytest.raises(Exception, match="context: got nothing"):
        triton.infer("ngrams", inputs[:2], outputs=outputs)


def test_open_inference_protocol_over_grpc(ngram_server: Server, ngram_session: Session) -> None:
    triton = triton_grpc.InferenceServerClient(ngram_server.grpc)
    inputs = [triton_grpc.InferInput(name, shape, "INT64") for name, shape in INPUTS]
    for tensor, values in zip(inputs, TENSORS, strict=True):
        tensor.set_data_from_numpy(values)
    outputs = [triton_grpc.InferRequestedOutput(name) for name in (OUTPUT, "next_context")]
    check_infer(triton.infer("ngrams", inputs, outputs=outputs), ngram_session)


INPUTS = (("input_ids", [2, 3]), ("offset", [1]), ("context", [2, 2]))
TENSORS = (np.array([[5, 6, 7], [8, END, 9]]), np.array([4]), np.array([[1, 2], [3, 4]]))


def check_infer(result: Any, session: Session) -> None:
    ids, _, context = (values.tolist() for values in TENSORS)
    expected = [whole(session, row, before) for row, before in zip(ids, context, strict=True)]
    assert result.as_numpy(OUTPUT).tobytes() == np.concatenate(expected).tobytes()
    assert result.as_numpy("next_context").tolist() == [[6, 7], [END, 9]]


def test_sequences_keep_the_context(ngram_server: Server, ngram_session: Session) -> None:
    triton = triton_http.InferenceServerClient(ngram_server.address.removeprefix("http://"))
    outputs, found = [triton_http.InferRequestedOutput(OUTPUT)], []
    for begin, end in ((0, 1), (1, 5), (5, 12)):
        tensor = triton_http.InferInput("input_ids", [1, end - begin], "INT64")
        tensor.set_data_from_numpy(np.array([IDS[begin:end]]))
        options: dict[str, Any] = {"sequence_id": 7, "sequence_start": begin == 0, "sequence_end": end == 12}
        found.append(triton.infer("ngrams", [tensor], outputs=outputs, **options).as_numpy(OUTPUT).reshape(-1, VALUES))
    assert np.concatenate(found).tobytes() == whole(ngram_session, IDS).tobytes()
    tensors = [triton_http.InferInput(name, shape, "INT64") for name, shape in INPUTS]
    for tensor, values in zip(tensors, TENSORS, strict=True):
        tensor.set_data_from_numpy(values)
    check_begin = triton.infer("ngrams", tensors, outputs=outputs, sequence_id=8, sequence_start=True)
    assert check_begin.as_numpy(OUTPUT).shape == (2, 3, 2, VALUES // 2)
    with pytest.raises(Exception, match="context: got a value, expected nothing, since the sequence keeps it"):
        triton.infer("ngrams", [tensors[0], tensors[2]], outputs=outputs, sequence_id=8)
