"""A custom module as a front-end.

Letters: B batch, L length, D output width, M maximum length.
"""

import torch
from torch import Tensor, nn

from preblock.models.modules.signature import Signature


class CustomFrontEnd(nn.Module):
    """A user's own module as a front-end.

    Args:
        module: `forward(input_ids, offset)` with int64 `input_ids` (B, L) and `offset` (1,) or (B,), the number of
            tokens already fed; returns float32 (B, L, D). Put checks on values under
            `if not torch.compiler.is_compiling()`, because the exporter cannot trace them.
        vocab_size: legal ids are 0 to V - 1.
        max_len: M, the largest legal offset + L.
        exact: whether the graph must equal the module bit for bit; default False, for norms, projections, other sums.

    Raises:
        ValueError: the module does not return float32 vectors (B, L, D).

    """

    def __init__(self, module: nn.Module, vocab_size: int, max_len: int, exact: bool = False) -> None:
        super().__init__()
        self.module = module
        with torch.inference_mode():
            sample = module(torch.zeros((1, 1), dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        if not isinstance(sample, Tensor) or sample.dtype != torch.float32 or sample.shape[:-1] != (1, 1):
            got = f"{sample.dtype} {tuple(sample.shape)}" if isinstance(sample, Tensor) else type(sample).__name__
            raise ValueError(f"module: got {got} for ids (1, 1), expected torch.float32 (1, 1, D)")
        self.signature = Signature(
            family="custom",
            vocab_size=vocab_size,
            width=sample.shape[-1],
            max_len=max_len,
            rows=max_len,
            exact=exact,
        )

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        """Return the vectors of the module: float32 (B, L, D)."""
        vectors: Tensor = self.module(input_ids, offset)
        return vectors
