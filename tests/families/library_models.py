"""Tiny random models of every family, made, saved and run by transformers: the oracle."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import CONFIG_MAPPING

from tests.families import gemma3n
from tests.families.published_models import GEMMA4, PUBLISHED, VISION_LANGUAGE, WIDTH

NO_LOOKUP = {
    "xlm",
    "clip_text_model",
    "clip/text",
    "speech_to_text/decoder",
    "gemma3n_text",
    "gemma3n/text",
    "gemma4/text",
    "gemma4_unified/text",
}
"""Models without `inputs_embeds`, or with further inputs beside them."""
STREAMS = {"qwen4_exp_text", "qwen4_exp/text"}
"""Models with several residual streams, side by side, equal at first."""
SIDES = {"clip/text": "text_model", "qwen4_exp/text": "language_model"}
"""Sides with a module of another name."""
WHOLE = {"gemma3n/text", *(f"{name}/text" for name in GEMMA4), *(f"{name}/text" for name in VISION_LANGUAGE)}
"""Models of several inputs that run on token ids alone."""


def model_class(name: str) -> Any:
    """Return the class of a family's tiny model."""
    return gemma3n.Gemma3nModel if name == "gemma3n/text" else getattr(transformers, PUBLISHED[name].model)


def config_class(name: str) -> Any:
    """Return the configuration of a family's tiny model; several types may share a class of models."""
    kind, own = model_class(name).config_class, CONFIG_MAPPING[name.partition("/")[0]]
    return kind if issubclass(kind, own) else own


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a tiny model of the family with random weights: zeros would hide omissions.

    Tables of sines and cosines stay unchanged.
    """
    published = PUBLISHED[name]
    torch.manual_seed(0)
    model = model_class(name)(config_class(name)(**published.config))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key != published.rotary:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    model.to(dtype).save_pretrained(folder)


def in_our_form(found: Any) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (1, L, R) in our form: the values of the R/2 pairs, twice over.

    The library has that form, or each value twice in neighbouring columns, or once, or complex numbers of both.
    """
    cos, sin = (found.real, found.imag) if isinstance(found, Tensor) else (_pairs(part) for part in found)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def _pairs(values: Tensor) -> Tensor:
    half = values.shape[-1] // 2
    if torch.equal(values[..., :half], values[..., half:]):
        return values[..., :half]
    return values[..., 0::2] if torch.equal(values[..., 0::2], values[..., 1::2]) else values


@dataclass(frozen=True)
class TransformersModel:
    """A published model, or the side of it with the front-end."""

    name: str
    whole: Any

    @classmethod
    def load(cls, name: str, folder: Path) -> "TransformersModel":
        """Load a model written by `save`."""
        config = config_class(name).from_pretrained(folder)
        return cls(name, model_class(name).from_pretrained(folder, config=config).eval())

    def first_block_input(
        self,
        input_ids: NDArray[np.int64] | None,
        attention_mask: NDArray[np.int64] | None = None,
        **inputs: NDArray[Any],
    ) -> NDArray[np.float32]:
        """Return the input of the first block, from a forward hook; `inputs` may have `inputs_embeds` or indices."""
        with self.first_block_inputs() as seen:
            self._run(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        first = seen[0][0] if seen[0].ndim == 4 else seen[0]  # the first of several streams
        first = first[..., :WIDTH] if self.name in STREAMS else first
        vectors: NDArray[np.float32] = (first.transpose(0, 1) if self.name == "xlnet" else first).float().numpy()
        return vectors

    def _first_block(self) -> Any:
        try:
            return self.whole.get_submodule(PUBLISHED[self.name].block)
        except AttributeError as error:
            place = "tests/families/published_models.py names its first block"
            raise LookupError(f"the tiny model of {self.name}: {error}; {place}") from error

    @contextmanager
    def first_block_inputs(self) -> Iterator[list[Tensor]]:
        """Collect the inputs of the first block."""
        seen: list[Tensor] = []

        def hook(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            seen.append(arguments[0] if arguments else keywords["hidden_states"])

        block = self._first_block()
        handle = block.register_forward_pre_hook(hook, with_kwargs=True)
        yield seen
        handle.remove()

    def rotary(self, input_ids: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        """Return the cosines and sines (1, L, R) of attention, by the names and in the form of our outputs."""
        length, place = input_ids.shape[1], self.whole.get_submodule("")
        for part in PUBLISHED[self.name].rotary.split("."):
            place = getattr(place, part)
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        if place is None:
            return {}
        if isinstance(place, Tensor):
            sin, cos = place[None, :length].chunk(2, dim=-1)
            seen[""] = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        else:

            def hook(_: Any, arguments: tuple[Any, ...], output: Any) -> None:
                seen[arguments[2] if len(arguments) > 2 else ""] = output

            handle = place.register_forward_hook(hook)
            self._run(input_ids=input_ids)
            handle.remove()
        return {
            f"rotary_{part}{'_' * bool(name)}{name}": tensor.detach().numpy()
            for name, found in seen.items()
            for part, tensor in zip(("cos", "sin"), in_our_form(found), strict=True)
        }

    def _run(self, **inputs: NDArray[Any] | None) -> Any:
        given = {name: torch.from_numpy(array) for name, array in inputs.items() if array is not None}
        side = "" if self.name in WHOLE else self.name.partition("/")[2]
        if side == "decoder":
            given["encoder_hidden_states"] = torch.zeros(
                len(next(iter(given.values()))), 3, WIDTH, dtype=self.whole.dtype
            )
        with torch.inference_mode():
            return (self.whole.get_submodule(SIDES.get(self.name, side)) if side else self.whole)(**given)
