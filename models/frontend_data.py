"""A front-end as data: its config, and its tensors as NumPy arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from preblock.models.config import FrontEndConfig
from preblock.models.modules.signature import Signature

Array = NDArray[Any]


@dataclass(frozen=True)
class FrontEndData:
    """A front-end without PyTorch.

    Args:
        config: the steps and further outputs, with all sizes.
        tensors: the trained weights, named as in `FrontEnd.state_dict()`: float32 of any shape, or a token table in
            its stored type, mapped from a file. Types beyond NumPy's, such as bfloat16, are those of ml_dtypes.

    """

    config: FrontEndConfig
    tensors: Mapping[str, Array]

    @property
    def signature(self) -> Signature:
        """The inputs, sizes and promises of its graph."""
        return self.config.signature
