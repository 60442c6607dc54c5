"""N-gram embeddings: rows of large tables, chosen by the last tokens, for some layers of a model (Qwen4).

Letters: B batch, L length, N layers, n largest number of tokens of an n-gram, H heads of a layer, E width of a layer.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from preblock.models.modules.derived_buffer import DerivedBuffers
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.tokens import TokenEmbedding


class NgramEmbeddings(DerivedBuffers):
    """The n-gram embeddings of all layers of a token.

    A head hashes the last 2 to n ids: the exclusive or of each id times its factor, modulo the rows of the head.
    Ids before the last end of sequence count as that end.

    Args:
        config: sizes and hash.
        vocab_size: V, of the token ids.

    """

    factors: Tensor
    rows: Tensor
    begins: Tensor

    def __init__(self, config: NgramConfig, vocab_size: int) -> None:
        rows = np.array(config.head_rows)
        begins, shape = rows.cumsum(1) - rows, (len(config.layers), config.history, config.heads)
        derived = {
            "factors": config.multipliers(vocab_size),
            "rows": rows.reshape(shape),
            "begins": begins.reshape(shape),
        }
        super().__init__(**{name: partial(np.array, values) for name, values in derived.items()})
        self.config = config
        width = config.width // config.heads_of_layer
        stored = () if config.referenced else config.table_rows
        self.tables = nn.ModuleList(TokenEmbedding(rows, width) for rows in stored)

    def row_ids(self, input_ids: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the row of each head in the table of its layer, int64 (B, L, N, H).

        Args:
            input_ids: int64 (B, L).
            context: int64 (B, n - 1), ids before each row, the last one last; default: the reset id, as in a new row.

        """
        shifted, reset = [input_ids], self.config.reset_id
        length, history = input_ids.shape[1], self.config.history
        if context is None:
            context = torch.full((input_ids.shape[0], history), reset, device=input_ids.device)
        ids = torch.cat((context, input_ids), dim=1)
        for shift in range(1, history + 1):
            begin = history - shift
            earlier = ids[:, begin : begin + length]
            shifted.append(torch.where(shifted[-1] == reset, reset, earlier) if shift > 1 else earlier)
        layers = []
        for factors, rows, begins in zip(self.factors, self.rows, self.begins, strict=True):
            mixed, heads = shifted[0] * factors[0], []
            for place, earlier in enumerate(shifted[1:]):
                mixed = torch.bitwise_xor(mixed, earlier * factors[place + 1])
                heads.append(torch.remainder(mixed.unsqueeze(-1), rows[place]) + begins[place])
            layers.append(torch.cat(heads, dim=-1))
        return torch.stack(layers, dim=2)

    def look_up(self, row_ids: Tensor) -> Tensor:
        """Return the embeddings, float32 (B, L, N, E), of the rows int64 (B, L, N, H)."""
        shape = (*row_ids.shape[:2], self.config.width)
        vectors = [table(row_ids[:, :, layer].flatten(1, 2)).reshape(shape) for layer, table in enumerate(self.tables)]
        return torch.stack(vectors, dim=2)

    def forward(self, input_ids: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the embeddings, float32 (B, L, N, E); the arguments are those of `row_ids`."""
        return self.look_up(self.row_ids(input_ids, context))
