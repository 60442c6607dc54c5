"""The tables of a front-end as torch tensors. To be deleted with the code that writes them by torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from preblock.models.frontend import FrontEnd
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.positions import LearnedPositionalEncoding
from preblock.models.modules.tokens import TokenEmbedding

TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.int64: onnx.TensorProto.INT64,
}
DTYPES: dict[int, torch.dtype] = {data_type: dtype for dtype, data_type in TYPES.items()}
TABLES = TokenEmbedding | LearnedPositionalEncoding | HybridPositionalEncoding
"""Modules with a trained table, stored in the chosen type. Norms, projections and sinusoids stay in float32."""


def tables_of(frontend: FrontEnd) -> dict[str, Tensor]:
    """Return the tables of `frontend`, by their names in `state_dict()`."""
    weights = frontend.state_dict()
    names = [f"{name}.weight" for name, module in frontend.named_modules() if isinstance(module, TABLES)]
    return {name: weights[name] for name in names}


def of_bytes(content: NDArray[Any], data_type: int, shape: Sequence[int]) -> Tensor:
    """Return the bytes of `content` as a tensor, without a copy. numpy lacks some of the types."""
    return torch.from_numpy(content.reshape(-1).view(np.uint8)).view(DTYPES[data_type]).reshape(tuple(shape))
