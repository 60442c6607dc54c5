"""Open Inference messages, where no server is needed. Servers are asked in `api/http/routes/test_v2.py`."""

import json
from typing import Any

import numpy as np
import orjson
import pytest

from preblock.service.codecs.chunks import body_size, join
from preblock.service.codecs.v2.parameters import read_options
from preblock.service.codecs.v2.requests import InferMessage, find_tensor_offsets, read_infer
from preblock.service.codecs.v2.responses import write_infer
from preblock.service.core.errors import Invalid
from preblock.service.core.types import EmbedResult, SequenceRef, TokenRequest
from tests.support.manifests import tiny_manifest


def body(padding: int = 0) -> tuple[bytes, str]:
    """Return a request of six ids, with the bytes behind `padding` spaces, and the length of its JSON."""
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [2, 3], "parameters": {"binary_data_size": 48}}
    header = json.dumps({"inputs": [tensor]}).encode() + b" " * padding
    return header + np.arange(6, dtype="<i8").tobytes(), str(len(header))


def answer(value: float = 0.5) -> EmbedResult:
    tensors, one = {"embeddings": np.array([[[value, 1]]], np.float32)}, np.array([1])
    return EmbedResult(model="m", version=2, dtype="float32", tensors=tensors, lengths=one, next_offset=one)


def infer(binary: bool) -> InferMessage:
    manifest = tiny_manifest()
    options = read_options({"binary_data_output": binary}, [("embeddings", {})], manifest)
    return InferMessage(read_infer(*body(), manifest).request, None, options)


def test_ids_are_aligned_for_any_header_length() -> None:
    for padding in range(16):
        request = read_infer(*body(padding), tiny_manifest()).request
        assert isinstance(request, TokenRequest)
        ids = request.input_ids
        assert (ids.values.tolist(), ids.lengths.tolist()) == ([0, 1, 2, 3, 4, 5], [3, 3])
        assert ids.values.flags.aligned


def test_long_header_is_not_cached() -> None:
    for padding, names in ((0, ["input_ids"]), (3000, None)):
        found = find_tensor_offsets(*body(padding), tiny_manifest())
        assert (None if found is None else [*found]) == names


def test_binary_response_shares_memory_with_array() -> None:
    written = answer()
    (header, data), length = write_infer(written, infer(binary=True))
    assert length == body_size([header])
    output = {"name": "embeddings", "datatype": "FP32", "shape": [1, 1, 2], "parameters": {"binary_data_size": 8}}
    assert json.loads(join([header])) == {"model_name": "m", "model_version": "2", "outputs": [output]}
    assert isinstance(data, memoryview)
    assert np.shares_memory(np.frombuffer(data, np.uint8), written.arrays["embeddings"])


def test_nonfinite_values_are_rejected_only_in_json() -> None:
    for value in (np.inf, -np.inf, np.nan):
        with pytest.raises(Invalid, match="JSON cannot hold its infinite values or NaN; request binary_data"):
            write_infer(answer(value), infer(binary=False))
        (_, data), _ = write_infer(answer(value), infer(binary=True))
        assert join([data]) == np.array([value, 1], np.float32).tobytes()


def sequence_of(**parameters: Any) -> SequenceRef | None:
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}
    request = read_infer(orjson.dumps({"inputs": [ids], "parameters": parameters}), None, tiny_manifest()).request
    assert isinstance(request, TokenRequest)
    return request.sequence


def test_sequence_id_may_be_integer_or_string() -> None:
    ids = ((5, 5), ("5", "5"), ("é" * 64, "é" * 64), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63))
    for given, read in ids:
        assert sequence_of(sequence_id=given) == SequenceRef(read)
        assert sequence_of(sequence_id=given, sequence_start=True, sequence_end=False) == SequenceRef(read, start=True)
        assert sequence_of(sequence_id=given, sequence_end=True) == SequenceRef(read, end=True)
    none: list[dict[str, Any]] = [{}, {"sequence_id": 0}, {"sequence_id": None}]
    for parameters in (*none, {"sequence_id": "", "sequence_start": False}):
        assert sequence_of(**parameters) is None


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"sequence_id": "é" * 65}, "sequence_id", "130 bytes"),
    ({"sequence_id": 5.0}, "sequence_id", "5.0"),
    ({"sequence_id": [5]}, "sequence_id", "[5]"),
    ({"sequence_start": True}, "sequence_id", "0"),
    ({"sequence_id": "", "sequence_end": True}, "sequence_id", "''"),
    ({"sequence_id": 5, "sequence_start": 1}, "sequence_start", "1"),
    ({"sequence_id": 5, "sequence_end": "true"}, "sequence_end", "true"),
]


def test_invalid_sequence_parameters_are_rejected() -> None:
    for parameters, field, got in BAD:
        with pytest.raises(Invalid) as refused:
            sequence_of(**parameters)
        assert (refused.value.field, refused.value.got) == (f"parameters.{field}", got)
