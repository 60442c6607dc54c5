"""A model of Triton's server, in its Python backend. The arguments are the ports of HTTP and gRPC."""

import sys

import numpy as np
from graph import OnnxGraph
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

graph = OnnxGraph()


def embed(requests: list) -> list:
    """Return the vectors of each request."""
    return [{"embeddings": graph(request.data["input_ids"])} for request in requests]


if __name__ == "__main__":
    http, grpc = map(int, sys.argv[1:])
    with Triton(config=TritonConfig(http_port=http, grpc_port=grpc, allow_metrics=False)) as triton:
        triton.bind(
            "gpt2-small",
            embed,
            inputs=[Tensor(name="input_ids", dtype=np.int64, shape=(-1, -1))],
            outputs=[Tensor(name="embeddings", dtype=np.float32, shape=(-1, -1, -1))],
            config=ModelConfig(batching=False),
        )
        triton.serve()
