"""A plain FastAPI handler of model2vec: texts in, vectors as lists out. The argument is the folder of a model."""

import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from model2vec import StaticModel

app, model = FastAPI(), StaticModel.from_pretrained(sys.argv[1])


@app.post("/v1/embeddings")
async def embed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the vectors of texts."""
    vectors = model.encode(document["input"])
    return {"data": [{"index": index, "embedding": vector.tolist()} for index, vector in enumerate(vectors)]}


listener = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning")).run(sockets=[listener])
