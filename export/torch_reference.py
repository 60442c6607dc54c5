"""The reference of a proof with PyTorch: the modules of `preblock.models`, or somebody's own module.

Letters: B batch, L length, V rows and D width of a table.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from preblock.export.reference import Array, Float32
from preblock.export.stored_tables import NarrowTable
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_data import FrontEndData
from preblock.models.modules.tokens import TokenEmbedding
from preblock.models.torch_arrays import tensor_of
from preblock.service.artifacts.names import CONTEXT
from preblock.service.core.types import Int64

VERSION = f"torch {torch.__version__}"


class WidenedTable(nn.Module):
    """A table in another type than float32, in place of a `TokenEmbedding`; rows are widened at lookup.

    Args:
        take: returns the rows of ids, in float32.

    """

    def __init__(self, take: Callable[[Int64], Float32]) -> None:
        super().__init__()
        self._take = take

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D), float32, of int64 `input_ids` (B, L)."""
        return torch.from_numpy(self._take(input_ids.numpy()))


class TorchReference:
    """The reference with PyTorch.

    Args:
        frontend: the module; it is put into evaluation mode.

    """

    version = VERSION

    def __init__(self, frontend: FrontEnd | CustomFrontEnd) -> None:
        self.frontend, self.signature = frontend.eval(), frontend.signature
        self.config = frontend.config if isinstance(frontend, FrontEnd) else None

    @staticmethod
    def of(data: FrontEndData, stored: Mapping[str, NarrowTable] = MappingProxyType({})) -> "TorchReference":
        """Return the reference of a front-end as data; arguments as in `NumpyReference`.

        Tables of tokens, indices and n-grams in another type than float32 stay in it. Those of positions are short, and
        widened.

        Raises:
            RuntimeError: a tensor is missing, of another shape, or not of this front-end.

        """
        narrow = {name: _taker(values) for name, values in data.tensors.items() if values.dtype != np.float32}
        narrow |= {name: table.take for name, table in stored.items()}
        shapes: dict[str, tuple[int, ...]] = {name: values.shape for name, values in data.tensors.items()}
        shapes |= {name: table.shape for name, table in stored.items()}
        weights = {
            name: torch.empty(shape, device="meta")
            if name in narrow
            # The matrix of a projection is stored transposed, and torch sums in another order there.
            else tensor_of(np.ascontiguousarray(data.tensors[name]))
            for name, shape in shapes.items()
        }
        frontend = FrontEnd.from_tensors(data.config, weights)
        for name, take in narrow.items():
            place, _, part = name.rpartition(".")
            if isinstance(frontend.get_submodule(place), TokenEmbedding):
                frontend.set_submodule(place, WidenedTable(take))
            else:
                widened = torch.from_numpy(take(np.arange(shapes[name][0])))
                setattr(frontend.get_submodule(place), part, nn.Parameter(widened))
        return TorchReference(frontend)

    def vectors(self, feeds: Mapping[str, Int64]) -> Float32:
        """Return the vectors (B, L, D); arguments as in `Reference`."""
        inputs: dict[str, Any] = {name: torch.from_numpy(array) for name, array in feeds.items()}
        given = {name: inputs.pop(name) for name in self.signature.indices if name in inputs}
        inputs.pop(CONTEXT, None)  # no vector depends on it
        if given:
            inputs["indices"] = given
        with torch.inference_mode():
            vectors: Float32 = self.frontend(**inputs).numpy()
        return vectors

    def look_up(self, ids: Int64, scaled: bool = True) -> Float32:
        """Return the model's own lookup, or the rows of its token table."""
        with torch.inference_mode():
            return self._steps.look_up(torch.from_numpy(ids), scaled).numpy()

    def per_layer_outputs(self, ids: Int64) -> dict[str, Float32]:
        """Return the inputs of all layers by name."""
        with torch.inference_mode():
            return _arrays(self._steps.per_layer_outputs(torch.from_numpy(ids)))

    def ngram_outputs(self, ids: Int64, context: Int64) -> dict[str, Array]:
        """Return row ids and, with tables, their embeddings."""
        with torch.inference_mode():
            return _arrays(self._steps.ngram_outputs(torch.from_numpy(ids), torch.from_numpy(context)))

    def rotary_outputs(self, ids: Int64, offset: Int64) -> dict[str, Float32]:
        """Return cosines and sines by name."""
        with torch.inference_mode():
            return _arrays(self._steps.rotary_outputs(torch.from_numpy(ids), torch.from_numpy(offset), rounded=False))

    def bias(self, lengths: Mapping[str, int]) -> Float32:
        """Return the attention bias, or the rows of a relative sinusoid."""
        with torch.inference_mode():
            bias: Float32 = self._steps.bias(**lengths).numpy()
        return bias

    @property
    def _steps(self) -> FrontEnd:
        """The module of a front-end with steps: somebody's own has vectors alone."""
        assert isinstance(self.frontend, FrontEnd)
        return self.frontend


def _arrays(outputs: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: values.numpy() for name, values in outputs.items()}


def _taker(table: Array) -> Callable[[Int64], Float32]:
    return lambda ids: np.asarray(table[ids], np.float32)
