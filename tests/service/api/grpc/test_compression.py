"""Compressed answers over gRPC, on request of the client. Oracle: the bytes on the socket."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import tritonclient.grpc

from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server

IDS = np.ones((4000, 1), np.int64)


class Counter:
    """Carries one connection, and counts the bytes of the server."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.received = 0

    def run(self) -> None:
        client, server = self._listener.accept()[0], socket.create_connection(self._target)
        threading.Thread(target=self._carry, args=(client, server, False), daemon=True).start()
        self._carry(server, client, True)

    def _carry(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with source, sink, suppress(OSError):
            while data := source.recv(2**16):
                self.received += len(data) * counted
                sink.sendall(data)

    def close(self) -> None:
        self._listener.close()


@contextmanager
def counting(server: Server) -> Iterator[Counter]:
    counter = Counter(server.grpc)
    threading.Thread(target=counter.run, daemon=True).start()
    try:
        yield counter
    finally:
        counter.close()


@pytest.mark.parametrize(
    ("headers", "compressed"),
    [
        ({}, False),
        ({"accept-encoding": "gzip"}, True),
        ({"accept-encoding": "deflate"}, True),
        ({"accept-encoding": "br"}, False),
    ],
)
def test_grpc_response_is_compressed_on_request(
    tiny_server: Server, tiny_clients: Clients, headers: dict[str, str], compressed: bool
) -> None:
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS.tolist()}).tobytes()
    given = tritonclient.grpc.InferInput("input_ids", IDS.shape, "INT64").set_data_from_numpy(IDS)
    with counting(tiny_server) as counter:
        with tritonclient.grpc.InferenceServerClient(counter.address) as client:
            answer = client.infer("gpt", [given], headers=headers, compression_algorithm="gzip")
        assert answer.as_numpy("embeddings").tobytes() == expected
        assert (counter.received < len(expected) / 4) == compressed
