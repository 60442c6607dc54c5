"""An API of LitServe: JSON in, raw float32 out. The argument is a port."""

import sys

import litserve
import numpy as np
from fastapi import Response
from graph import OnnxGraph


class LitServePeer(litserve.LitAPI):
    """Ids in, vectors out."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - as LitServe calls it
        """Open the graph."""
        self._graph = OnnxGraph()

    def decode_request(self, request: dict) -> np.ndarray:
        """Read ids."""
        return np.array(request["input_ids"], np.int64)

    def predict(self, ids: np.ndarray) -> np.ndarray:
        """Run it."""
        return self._graph(ids)

    def encode_response(self, vectors: np.ndarray) -> Response:
        """Write vectors."""
        return Response(vectors.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    server = litserve.LitServer(LitServePeer(), accelerator="cpu", workers_per_device=1)
    server.run("127.0.0.1", int(sys.argv[1]), num_api_servers=1, log_level="warning", generate_client_file=False)
