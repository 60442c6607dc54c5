"""Requests of two protocols, and the expected vectors."""

import base64

import httpx
import numpy as np
from numpy.typing import NDArray

from tests.support.open_inference import binary_infer

NPY, BYTES = "application/x-npy", "application/octet-stream"
VOCABULARY, WIDTH, MAX_LEN = 500, 96, 900
Ids = NDArray[np.int64]


def raw(ids: Ids, offset: int) -> tuple[str, bytes, dict[str, str]]:
    path = f"/models/gpt/versions/1/embed?offset={offset}&shape={ids.shape[0]},{ids.shape[1]}"
    return path, ids.tobytes(), {"Content-Type": BYTES, "Accept": BYTES}


def v2(ids: Ids, offset: int) -> tuple[str, bytes, dict[str, str]]:
    outputs = [{"name": "embeddings", "parameters": {"binary_data": True}}]
    headers, body = binary_infer({"input_ids": ids, "offset": np.array([offset])}, outputs=outputs)
    return "/v2/models/gpt/infer", body, headers


def oracle(client: httpx.Client, ids: Ids, offset: int) -> NDArray[np.float32]:
    document = client.post("/models/gpt/embed", json={"input_ids": ids.tolist(), "offset": offset}).json()
    return np.frombuffer(base64.b64decode(document["embeddings"]), np.float32).reshape(*ids.shape, WIDTH)
