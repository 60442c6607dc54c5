"""Checks that the config of a front-end describes its vectors."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from preblock.models.frontend import FrontEnd

SAMPLE_LENGTH = 8
"""Most tokens of the rows to compare."""
UNLIMITED_LENGTH = 2**10
"""End of the last positions to compare, without a limit."""


def check_described(frontend: "FrontEnd") -> None:
    """Compare the vectors of `frontend` with those of a front-end with its config and weights.

    The config knows nothing of hooks, replaced parts and methods of a subclass.

    Raises:
        ValueError: the weights or the vectors differ.

    """
    name, training = type(frontend).__name__, frontend.training
    remedy = f"call {name} in a module with forward(input_ids, offset), and give that module to export_module"
    try:
        plain = frontend.from_tensors(frontend.config, frontend.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split()).partition(": ")[2]
        raise ValueError(f"module: got weights that do not fit its config: {reason}; {remedy}") from error
    if any(weight.is_meta for weight in frontend.parameters()):
        return
    frontend.eval()
    try:
        with torch.inference_mode():
            found, expected = _sample(frontend), _sample(plain.eval())
    finally:
        frontend.train(training)
    for output, vectors in expected.items():
        if not torch.equal(found[output].nan_to_num(), vectors.nan_to_num()):
            raise ValueError(f"module: got {output} that differ from those of its config and weights; {remedy}")


def _sample(frontend: "FrontEnd") -> "dict[str, Tensor]":
    """Return all outputs for rows at the first and the last positions."""
    config, device = frontend.config, frontend.tokens.weight.device
    limit = min(config.max_len or UNLIMITED_LENGTH, frontend.signature.rotary_len or UNLIMITED_LENGTH)
    length = min(limit, SAMPLE_LENGTH)
    ids = torch.arange(2 * length, device=device).reshape(2, length) % config.tokens.rows
    offset = torch.tensor([0, limit - length], device=device)
    needed = {name: torch.zeros_like(ids) for name in config.needed}
    mask = ids.ne(ids[-1, -1]).long() if config.needs_mask else None
    return {
        "embeddings": frontend(ids, offset, attention_mask=mask, indices=needed),
        "token_embeddings": frontend.look_up(ids),
        **frontend.per_layer_outputs(ids),
        **frontend.ngram_outputs(ids),
        **frontend.rotary_outputs(ids, offset),
    }
