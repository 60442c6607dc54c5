"""The connection of a measurement over gRPC; grpcio is imported with the first."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from preblock.bench.workload import Ids, LoadTarget
from preblock.client.errors import KIND_PREFIX, ConnectionFailed, ServiceError


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
        self.address = f"{host}:{target.grpc_port}"
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

    async def exchange(self) -> int:
        """Send the call, and return the number of bytes of the answer."""
        import grpc

        try:
            return len(await self._call(self._request, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ConnectionFailed(str(error.details())) from error
            raise ServiceError({"type": KIND_PREFIX + error.code().name, "detail": error.details()}) from error

    def close(self) -> None:
        """Drop the channel; it closes with its last reference."""
        self._channel = None
