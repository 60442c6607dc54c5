"""The sizes of per-layer inputs. Imports no torch.

Letters: D model width, V vocabulary, N layers, P width of an input of a layer.
"""

from dataclasses import dataclass

from preblock.models.serialization import Count, Epsilon, Keys, check_fields

TOKEN_INPUTS, INPUTS = "per_layer_token_inputs", "per_layer_inputs"
"""Names of the outputs: the token part, and the combined form."""


@dataclass(frozen=True, kw_only=True)
class PerLayerConfig:
    """The sizes of per-layer inputs.

    Args:
        layers: N.
        width: P.
        rows: rows of the table, V at most; ids beyond it take row 0.
        eps: of the norm.
        weights: names of the tensors in a checkpoint: table (rows, N * P), projection (N * P, D), norm (P,).

    """

    layers: Count
    width: Count
    rows: Count
    eps: Epsilon
    weights: tuple[Keys, Keys, Keys] = ((), (), ())

    def __post_init__(self) -> None:
        check_fields(self, "per_layer.")
