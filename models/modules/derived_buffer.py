"""A module with a derived buffer, such as frequencies."""

from collections.abc import Callable
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class DerivedBuffer(nn.Module):
    """A module with one derived buffer, which is no state.

    The buffer moves to another device with the module, but keeps its type. In bfloat16, a frequency is off by whole
    turns at position 2000, and a slope is wrong by 0.4 % of every distance.

    Args:
        name: name of the buffer.
        derive: returns its values.

    """

    def __init__(self, name: str, derive: Callable[[], NDArray[Any]]) -> None:
        super().__init__()
        self._name, self._derive = name, derive
        self.register_buffer(name, torch.from_numpy(derive()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        setattr(self, self._name, torch.from_numpy(self._derive()).to(self.get_buffer(self._name).device))
        return self
