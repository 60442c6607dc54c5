"""A module with derived buffers, such as frequencies."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class DerivedBuffers(nn.Module):
    """A module with derived buffers, which are no state.

    The buffers move to another device with the module, and have their values there, also after `to_empty`. They keep
    their type: in bfloat16, a frequency is off by whole turns at position 2000, and a slope is wrong by 0.4 % of every
    distance. Those of a class that sets `follows_type` take the type of the module.

    Args:
        derive: for the name of each buffer, a function that returns its values.

    """

    follows_type: ClassVar[bool] = False

    def __init__(self, **derive: Callable[[], NDArray[Any]]) -> None:
        super().__init__()
        self._derive = derive
        for name, values in derive.items():
            self.register_buffer(name, torch.from_numpy(values()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, values in self._derive.items():
            moved, derived = self.get_buffer(name), torch.from_numpy(values())
            setattr(self, name, derived.to(moved.device, moved.dtype if self.follows_type else None))
        return self
