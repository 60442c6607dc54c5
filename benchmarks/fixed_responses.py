"""A server of canned bytes without a model: the upper bound of the throughput. It reads requests for vectors.

    python -m benchmarks.fixed_responses PORT GRPC_PORT

An ASGI application in the server of Preblock, and a handler of grpc.aio, for the shapes of `benchmarks.tensors`.
WebSockets of any path answer like the bare WebSocket of `benchmarks.streams`.
"""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import uvicorn
import uvloop

from benchmarks.streams import MODEL, WIDTH, echo
from benchmarks.tensors import SHAPES, bare
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.core.settings import Settings
from preblock.service.server.addresses import bind
from preblock.service.server.run import configure

SERVICE = "inference.GRPCInferenceService"


def answers() -> dict[int, bytes]:
    """Return the gRPC answers, by the number of bytes of the ids."""
    found = {}
    for batch, length in SHAPES:
        answer = pb.ModelInferResponse(model_name=MODEL, model_version="1")
        answer.outputs.add(name="embeddings", datatype="FP32", shape=(batch, length, WIDTH))
        answer.raw_output_contents.append(bytes(4 * batch * length * WIDTH))
        found[8 * batch * length] = answer.SerializeToString()
    return found


async def serve_grpc(port: int) -> grpc.aio.Server:
    """Serve the gRPC answers. The length of a request selects the answer, because ids dominate it."""
    known = sorted(answers().items())

    async def infer(message: bytes, _: Any) -> bytes:
        return next(answer for size, answer in reversed(known) if len(message) > size)

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


async def answer(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Answer an HTTP request, or the messages of a WebSocket."""
    await (echo(receive, send) if scope["type"] == "websocket" else bare(scope, receive, send))


async def serve(port: int, grpc_port: int) -> None:
    """Serve HTTP and gRPC until SIGTERM."""
    server = await serve_grpc(grpc_port)
    print(f"http://127.0.0.1:{port}", flush=True)
    await uvicorn.Server(configure(Settings(port=0), answer)).serve([bind("port", "127.0.0.1", port)])
    await server.stop(None)


def main() -> None:
    """Serve on the ports of the command line."""
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
