"""Requests of the Open Inference Protocol, over HTTP and gRPC."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from numpy.typing import ArrayLike, NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

HEADER_LENGTH = "Inference-Header-Content-Length"
NO_LIMIT = ("grpc.max_receive_message_length", -1)
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
"""Options of a gRPC channel."""


@contextmanager
def open_stub(address: str, *options: tuple[str, int]) -> Iterator[Any]:
    """Connect to a gRPC server, with options of the channel."""
    with grpc.insecure_channel(address, options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def infer_message(ids: ArrayLike, model: str = "gpt", **fields: Any) -> Any:
    """Return a ModelInferRequest for ids (B, L) as raw contents; its default output is `embeddings`.

    Args:
        ids: of the tokens.
        model: name; default `gpt`.
        fields: other fields of the message.

    """
    return tensor_message({"input_ids": np.array(ids, np.int64)}, model, **fields)


def tensor_message(tensors: Mapping[str, NDArray[np.int64]], model: str = "gpt", **fields: Any) -> Any:
    """Return a ModelInferRequest for int64 tensors as raw contents, as `infer_message` does for ids."""
    contents = [tensor.tobytes() for tensor in tensors.values()]
    fields = {"outputs": [{"name": "embeddings"}]} | fields
    message = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=contents, **fields)
    for name, tensor in tensors.items():
        message.inputs.add(name=name, datatype="INT64", shape=tensor.shape)
    return message


def binary_infer(tensors: Mapping[str, NDArray[np.int64]], **fields: Any) -> tuple[dict[str, str], bytes]:
    """Return headers and body of a V2 request over HTTP whose int64 tensors are bytes after the JSON.

    Args:
        tensors: by name.
        fields: other fields of the JSON document.

    """
    inputs = [
        {"name": name, "shape": tensor.shape, "datatype": "INT64", "parameters": {"binary_data_size": tensor.nbytes}}
        for name, tensor in tensors.items()
    ]
    header = json.dumps({"inputs": inputs, "outputs": [{"name": "embeddings"}], **fields}).encode()
    return {HEADER_LENGTH: str(len(header))}, header + b"".join(tensor.tobytes() for tensor in tensors.values())
