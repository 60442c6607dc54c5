"""Answers over gRPC: large, prepared and compressed ones. Oracles: HTTP, and the bytes on the socket."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
from numpy.typing import ArrayLike
from tritonclient.grpc import service_pb2

from tests.service.api.http.native_requests import BYTES, ask
from tests.support.connections import dial
from tests.support.open_inference import NO_LIMIT, infer_message, open_stub
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server


@pytest.fixture(scope="module")
def stub(catalogue_server: Server) -> Iterator[Any]:
    with open_stub(catalogue_server.grpc, NO_LIMIT) as stub:
        yield stub


def over_http(http: httpx.Client, model: str, ids: ArrayLike, **fields: str) -> bytes:
    return ask(http, model, BYTES, input_ids=np.array(ids).tolist(), **fields).content


def test_large_grpc_message_equals_http_bytes(catalogue_http: httpx.Client, stub: Any) -> None:
    """Most shapes have more values than are computed at once; (3, 2731) is one more than fits, to the token."""
    random = np.random.default_rng(7)
    for model in ("long", "long-bert"):
        for shape in ((4, 5000), (20000, 1), (1, 4999), (3, 2731), (1, 1)):
            ids = random.integers(0, 300, shape)
            message = infer_message(ids, model, id="mine")
            expected = [over_http(catalogue_http, model, ids)]
            (streamed,) = stub.ModelStreamInfer(iter([message]), timeout=60)
            for found in (stub.ModelInfer(message, timeout=60), streamed.infer_response):
                assert (found.model_name, found.id, list(found.outputs[0].shape)) == (model, "mine", [*shape, 64])
                assert list(found.raw_output_contents) == expected, shape


def test_large_grpc_outputs_keep_their_order_and_type(catalogue_http: httpx.Client, stub: Any) -> None:
    ids, outputs = np.random.default_rng(8).integers(0, 300, (5, 4000)), ("embeddings", "token_embeddings")
    for dtype in ("float32", "float16"):
        message = infer_message(ids, "long-bert", outputs=[{"name": name} for name in outputs])
        message.parameters["dtype"].string_param = dtype
        answer = stub.ModelInfer(message, timeout=60)
        assert tuple(output.name for output in answer.outputs) == outputs
        expected = [over_http(catalogue_http, "long-bert", ids, output=output, dtype=dtype) for output in outputs]
        assert list(answer.raw_output_contents) == expected


def test_prepared_calls_have_their_own_vectors(tiny_clients: Clients) -> None:
    asked = [[[number % 5, number % 3, number % 4]] for number in range(60)]
    calls = [tiny_clients.stub.ModelInfer.future(infer_message(ids), timeout=60) for ids in asked]
    for ids, call in zip(asked, calls, strict=True):
        assert list(call.result().raw_output_contents) == [over_http(tiny_clients.http, "gpt", ids)]
    vectors = over_http(tiny_clients.http, "gpt", [[1]])
    for rows in [*range(1, 400), *range(399, 0, -1)]:  # more lengths than the cache holds
        answer = tiny_clients.stub.ModelInfer(infer_message([[1]] * rows), timeout=60)
        assert list(answer.raw_output_contents) == [vectors * rows]


def field_of(tag: bytes, content: bytes) -> bytes:
    """Return a field of a message, of less than 128 bytes."""
    return tag + bytes([len(content)]) + content


def test_other_field_is_not_read_as_ids(tiny_clients: Clients, tiny_server: Server) -> None:
    """An unknown field or parameter follows the ids, and holds the same bytes, then others."""
    ids, others = np.array([[1, 2, 3]]), np.array([[4, 4, 4]])
    known = infer_message(ids).SerializeToString()
    inputs, raw = known[: -ids.nbytes - 2], known[-ids.nbytes - 2 :]
    texts = [field_of(b"\x1a", content.tobytes()) for content in (ids, others)]  # string_param
    parameters = [field_of(b"\x22", b"\x0a\x04note" + field_of(b"\x12", text)) for text in texts]
    shorter, longer = b"\xa2\x06\x03abc", b"\xc2\x3e" + b"\xa0\x9c\x01" + bytes(20000)
    messages = [known + field_of(b"\xc2\x3e", content.tobytes()) for content in (ids, ids, others, ids)]  # field 1000
    messages += [known + parameters[number] for number in (0, 0, 1, 0)]
    messages += [message for message in (known + shorter, raw + inputs, known + longer) for _ in range(2)]
    with grpc.insecure_channel(tiny_server.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for message in messages:
            answer = service_pb2.ModelInferResponse.FromString(call(message, timeout=60))
            assert list(answer.raw_output_contents) == [over_http(tiny_clients.http, "gpt", ids)]


IDS = np.ones((4000, 1), np.int64)


@contextmanager
def counting(target: str) -> Iterator[tuple[str, list[int]]]:
    """Carry one connection to a server, and collect the sizes of what it sends."""
    sizes: list[int] = []

    def carry(source: socket.socket, sink: socket.socket, read: list[int]) -> None:
        with source, sink, suppress(OSError):
            while data := source.recv(2**16):
                read.append(len(data))
                sink.sendall(data)

    def run() -> None:
        client, server = listener.accept()[0], dial(f"http://{target}")
        threading.Thread(target=carry, args=(client, server, []), daemon=True).start()
        carry(server, client, sizes)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=run, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", sizes


def test_grpc_response_is_compressed_on_request(tiny_server: Server, tiny_clients: Clients) -> None:
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS.tolist()}).tobytes()
    given = tritonclient.grpc.InferInput("input_ids", IDS.shape, "INT64").set_data_from_numpy(IDS)
    for accept, compressed in (("", False), ("gzip", True), ("deflate", True), ("br", False)):
        headers = {"accept-encoding": accept} if accept else {}
        with counting(tiny_server.grpc) as (address, sizes):
            with tritonclient.grpc.InferenceServerClient(address) as client:
                answer = client.infer("gpt", [given], headers=headers, compression_algorithm="gzip")
            assert answer.as_numpy("embeddings").tobytes() == expected
            assert (sum(sizes) < len(expected) / 4) == compressed, accept
