"""Calls that are alike, of which all but the first are answered the short way. Oracle: the bytes of HTTP."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from preblock.service.core.auth import new_key
from tests.support.servers import Server, serve

SHAPES = [(1, 3), (3, 1), (2, 2)]
"""The first two make messages of one length."""


def request(model: str, ids: list[list[int]], version: str = "") -> service_pb2.ModelInferRequest:
    rows = np.array(ids, np.int64)
    message = service_pb2.ModelInferRequest(
        model_name=model, model_version=version, raw_input_contents=[rows.tobytes()]
    )
    message.inputs.add(name="input_ids", datatype="INT64", shape=rows.shape)
    return message


def over_http(server: Server, model: str, ids: list[list[int]]) -> bytes:
    headers = {"Accept": "application/octet-stream"}
    answer = httpx.post(f"{server.address}/models/{model}/embed", json={"input_ids": ids}, headers=headers, timeout=60)
    return answer.raise_for_status().content


def refusal(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, message: service_pb2.ModelInferRequest, *metadata: tuple[str, str]
) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(message, timeout=60, metadata=metadata)
    return str(refused.value.code().name)


@pytest.fixture
def stub(tiny_server: Server) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(tiny_server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_each_is_answered_by_its_own_ids(
    tiny_server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str
) -> None:
    random = np.random.default_rng(3)
    for number in range(30):
        ids = random.integers(0, 5, SHAPES[number % 3]).tolist()
        expected = over_http(tiny_server, model, ids)
        answer = stub.ModelInfer(request(model, ids), timeout=60)
        (streamed,) = stub.ModelStreamInfer(iter([request(model, ids)]), timeout=60)
        for found in (answer, streamed.infer_response):
            assert (found.model_name, list(found.outputs[0].shape[:2])) == (model, list(np.shape(ids)))
            assert list(found.raw_output_contents) == [expected]


def test_several_at_once_are_too(tiny_server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    asked = [[[number % 5, number % 3, number % 4]] for number in range(60)]
    calls = [stub.ModelInfer.future(request("gpt", ids), timeout=60) for ids in asked]
    for ids, call in zip(asked, calls, strict=True):
        assert list(call.result().raw_output_contents) == [over_http(tiny_server, "gpt", ids)]


def test_ids_that_are_not_allowed_are_refused_by_name(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    for wrong in (-1, 10**6, -(2**63)):
        assert stub.ModelInfer(request("gpt", [[1, 2, 3]]), timeout=60)
        with pytest.raises(grpc.RpcError, match=rf"input_ids\[0\]\[1\]: got {wrong}"):
            stub.ModelInfer(request("gpt", [[1, wrong, 3]]), timeout=60)


def test_bytes_that_only_look_like_ids_are_not_taken_for_them(tiny_server: Server) -> None:
    """A field that nobody knows follows the ids, and holds the same bytes, then others."""
    ids, others = np.array([[1, 2, 3]]), np.array([[4, 4, 4]])
    expected = over_http(tiny_server, "gpt", ids.tolist())
    known = request("gpt", ids.tolist()).SerializeToString()
    unknown = b"\xc2\x3e" + bytes([ids.nbytes])  # field 1000, of bytes
    with grpc.insecure_channel(tiny_server.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for content in (ids, ids, others, ids):
            answer = service_pb2.ModelInferResponse.FromString(call(known + unknown + content.tobytes(), timeout=60))
            assert list(answer.raw_output_contents) == [expected]
        inputs = known[: -ids.nbytes - 2]
        for message in (
            known + b"\xa2\x06\x03abc",  # a field that nobody knows, shorter than the ids
            known[-ids.nbytes - 2 :] + inputs,  # the ids first
            known + b"\xc2\x3e" + b"\xa0\x9c\x01" + bytes(20000),  # a long one
        ):
            for _ in range(2):
                answer = service_pb2.ModelInferResponse.FromString(call(message, timeout=60))
                assert list(answer.raw_output_contents) == [expected]


def test_they_count_as_any_other(tiny_repository: Path) -> None:
    with serve(tiny_repository) as server, grpc.insecure_channel(server.grpc) as channel:
        message = request("gpt", [[1, 2, 3]])
        answers = [service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=60) for _ in range(7)]
        text = httpx.get(f"{server.address}/metrics", timeout=60).text
        found = dict(re.findall(r"^(preblock_\w+\{.*\}) (\S+)$", text, re.MULTILINE))
        assert float(found['preblock_requests_total{model="gpt",outcome="ok",protocol="grpc"}']) == 7
        assert float(found['preblock_request_bytes_total{protocol="grpc"}']) == 7 * message.ByteSize()
        assert float(found['preblock_response_bytes_total{protocol="grpc"}']) == sum(
            answer.ByteSize() for answer in answers
        )
        assert float(found['preblock_tokens_total{model="gpt"}']) == 21


def test_keys_rates_and_unloaded_models_hold(tiny_repository: Path, tmp_path: Path) -> None:
    keys = {
        name: new_key(name, models, admin) for name, models, admin in (("all", (), True), ("other", ("bert",), False))
    }
    file = tmp_path / "keys.toml"
    file.write_text("".join(entry for _, entry in keys.values()))
    everyone, other = ((("authorization", f"Bearer {key}"),) for key, _ in keys.values())
    options = "--api-keys-file", str(file), "--model-control", "explicit", "--rate-limit-per-second", "5"
    with serve(tiny_repository, *options) as server, grpc.insecure_channel(server.grpc) as channel:
        stub, message = service_pb2_grpc.GRPCInferenceServiceStub(channel), request("gpt", [[1, 2, 3]])
        for _ in range(3):
            assert stub.ModelInfer(message, timeout=60, metadata=everyone)
        assert refusal(stub, message) == "UNAUTHENTICATED"
        assert refusal(stub, message, *other) == "PERMISSION_DENIED"
        codes = []
        for _ in range(20):
            call = stub.ModelInfer.future(message, timeout=60, metadata=everyone)
            codes.append(call.code().name)
        assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
        stub.RepositoryModelUnload(
            service_pb2.RepositoryModelUnloadRequest(model_name="gpt"), timeout=60, metadata=everyone
        )
        time.sleep(0.5)  # in which two more are allowed
        assert refusal(stub, message, *everyone) == "NOT_FOUND"


def test_messages_of_many_lengths_are_answered(
    tiny_server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    """More than are remembered: each once more, in the other order."""
    lengths = [*range(1, 400), *range(399, 0, -1)]
    vectors = over_http(tiny_server, "gpt", [[1]])
    for rows in lengths:
        answer = stub.ModelInfer(request("gpt", [[1]] * rows), timeout=60)
        assert list(answer.raw_output_contents) == [vectors * rows]
