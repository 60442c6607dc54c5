"""Ids with ends of sequence, and their vectors in one run of onnxruntime."""

import numpy as np
from numpy.typing import NDArray

from preblock.service.runtime.session import Session

END, VALUES = 2, 2 * 64
OUTPUT = "ngram_embeddings"
IDS = [11, 12, END, 13, 14, 15, 16, 17, END, END, 18, 19]
OTHERS = [[21, 22, 23, 24], [31, END, 33, 34]]


def whole(session: Session, ids: list[int], context: tuple[int, int] = (END, END)) -> NDArray[np.float32]:
    """Return the vectors (L, N * E) of one row."""
    feeds = {"input_ids": np.array([ids]), "context": np.array([context])}
    return session.run(feeds)[OUTPUT].reshape(len(ids), VALUES)
