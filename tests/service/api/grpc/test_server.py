"""The Open Inference Protocol over gRPC. Oracles: tritonclient, and the native API.

Both our generated messages and tritonclient's register the same names, and one process can hold only one of them: tests
hold tritonclient's, and tests of ours run in a process of their own.
"""

from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2

from tests.support.protocols import Clients, RequestRefused, call_grpc
from tests.support.scrapes import read_metrics
from tests.support.servers import Server

SERVICE = "inference.GRPCInferenceService"
IDS = np.array([[1, 2]])
BAD_OFFSET = {"offset": service_pb2.InferParameter(int64_param=5)}


def request(**more: Any) -> Any:
    """Return a good request for `gpt`, with typed contents, changed by `more`."""
    fields = {"outputs": [{"name": "embeddings"}]} | more
    message = service_pb2.ModelInferRequest(model_name="gpt")
    tensor = message.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])
    tensor.contents.int64_contents.extend([1, 2])
    message.MergeFrom(service_pb2.ModelInferRequest(**fields))
    return message


def raw_request(array: Any, *data: bytes, **more: Any) -> Any:
    """Return a request for `gpt` with raw contents."""
    outputs = [{"name": "embeddings"}]
    message = service_pb2.ModelInferRequest(model_name="gpt", raw_input_contents=data, outputs=outputs)
    message.inputs.add(**({"name": "input_ids", "datatype": "INT64", "shape": np.shape(array)} | more))
    return message


def refusal(clients: Clients, message: Any, method: str = "ModelInfer") -> tuple[str, str]:
    with pytest.raises(RequestRefused) as refused:
        call_grpc(clients, method, message)
    return str(refused.value.status), refused.value.message


def test_empty_contents_beside_raw_bytes_are_accepted(tiny_clients: Clients) -> None:
    message = raw_request([[1, 2]], np.array([1, 2]).tobytes())
    message.inputs[0].contents.SetInParent()
    assert message.inputs[0].HasField("contents")
    assert call_grpc(tiny_clients, "ModelInfer", message) == call_grpc(tiny_clients, "ModelInfer", request())


BAD = [
    (request(raw_input_contents=[bytes(16)]), "inputs[0]: got contents and raw_input_contents"),
    (request(raw_input_contents=[bytes(16)] * 2), "raw_input_contents: got 2 entries"),
    (raw_request(IDS, b""), "input_ids: got 0 bytes"),
    (raw_request(IDS), "input_ids.data: got 0 values"),
    (raw_request(IDS, bytes(16), shape=[-1, -2]), "inputs[0].shape: got [-1, -2]"),
    (raw_request(IDS, bytes(16), shape=[2**32, 2**32]), "input_ids: got 16 bytes"),
    (raw_request(IDS, bytes(16), datatype="INT32"), "input_ids: got 16 bytes"),
    (service_pb2.ModelInferRequest(model_name="gpt"), "inputs: got no input_ids"),
    (request(outputs=[{"name": "x"}]), "outputs[0].name: got x"),
]


def test_bad_grpc_message_is_rejected(tiny_clients: Clients) -> None:
    bad = [*BAD]
    for kind in ("int_contents", "uint_contents", "uint64_contents", "bool_contents", "fp32_contents"):
        message = raw_request(IDS)
        getattr(message.inputs[0].contents, kind).extend([1, 2])
        bad.append((message, f"inputs[0].contents: got {kind}"))
    for message, error in bad:
        status, text = refusal(tiny_clients, message)
        assert (status, text[: len(error)]) == ("StatusCode.INVALID_ARGUMENT", error)
    for name in ("\0é", "../gpt", "gpt/1", "a" * 10000):
        status, text = refusal(tiny_clients, request(model_name=name))
        assert (status, text.startswith(f"model: got {name[:80]}")) == ("StatusCode.NOT_FOUND", True)
        assert len(text) < 200
    assert call_grpc(tiny_clients, "ModelInfer", request()).outputs[0].shape == [1, 2, 4]


def test_unsupported_method_is_unimplemented(tiny_clients: Clients) -> None:
    message = service_pb2.TraceSettingRequest()
    assert refusal(tiny_clients, message, "TraceSetting")[0] == "StatusCode.UNIMPLEMENTED"


def test_reflection_of_both_versions_describes_methods(tiny_server: Server) -> None:
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.reflection.v1.ServerReflection"),
    ]
    with grpc.insecure_channel(tiny_server.grpc) as channel:
        service = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName(SERVICE)
        ask = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        services, file = ask(iter(asked))
    assert service.methods_by_name["ModelStreamInfer"].output_type.name == "ModelStreamInferResponse"
    assert len(service.methods) == 18
    reflections = {f"grpc.reflection.{version}.ServerReflection" for version in ("v1alpha", "v1")}
    found = {found.name for found in services.list_services_response.service}
    assert found == {SERVICE, "grpc.health.v1.Health"} | reflections
    assert file.WhichOneof("message_response") == "file_descriptor_response"


def test_compressed_message_is_limited_by_expanded_size(tiny_clients: Clients) -> None:
    expected = call_grpc(tiny_clients, "ModelInfer", request()).raw_output_contents
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert tiny_clients.stub.ModelInfer(request(), compression=compression).raw_output_contents == expected
        with pytest.raises(grpc.RpcError) as raised:
            tiny_clients.stub.ModelInfer(raw_request(IDS, bytes(2**26)), compression=compression)
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_malformed_message_is_counted_and_ends_no_stream(counted_server: Server) -> None:
    def malformed() -> list[float]:
        found = read_metrics(counted_server.address)
        counters = (("preblock_requests_total", "", "Malformed", protocol) for protocol in ("grpc", "grpc-stream"))
        return [found.get(counter, 0) for counter in counters]

    requests = request(id="1", parameters=BAD_OFFSET), request(id="2")
    messages = [b"\xff\xff\xff", *(message.SerializeToString() for message in requests)]
    before, service = malformed(), f"/{SERVICE}"
    with grpc.insecure_channel(counted_server.grpc) as channel:
        for method in ("ModelInfer", "ModelMetadata", "ModelReady"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(f"{service}/{method}")(messages[0])
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert raised.value.details() == f"message: got 3 bytes, expected a message inference.{method}Request"
        with pytest.raises(grpc.RpcError) as raised:
            channel.stream_unary(f"{service}/ModelInfer")(iter([]))
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert raised.value.details() == "message: got no message, expected one message"
        read = service_pb2.ModelStreamInferResponse.FromString
        stream = channel.stream_stream(f"{service}/ModelStreamInfer", response_deserializer=read)
        bad, refused, right = stream(iter(messages))
    assert bad.error_message == "message: got 3 bytes, expected a message inference.ModelInferRequest"
    assert refused.error_message.startswith("offset[0] + tokens: got 5 + 2 = 7")
    assert (refused.infer_response.id, right.infer_response.id, right.error_message) == ("1", "2", "")
    assert right.infer_response.outputs[0].shape == [1, 2, 4]
    assert malformed() == [before[0] + 1, before[1] + 1]
