"""The connection of a measurement over gRPC; grpcio is imported with the first."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from preblock.bench.stats import LoadCounters
from preblock.bench.workload import Ids, LoadTarget
from preblock.client.errors import ConnectionFailed


def _roots() -> bytes | None:
    """Return the root certificates of SSL_CERT_FILE, as over HTTP; None for the defaults of gRPC."""
    file = os.environ.get("SSL_CERT_FILE")
    return Path(file).read_bytes() if file else None


class GrpcConnection:
    """Repeats one ModelInfer call over its own channel.

    Args:
        target: target of the load, with a gRPC port.
        ids: ids of each call.

    """

    def __init__(self, target: LoadTarget, ids: Ids) -> None:
        from preblock.service.codecs.v2 import open_inference_pb2 as pb

        host = f"[{target.host}]" if ":" in target.host else target.host
        self.tally, self.address = LoadCounters(), f"{host}:{target.grpc_port}"
        self._target = target
        request = pb.ModelInferRequest(model_name=target.model, raw_input_contents=[ids.astype("<i8").tobytes()])
        request.inputs.add(name="input_ids", datatype="INT64", shape=ids.shape)
        self._request = request.SerializeToString()
        self._metadata = (("authorization", f"Bearer {target.key}"),) if target.key is not None else ()
        self._channel: Any = None
        self._call: Callable[..., Any]

    async def open(self) -> None:
        """Connect."""
        import grpc

        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channel = (
            grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(_roots()), options)
            if self._target.tls
            else grpc.aio.insecure_channel(self.address, options)
        )
        # Without serializers, gRPC passes bytes.
        self._call = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        await self._channel.channel_ready()

    async def ask(self, until: float) -> None:
        """Repeat the call until the time `until`."""
        import grpc

        while True:
            sent = time.perf_counter()
            try:
                answer = await self._call(self._request, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    raise ConnectionFailed(str(error.details())) from error
                self.tally.failed(error.code().name, str(error.details()))
                now = time.perf_counter()
            else:
                self.tally.received += len(answer)
                now = self.tally.answered(sent)
            if now >= until:
                return

    def close(self) -> None:
        """Drop the channel; it closes with its last reference."""
        self._channel = None
