"""Open Inference messages, where no server is needed. The door itself is tested in `api/test_open_inference.py`."""

import json

import numpy as np
import orjson
import pytest

from incipit.service.errors import Invalid
from incipit.service.messages import Request, TokenAnswer
from incipit.service.wire.open_inference import Infer, read_infer, write_infer
from tests.service.manifests import tiny_manifest


def body(padding: int = 0) -> tuple[bytes, str]:
    """Return a request of six ids, whose bytes follow `padding` spaces, and the length of its JSON."""
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [2, 3], "parameters": {"binary_data_size": 48}}
    header = json.dumps({"inputs": [tensor]}).encode() + b" " * padding
    return header + np.arange(6, dtype="<i8").tobytes(), str(len(header))


def answer(value: float = 0.5) -> TokenAnswer:
    return TokenAnswer(
        model="m",
        version=2,
        dtype="float32",
        tensors={"embeddings": np.array([[[value, 1]]], np.float32)},
        lengths=np.array([1]),
        next_offset=np.array([1]),
    )


def infer(binary: bool) -> Infer:
    return Infer(read_infer(*body(), tiny_manifest()).request, None, {"embeddings": binary})


@pytest.mark.parametrize("padding", range(16))
def test_ids_are_aligned_wherever_their_bytes_begin(padding: int) -> None:
    request = read_infer(*body(padding), tiny_manifest()).request
    assert isinstance(request, Request)
    ids = request.input_ids
    assert ids.values.tolist() == [0, 1, 2, 3, 4, 5]
    assert ids.lengths.tolist() == [3, 3]
    assert ids.values.flags.aligned


def test_a_binary_answer_is_the_array_itself() -> None:
    written = answer()
    (header, data), length = write_infer(written, infer(binary=True))
    assert length == len(header)
    assert json.loads(bytes(header)) == {
        "model_name": "m",
        "model_version": "2",
        "outputs": [
            {"name": "embeddings", "datatype": "FP32", "shape": [1, 1, 2], "parameters": {"binary_data_size": 8}}
        ],
    }
    assert np.shares_memory(np.frombuffer(data, np.uint8), written.tensors["embeddings"])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_json_refuses_what_it_cannot_hold_and_bytes_do_not(value: float) -> None:
    with pytest.raises(Invalid, match="outputs embeddings: got JSON, allowed binary_data"):
        write_infer(answer(value), infer(binary=False))
    (_, data), _ = write_infer(answer(value), infer(binary=True))
    assert bytes(data) == np.array([value, 1], np.float32).tobytes()


@pytest.mark.parametrize("name", ["sequence_id", "sequence_start", "sequence_end"])
def test_parameters_of_a_sequence_are_refused_since_the_offset_would_be_wrong(name: str) -> None:
    body = {"inputs": [], "parameters": {name: 1}}
    with pytest.raises(Invalid, match=f"parameters: got {name}, allowed the input offset"):
        read_infer(orjson.dumps(body), None, tiny_manifest())
