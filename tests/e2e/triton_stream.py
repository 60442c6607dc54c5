"""A gRPC stream of tritonclient with its responses."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http

from tests.clients.triton_client import TritonClient
from tests.support.servers import Server


class TritonStream:
    """A stream of the synchronous client, with its answers."""

    def __init__(self, server: Server) -> None:
        self._answers: queue.Queue[Any] = queue.Queue()
        self.client = tritonclient.grpc.InferenceServerClient(server.grpc)
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def send(self, ids: Any, id_: int | str, model: str = "gpt", **told: Any) -> None:
        inputs = TritonClient(tritonclient.grpc, "").inputs(input_ids=ids)
        self.client.async_stream_infer(model, inputs, sequence_id=id_, **told)

    def recv(self) -> bytes | str:
        result, error = self._answers.get(timeout=30)
        return str(error.message()) if error else result.as_numpy("embeddings").tobytes()

    def ask(self, *args: Any, **told: Any) -> bytes | str:
        self.send(*args, **told)
        return self.recv()


@contextmanager
def streaming(server: Server) -> Iterator[TritonStream]:
    stream = TritonStream(server)
    try:
        yield stream
    finally:
        stream.client.stop_stream()
        stream.client.close()
