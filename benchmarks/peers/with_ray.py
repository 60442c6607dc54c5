"""A deployment of Ray Serve behind its FastAPI ingress: raw int64 in, raw float32 out. The argument is a port."""

import sys

import numpy as np
import ray
from fastapi import FastAPI, Request, Response
from graph import OnnxGraph
from ray import serve

app = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(app)
class RayPeer:
    """Ids in, vectors out."""

    def __init__(self) -> None:
        self._graph = OnnxGraph()

    @app.post("/embed")
    async def embed(self, request: Request, rows: int) -> Response:
        """Return the vectors of ids in so many rows."""
        ids = np.frombuffer(await request.body(), "<i8").reshape(rows, -1)
        return Response(self._graph(ids).tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=512 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(RayPeer.bind(), blocking=True)
