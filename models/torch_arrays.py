"""Arrays as PyTorch tensors, and back, without a copy. NumPy has no bfloat16 of its own: it is that of ml_dtypes."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Return `array` as a tensor. It shares the memory, unless the array is read-only."""
    writable = array if array.flags.writeable else array.copy()
    if writable.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(writable)


def array_of(name: str, tensor: Tensor) -> NDArray[Any]:
    """Return `tensor` as an array. It shares the memory of a tensor on the CPU.

    Raises:
        ValueError: it is on the device meta, or of a type without an array; the message begins with `name`.

    """
    if tensor.is_meta:
        raise ValueError(f"{name}: got a tensor on the device meta, expected one with values")
    plain = tensor.detach().cpu()
    try:
        if plain.dtype == torch.bfloat16:
            return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return plain.numpy()
    except TypeError as error:
        got = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name}: got {got}, expected float32, float16, bfloat16") from error
