"""The graph of every measured server, in onnxruntime with one thread: ids in, vectors out."""

import os

import numpy as np
import onnxruntime

OFFSET = np.zeros(1, np.int64)


class OnnxGraph:
    """A session of the file in the environment variable GRAPH."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(os.environ["GRAPH"], options, ["CPUExecutionProvider"])

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the vectors (B, L, D) of int64 ids (B, L)."""
        return self._session.run(["embeddings"], {"input_ids": ids, "offset": OFFSET})[0]
