"""A custom module as a front-end.

Letters: B batch, L length, D output width, M maximum length.
"""

import inspect

import torch
from torch import Tensor, nn

from preblock.models.config import MAX_TABLE_ROWS, check_size
from preblock.models.modules.signature import Signature

SAMPLE_LENGTH = 64
"""Most tokens of the rows to compare with their tokens alone."""
ALLOWED_SHARE = 2.0**-10
"""Allowed difference between the two, as a share of the largest value: sums may have another order."""


class CustomFrontEnd(nn.Module):
    """A user's own module as a front-end.

    Args:
        module: in evaluation mode, with `forward(input_ids, offset)`: int64 `input_ids` (B, L) and `offset` (1,) or
            (B,), the number of tokens already fed; or `forward(input_ids, past_length: int)` with one number for all
            rows. Returns float32 (B, L, D). A vector must depend on its own id and position alone. Put checks on values
            under `if not torch.compiler.is_compiling()`, because the exporter cannot trace them.
        vocab_size: legal ids are 0 to V - 1.
        max_len: M, the largest legal offset + L; at most 2^24.
        exact: whether the graph must equal the module bit for bit; default False, for norms, projections, other sums.

    Raises:
        ValueError: the module does not return float32 vectors (B, L, D), takes other arguments, or mixes tokens; or it
            fails for the last id or position.

    """

    def __init__(self, module: nn.Module, vocab_size: int, max_len: int, exact: bool = False) -> None:
        super().__init__()
        vocab_size, self._max_len = check_size("vocab_size", vocab_size), check_size("max_len", max_len)
        if self._max_len > MAX_TABLE_ROWS:  # the proof runs all positions
            raise ValueError(f"max_len: got {max_len}, expected at most {MAX_TABLE_ROWS}, for a custom module")
        self.module = module
        self._takes_number = _takes_number(module)
        sample = self._call("module", [0], 0)
        self._call("vocab_size", [vocab_size - 1], 0)
        self._call("max_len", [0], self._max_len - 1)
        if sample.device.type != "cpu":
            raise ValueError(f"module: got vectors on the device {sample.device}, expected cpu; module.cpu() moves it")
        self._check_alone([place % vocab_size for place in range(min(self._max_len, SAMPLE_LENGTH))])
        self.signature = Signature(
            family="custom",
            vocab_size=vocab_size,
            width=sample.shape[-1],
            max_len=self._max_len,
            rows=self._max_len,
            exact=exact,
        )

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        """Return the vectors of the module: float32 (B, L, D)."""
        vectors: Tensor
        if not self._takes_number:
            vectors = self.module(input_ids, offset)
        elif torch.compiler.is_compiling():
            vectors = self._traced(input_ids, offset)
        elif len(offset) == 1:
            vectors = self.module(input_ids, int(offset))
        else:
            rows = zip(input_ids, offset.tolist(), strict=True)
            vectors = torch.cat([self.module(ids.unsqueeze(0), past_length) for ids, past_length in rows])
        return vectors

    def _call(self, cause: str, ids: list[int], position: int, batch: int = 1) -> Tensor:
        """Return the vectors (B, L, D) of B equal rows; raise ValueError, naming `cause`, if the module fails."""
        try:
            with torch.inference_mode():
                vectors: Tensor = self(torch.tensor([ids] * batch), torch.tensor([position]))
        except Exception as error:  # a module may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            row = f"id {ids[0]}" if len(ids) == 1 else f"{len(ids)} ids"
            raise ValueError(f"{cause}: the module fails for {row} at position {position}: {reason}") from error
        shape, is_tensor = (batch, len(ids)), isinstance(vectors, Tensor)
        if not is_tensor or vectors.dtype != torch.float32 or vectors.shape[:-1] != shape or not vectors.numel():
            got = f"{vectors.dtype} {tuple(vectors.shape)}" if is_tensor else type(vectors).__name__
            raise ValueError(f"module: got {got} for ids {shape}, expected torch.float32 ({batch}, {len(ids)}, D)")
        return vectors

    def _check_alone(self, ids: list[int]) -> None:
        """Compare the vectors of two equal rows with those of their tokens alone.

        A stream and a ragged batch run tokens apart.
        """
        rows = self._call("module", ids, 0, batch=2)
        tokens = [self._call("module", [token], place) for place, token in enumerate(ids)]
        error = float((rows - torch.cat(tokens, 1)).abs().max())
        if error > ALLOWED_SHARE * float(rows.abs().max()):
            raise ValueError(
                f"module: got vectors in two rows of {len(ids)} tokens that differ by {error:.3g} from those of the "
                "tokens alone, expected vectors that depend on their own id and position"
            )

    def _traced(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        """Call a module with one number for rows at several offsets, without a loop, which a graph cannot have.

        All rows begin at the smallest offset. Each row has its ids from its own offset on, and id 0 elsewhere, whose
        vectors are left out. Rows at one offset have no such places.
        """
        batch, length = input_ids.shape
        # This lookup fails beyond the last position. A slice in the module would end there, without an error.
        positions = torch.arange(self._max_len)[offset.reshape(-1, 1) + torch.arange(length)]  # (B or 1, L)
        past_length = int(offset.min())
        span = int(offset.max() - offset.min() + length)
        for legal in (past_length >= 0, span >= 0, past_length + span <= self._max_len):
            torch._check(legal)  # type: ignore[no-untyped-call]
        columns = (positions - past_length).expand(batch, -1)
        ids = torch.zeros((batch, span), dtype=torch.int64).scatter(1, columns, input_ids)
        vectors: Tensor = self.module(ids, past_length).expand(batch, -1, -1)
        return vectors.gather(1, columns.unsqueeze(-1).expand(-1, -1, vectors.shape[-1]))


def _takes_number(module: nn.Module) -> bool:
    """Return whether the second argument of the module's `forward` is annotated as an int."""
    signature = inspect.signature(module.forward)
    try:
        given = signature.bind("input_ids", "offset").arguments
    except TypeError as error:
        expected = "forward(input_ids, offset) or forward(input_ids, past_length: int)"
        raise ValueError(f"module: got forward{signature}, expected {expected}") from error
    return any(
        value == "offset" and signature.parameters[name].annotation in (int, "int") for name, value in given.items()
    )
