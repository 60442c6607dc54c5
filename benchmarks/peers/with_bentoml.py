"""A service of BentoML: JSON in, JSON out, as its schema for arrays has it."""

import bentoml
import numpy as np
from graph import OnnxGraph


@bentoml.service(workers=1, traffic={"timeout": 120})
class BentoPeer:
    """Ids in, vectors out."""

    def __init__(self) -> None:
        self._graph = OnnxGraph()

    @bentoml.api
    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Run it."""
        return self._graph(ids.astype(np.int64))
