"""The interface of a runner: it computes outputs of a model."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Feeds = Mapping[str, NDArray[Any]]
Float32 = NDArray[np.float32]


class Runner(Protocol):
    """Computes outputs of a model: by onnxruntime or a fused kernel, on a CPU or GPU."""

    def run(self, feeds: Feeds, outputs: Sequence[str], /) -> dict[str, Float32]:
        """Return `outputs` by name.

        `feeds` hold every input of the model and were validated: onnxruntime checks no index below 0.
        """


class FlatRunner:
    """Returns the values of a token in one dimension, where a graph has two: layers and width."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, feeds: Feeds, outputs: Sequence[str], /) -> dict[str, Float32]:
        """Return `outputs` by name, each (B, L, values of a token)."""
        found = self._runner.run(feeds, outputs)
        return {name: values.reshape(*values.shape[:2], -1) for name, values in found.items()}
