"""A plain FastAPI handler of wordllama: texts in, vectors as lists out. The argument is the folder of the package."""

import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from wordllama import WordLlama

app, model = FastAPI(), WordLlama.load(cache_dir=sys.argv[1], disable_download=True)


@app.post("/v1/embeddings")
async def embed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the vectors of texts."""
    vectors = model.embed(document["input"], norm=True)
    return {"data": [{"index": index, "embedding": vector.tolist()} for index, vector in enumerate(vectors)]}


listener = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning")).run(sockets=[listener])
