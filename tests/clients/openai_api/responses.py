"""Connection to the OpenAI API; texts, ids, and the vectors in responses."""

import numpy as np
import openai
from numpy.typing import NDArray

from tests.support.servers import Server

TEXTS = ["Hello, world!", "Ünïcödé 😀 naïve café", "the quick brown fox " * 30]
MEAN = {"pooling": "mean"}
"""Needed by a model without sentence embeddings."""
IDS = [[101, 7592, 102], [101, 2088, 999, 2003, 102]]


def connected(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0)


def vectors_of(response: openai.types.CreateEmbeddingResponse) -> NDArray[np.float32]:
    assert [item.index for item in response.data] == list(range(len(response.data)))
    return np.array([item.embedding for item in response.data], np.float32)
