"""Checks that the config of a front-end describes its vectors."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from preblock.models.modules.stems import from_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from preblock.models.frontend import FrontEnd
    from preblock.models.modules.stems import Stem

ROW_LENGTH = 64
"""Most tokens of a row to compare."""
CALL_VALUES = 2**22
"""Most values of the vectors compared at once, unless two rows have more."""
UNLIMITED_LENGTH = 2**10
"""End of the last positions to compare, without a limit."""


def check_described(frontend: "FrontEnd") -> None:
    """Compare the vectors of `frontend` with those of a front-end with its config and weights, for all ids.

    The config knows nothing of hooks, replaced parts and methods of a subclass. Nothing is compared if the weights are
    on the device meta, or of types without addition.

    Raises:
        ValueError: the weights or the vectors differ.

    """
    remedy = f"call {type(frontend).__name__} in a module with forward(input_ids, offset), and export that one"
    try:
        plain = frontend.from_tensors(frontend.config, frontend.state_dict()).eval()
    except RuntimeError as error:
        reason = " ".join(str(error).split()).partition(": ")[2]
        raise ValueError(f"module: got weights unlike those of its config: {reason}; {remedy}") from error
    if any(weight.is_meta for weight in frontend.parameters()):
        return
    modes = [(module, module.training) for module in frontend.modules()]
    frontend.eval()
    try:
        with torch.inference_mode():
            for ids, offset in _calls(plain):
                try:
                    expected = _outputs(plain, ids, offset)
                except RuntimeError:
                    return
                found = _outputs(frontend, ids, offset)
                for output, vectors in expected.items():
                    if not torch.equal(found[output].nan_to_num(), vectors.nan_to_num()):
                        raise ValueError(f"module: got {output} unlike those of its config and weights; {remedy}")
    finally:
        for module, training in modes:
            module.training = training


def check_stem(stem: "Stem") -> None:
    """Compare the vectors of `stem` (in evaluation mode) with those of a stem with its config and weights.

    Raises:
        ValueError: the weights or the vectors differ.

    """
    try:
        plain = from_tensors(stem.config, stem.state_dict()).eval()
    except RuntimeError as error:
        reason = " ".join(str(error).split()).partition(": ")[2]
        raise ValueError(f"module: got weights unlike those of its config: {reason}") from error
    signature = stem.signature
    sizes = (size if isinstance(size, int) else signature.image_size or 1 for size in signature.shape[1:])
    values = torch.randn((1, *sizes), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        if not torch.equal(stem(values).nan_to_num(), plain(values).nan_to_num()):
            raise ValueError("module: got embeddings unlike those of its config and weights")


def _calls(frontend: "FrontEnd") -> "Iterator[tuple[Tensor, Tensor]]":
    """Yield rows of all ids, at offsets from the first position to the last."""
    config, device = frontend.config, frontend.tokens.weight.device
    limit = min(config.max_len or UNLIMITED_LENGTH, frontend.signature.rotary_len or UNLIMITED_LENGTH)
    length = min(limit, ROW_LENGTH)
    batch = max(2, math.ceil(config.tokens.rows / length))
    ids = torch.arange(batch * length, device=device).reshape(batch, length) % config.tokens.rows
    offset = torch.linspace(0, limit - length, batch, device=device).long()
    rows = max(2, CALL_VALUES // (length * max(config.widths)))
    yield from zip(torch.split(ids, rows), torch.split(offset, rows), strict=True)


def _outputs(frontend: "FrontEnd", ids: "Tensor", offset: "Tensor") -> "dict[str, Tensor]":
    config = frontend.config
    needed = {name: torch.zeros_like(ids) for name in config.needed}
    mask = ids.ne(ids[-1, -1]).long() if config.needs_mask else None
    outputs = {
        "embeddings": frontend(ids, offset, attention_mask=mask, indices=needed),
        "token_embeddings": frontend.look_up(ids),
        **frontend.rotary_outputs(ids, offset),
    }
    if not ids[0, 0]:  # the first rows alone: these outputs are wide
        outputs |= frontend.per_layer_outputs(ids) | frontend.ngram_outputs(ids)
    return outputs
