"""Compressed answers over gRPC, on request of the client. Oracle: the bytes on the socket."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import tritonclient.grpc

from tests.support.connections import dial
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server

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
