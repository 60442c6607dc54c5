"""Server reflection under the names of both its versions.

grpcio-reflection has `v1alpha` only. Newer clients ask for `v1` first; its messages are the same ones (gRPC,
"Server Reflection Protocol").
"""

from collections.abc import Iterable

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from preblock.service.codecs.v2.protobuf import register_renamed

V1_SERVICE = reflection.SERVICE_NAME.replace("v1alpha", "v1")


def enable_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Make `server` describe `services` and the reflection services themselves."""
    register_renamed(reflection_pb2.DESCRIPTOR, "v1alpha", "v1")
    names = (*services, reflection.SERVICE_NAME, V1_SERVICE)
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1_SERVICE, handlers),))
