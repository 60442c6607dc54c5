"""A plain FastAPI handler: raw int64 in, raw float32 out. The argument is a port."""

import sys

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from graph import OnnxGraph

app, graph = FastAPI(), OnnxGraph()


@app.post("/embed")
async def embed(request: Request, rows: int) -> Response:
    """Return the vectors of ids in so many rows."""
    ids = np.frombuffer(await request.body(), "<i8").reshape(rows, -1)
    return Response(graph(ids).tobytes(), media_type="application/octet-stream")


uvicorn.run(app, port=int(sys.argv[1]), access_log=False, log_level="warning")
