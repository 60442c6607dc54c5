"""A custom module as a front-end.

Letters: B batch, L length, D output width, M maximum length.
"""

import inspect

import torch
from torch import Tensor, nn

from preblock.models.config import MAX_TABLE_ROWS, check_size
from preblock.models.modules.signature import Signature

ALONE_LENGTH = 64
"""Most tokens of the rows to compare with calls of one token."""
ROW_LENGTH = 512
"""Most tokens of the rows to compare with calls of one token for each row."""
COMPARED_IDS = 2**16
"""Most ids in these rows. Of a larger vocabulary, they are the first and the last: special tokens are there."""
CALL_VALUES = 2**24
"""Most values returned by a call of several rows, unless two rows have more."""
NUMBERS = (int, int | None, "int", "int | None", "Optional[int]")
"""Annotations of an argument that takes one number for all rows."""
OTHER_INPUTS = ("_ids", "mask", "embeds", "segments", "positions")
"""Endings of the names of inputs other than an offset."""
ALLOWED_SHARE = 2.0**-10
"""Allowed difference between the two, as a share of the largest value: sums may have another order."""


class CustomFrontEnd(nn.Module):
    """A user's own module as a front-end.

    Args:
        module: in evaluation mode, with `forward(input_ids, offset)`: int64 `input_ids` (B, L) and `offset` (1,) or
            (B,), the number of tokens already fed; or `forward(input_ids, past_length: int)` with one number for all
            rows. The second must not have the name of another input, such as `token_type_ids`. Returns
            float32 (B, L, D). A vector must depend on its own id and position alone. Put checks on values under
            `if not torch.compiler.is_exporting()`, because the exporter cannot trace them.
        vocab_size: legal ids are 0 to V - 1.
        max_len: M, the largest legal offset + L; at most 2^24.
        exact: whether the graph must equal the module bit for bit; default False, for norms, projections, other sums.

    Raises:
        ValueError: the module does not return float32 vectors (B, L, D), takes other arguments, mixes tokens, or
            returns other vectors in a second call; or it fails for the last id or position.

    """

    def __init__(self, module: nn.Module, vocab_size: int, max_len: int, exact: bool = False) -> None:
        super().__init__()
        vocab_size, self._max_len = check_size("vocab_size", vocab_size), check_size("max_len", max_len)
        if self._max_len > MAX_TABLE_ROWS:  # the proof runs all positions
            raise ValueError(f"max_len: got {max_len}, expected at most {MAX_TABLE_ROWS}, for a custom module")
        self.module = module
        self.row_offsets = False
        """Whether `forward` gives the module one offset for each row, also if it receives one for all."""
        self._takes_number = _takes_number(module)
        sample = self._call("module", [[0]])
        self._call("vocab_size", [[vocab_size - 1]])
        self._call("max_len", [[0]], self._max_len - 1)
        if sample.device.type != "cpu":
            raise ValueError(f"module: got vectors on the device {sample.device}, expected cpu; module.cpu() moves it")
        self._check_alone(vocab_size)
        self._check_rows(vocab_size, sample.shape[-1])
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
            vectors = self.module(input_ids, offset.expand(input_ids.shape[0]) if self.row_offsets else offset)
        elif torch.compiler.is_exporting():
            vectors = self._traced(input_ids, offset)
        elif len(offset) == 1:
            vectors = self.module(input_ids, int(offset))
        else:
            rows = zip(input_ids, offset.tolist(), strict=True)
            vectors = torch.cat([self.module(ids.unsqueeze(0), past_length) for ids, past_length in rows])
        return vectors

    def _call(self, cause: str, ids: list[list[int]] | Tensor, *positions: int) -> Tensor:
        """Return the vectors (B, L, D) of `ids` (B, L); raise ValueError, naming `cause`, if the module fails.

        `positions` are the offset of all rows, default 0, or one offset for each row.
        """
        ids, apart = torch.as_tensor(ids), len(positions) > 1
        try:
            with torch.inference_mode():
                vectors: Tensor = self(ids, torch.tensor(positions or (0,)))
        except Exception as error:  # a module may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if (isinstance(error, TypeError) or apart) and not self._takes_number:
                reason += "; annotate the second argument as int if it takes one number for all rows"
            row = f"id {int(ids[0, 0])}" if ids.shape[1] == 1 else f"{ids.shape[1]} ids"
            place = f"{len(ids)} rows, each at its own offset" if apart else f"{row} at position {sum(positions)}"
            raise ValueError(f"{cause}: the module fails for {place}: {reason}") from error
        shape, is_tensor = tuple(ids.shape), isinstance(vectors, Tensor)
        if not is_tensor or vectors.dtype != torch.float32 or vectors.shape[:-1] != shape or not vectors.numel():
            got = f"{vectors.dtype} {tuple(vectors.shape)}" if is_tensor else type(vectors).__name__
            given = f"ids {shape} and offsets ({len(ids)},)" if apart else f"ids {shape}"
            raise ValueError(f"module: got {got} for {given}, expected torch.float32 ({shape[0]}, {shape[1]}, D)")
        return vectors

    def _check_alone(self, vocab_size: int) -> None:
        """Compare the vectors of two rows with a second call, and with calls of one token.

        A stream and a ragged batch run tokens apart.
        """
        length = min(self._max_len, ALONE_LENGTH)
        ids = torch.stack((torch.arange(length), torch.arange(length) + 1)) % vocab_size
        rows = self._call("module", ids)
        if not torch.equal(rows.nan_to_num(), self._call("module", ids).nan_to_num()):
            raise ValueError(
                f"module: got other vectors in a second call with the same {length} ids, expected the same vectors; "
                "is there dropout in forward?"
            )
        columns = [
            torch.cat([self._call("module", [[token]], place) for token in column])
            for place, column in enumerate(ids.T.tolist())
        ]
        alone = torch.cat(columns, 1)
        _compare(rows, alone)
        apart = self._call("module", ids.reshape(-1, 1), *range(length), *range(length)).reshape(alone.shape)
        if (error := float((apart - alone).abs().max())) > ALLOWED_SHARE * float(alone.abs().max()):
            raise ValueError(
                f"module: got vectors that differ by {error:.3g} from those of the tokens alone in a call with an "
                "offset for each row, expected each row at its own offset; does forward read the first offset alone? "
                "Annotate the argument as int if it takes one number"
            )

    def _check_rows(self, vocab_size: int, width: int) -> None:
        """Compare the vectors of all ids in long rows with those of rows of one token."""
        length, count = min(self._max_len, ROW_LENGTH), min(vocab_size, COMPARED_IDS)
        tokens = torch.cat((torch.arange(count - count // 2), torch.arange(vocab_size - count // 2, vocab_size)))
        begins = torch.arange(0, count, max(1, length - 1))  # each row begins with the last token of the row before
        for part in torch.split(begins, max(2, CALL_VALUES // (length * width))):
            ids = tokens[(part.unsqueeze(1) + torch.arange(length)) % count]
            columns = [
                # in reverse order: a vector that depends on the rows before differs
                self._call("module", ids[:, place : place + 1].flip(0), place).flip(0)
                for place in range(length)
            ]
            _compare(self._call("module", ids), torch.cat(columns, 1))

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


def _compare(rows: Tensor, alone: Tensor) -> None:
    """Raise ValueError if a vector of `rows` differs from that of its token alone."""
    errors = (rows - alone).abs().amax(-1)
    if (error := float(errors.max())) > ALLOWED_SHARE * float(rows.abs().max()):
        place = int(errors.argmax()) % rows.shape[1]
        raise ValueError(
            f"module: got a vector at position {place} of a row of {rows.shape[1]} tokens that differs by {error:.3g} "
            "from that of the token alone, expected vectors that depend on their own id and position; "
            "does forward add its second argument, the offset, to the positions?"
        )


def _takes_number(module: nn.Module) -> bool:
    """Return whether the second argument of the module's `forward` is annotated as an int.

    Raises:
        ValueError: `forward` takes other arguments, or the second has the name of another input.

    """
    signature = inspect.signature(module.forward)
    try:
        given = signature.bind("input_ids", "offset").arguments
    except TypeError as error:
        expected = "forward(input_ids, offset) or forward(input_ids, past_length: int)"
        raise ValueError(f"module: got forward{signature}, expected {expected}") from error
    second = next((name for name, value in given.items() if value == "offset"), "*")
    if second.endswith(OTHER_INPUTS):
        raise ValueError(
            f"module: got forward{signature}, whose second argument would receive the offset, not {second}; expected "
            "forward(input_ids, offset) or forward(input_ids, past_length: int)"
        )
    return second in signature.parameters and signature.parameters[second].annotation in NUMBERS
