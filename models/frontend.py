"""The general front-end: from token ids to the vectors entering block 0.

Letters: B batch, L length, D model width, V vocabulary, M maximum length, R rotary width.
"""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor, nn

from preblock.models.config import FrontEndConfig
from preblock.models.config_check import check_described
from preblock.models.frontend_data import FrontEndData
from preblock.models.frontend_file import write_frontend
from preblock.models.modules.grid import FactorisedCells
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.indices import check_indices
from preblock.models.modules.initialisers import DEFAULT_STD, Initialiser
from preblock.models.modules.ngram_config import NGRAMS, ROW_IDS
from preblock.models.modules.ngrams import NgramEmbeddings
from preblock.models.modules.per_layer import PerLayerInputs
from preblock.models.modules.per_layer_config import INPUTS, TOKEN_INPUTS
from preblock.models.modules.positions import (
    FixedPositionalEncoding,
    LearnedPositionalEncoding,
    SinusoidalPositionalEncoding,
    check_position_ids,
    positions_of,
)
from preblock.models.modules.rotary_embedding import RotaryEmbedding
from preblock.models.modules.signature import Signature
from preblock.models.modules.tokens import TokenEmbedding
from preblock.models.step_modules import Bias, build_bias, build_module
from preblock.models.steps import (
    Levels,
    Mask,
    Norm,
    Positions,
    Project,
    RmsNorm,
    Scale,
    Segments,
    Step,
    Tokens,
    Weights,
    indexed,
    names_of,
)
from preblock.models.torch_arrays import array_of, tensor_of


class FrontEnd(nn.Module):
    """The steps of a config as a module, with dropout once, after the last.

    Each step with a module is an attribute: `tokens`, `segments`, `positions`, `norm`, ... The pairwise bias of
    attention, if the config has one, is `bias`; no vector depends on it.

    Args:
        config: the steps, their sizes, and dropout.
        init: initial values of the learned tables, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: a size or `init` is not allowed.

    """

    tokens: TokenEmbedding
    segments: TokenEmbedding
    levels: nn.ModuleDict
    positions: (
        LearnedPositionalEncoding
        | SinusoidalPositionalEncoding
        | FixedPositionalEncoding
        | HybridPositionalEncoding
        | FactorisedCells
    )
    norm: nn.LayerNorm
    rms_norm: nn.RMSNorm
    project: nn.Linear
    bias: Bias
    per_layer: PerLayerInputs
    ngrams: NgramEmbeddings

    def __init__(self, config: FrontEndConfig, init: Initialiser = "normal", std: float = DEFAULT_STD) -> None:
        super().__init__()
        self.config = config
        for name, step, width in zip(names_of(config.steps), config.steps, (0, *config.widths), strict=False):
            module = build_module(step, width, config, init, std)
            if module is not None:
                self.add_module(name, module)
        if config.bias is not None:
            self.bias = build_bias(config.bias)
        if config.per_layer is not None:
            self.per_layer = PerLayerInputs(config.per_layer, config.widths[config.lookup - 1], config.tokens.rows)
        if config.ngrams is not None:
            self.ngrams = NgramEmbeddings(config.ngrams, config.tokens.rows)
        for output in config.rotary:
            self.add_module(output.named("rotary"), RotaryEmbedding(output.config))
        self.dropout = nn.Dropout(config.dropout)
        self._arithmetic: torch.dtype = getattr(torch, config.arithmetic)

    @staticmethod
    def from_tensors(config: FrontEndConfig, tensors: Mapping[str, Tensor]) -> "FrontEnd":
        """Build a front-end around `tensors`, named as in `state_dict()`, without a second copy of them.

        Raises:
            RuntimeError: a tensor is missing, of another shape, or not of this front-end.

        """
        with torch.device("meta"):
            module = FrontEnd(config)
        module.load_state_dict(dict(tensors), strict=True, assign=True)
        return module

    @staticmethod
    def from_data(data: FrontEndData) -> "FrontEnd":
        """Build the front-end of `data`. It shares the memory of all arrays, except of read-only ones.

        Raises:
            RuntimeError: as `from_tensors`.

        """
        return FrontEnd.from_tensors(data.config, {name: tensor_of(array) for name, array in data.tensors.items()})

    def data(self) -> FrontEndData:
        """Return the config, and the weights as arrays. They share the memory of weights on the CPU.

        Raises:
            ValueError: a weight is on the device meta, or of a type without an array.

        """
        return FrontEndData(self.config, {name: array_of(name, tensor) for name, tensor in self.state_dict().items()})

    def forward(
        self,
        input_ids: Tensor,
        offset: int | Tensor = 0,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        indices: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the vectors (B, L, D) entering block 0.

        Args:
            input_ids: int64 (B, L).
            offset: real tokens already fed (`past_length` in GPT-2): an int, or int64 (1,) or (B,); default 0.
            token_type_ids: int64 (B, L), segment of each token; default all 0.
            attention_mask: int64 (B, L), 1 for a real token, of the tokens given; default all 1. Only for
                front-ends with a use for it.
            position_ids: int64 (1 or B, L), position index of each token; excludes `offset`.
            indices: further indices of each token, by the names in `config.indices`: int64 (1 or B, L). Missing
                ones are all 0, except the required `config.needed`. Segments are here or in `token_type_ids`.

        Raises:
            ValueError: a position or an index is not allowed, or the front-end does not support an index or a mask.

        """
        given = dict(indices or {})
        if token_type_ids is not None:
            if "token_type_ids" in given:
                raise ValueError("token_type_ids is given twice: also in indices")
            given["token_type_ids"] = token_type_ids
        return self.run(self.config.steps, input_ids, offset, given, attention_mask, position_ids)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        config = self.config
        sizes = f"vocab_size={config.tokens.rows}, d_model={config.widths[-1]}, max_len={config.max_len}"
        return f"family={config.family!r}, {sizes}"

    @property
    def signature(self) -> Signature:
        """The inputs, sizes and promises of its graph."""
        return self.config.signature

    def save_frontend(self, path: str | Path) -> None:
        """Write `frontend.toml` and `model.safetensors` into the folder `path`: a source of `preblock export`.

        An earlier save there is replaced. The artifact computes in float32, for weights of any type.

        Raises:
            ValueError: a weight is not float32, float16 or bfloat16, attention has a bias, the vectors are not those of
                the config, or the folder holds another checkpoint.
            OSError: the disk refuses.

        """
        check_described(self)
        write_frontend(Path(path), self.data())

    def look_up(self, input_ids: Tensor, scaled: bool = True) -> Tensor:
        """Return the model's own lookup of `input_ids` (B, L), known as `inputs_embeds`.

        With `scaled` false, return the rows of the token table, for consumers that apply the embedding scale.
        """
        return self.run(self.config.steps[: self.config.lookup if scaled else 1], input_ids)

    def per_layer_outputs(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the inputs of all layers by name, float32 (B, L, layers, width) and (B, L, layers * width); or {}."""
        if self.config.per_layer is None:
            return {}
        combined = self.per_layer(input_ids, self.look_up(input_ids))
        return {TOKEN_INPUTS: self.per_layer.look_up(input_ids), INPUTS: combined}

    def ngram_outputs(self, input_ids: Tensor, context: Tensor | None = None) -> dict[str, Tensor]:
        """Return row ids int64 (B, L, layers, heads) and, with tables, embeddings (B, L, layers, width) by name."""
        if self.config.ngrams is None:
            return {}
        row_ids = self.ngrams.row_ids(input_ids, context)
        return {ROW_IDS: row_ids} | ({} if self.config.ngrams.referenced else {NGRAMS: self.ngrams.look_up(row_ids)})

    def rotary_outputs(self, input_ids: Tensor, offset: int | Tensor = 0, *, rounded: bool = True) -> dict[str, Tensor]:
        """Return cosines and sines by name, (1 or B, L, R) for `rotate` or of another form; without any, {}.

        Args:
            input_ids: int64 (B, L), used for its shape alone.
            offset: tokens already fed: an int, or int64 (1,) or (B,); default 0. One number gives one row for all.
            rounded: whether the outputs are in their own dtype; if false, all are float32. Default True.

        Raises:
            ValueError: a position is negative, or beyond the length of the angles.

        """
        outputs: dict[str, Tensor] = {}
        for output in self.config.rotary:
            cos, sin = self.get_submodule(output.named("rotary"))(input_ids, offset=offset)
            dtype = getattr(torch, output.dtype) if rounded else torch.float32
            parts = [part if output.form == "full" else part[..., : output.config.dim // 2] for part in (cos, sin)]
            parts = [torch.cat(parts, dim=-1)] if output.form == "fused" else parts  # one part for the first name
            outputs |= {name: part.to(dtype) for name, part in zip(output.names, parts, strict=False)}
        return outputs

    def run(
        self,
        steps: tuple[Step, ...],
        input_ids: Tensor,
        offset: int | Tensor = 0,
        indices: Mapping[str, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the first steps only, as `forward` runs all of them; dropout follows the last."""
        given = indices or {}
        check_indices(self.config.family, self.config.indices, input_ids, given)
        for part in indexed(steps):
            if part.needed and part.input not in given:
                raise ValueError(f"{part.input} is missing: expected one for each token")
        if attention_mask is not None and not self.config.needs_mask:
            text = f"the front-end {self.config.family!r} does not use one; pass position_ids"
            raise ValueError(f"attention_mask: {text}")
        x = input_ids
        for name, step in zip(names_of(steps), steps, strict=True):
            match step:
                case Tokens() | Norm() | RmsNorm() | Project():
                    x = self.get_submodule(name)(x)
                case Scale():
                    x = x * (float(torch.tensor(step.by, dtype=self._arithmetic)) if step.cast else step.by)
                case Weights():
                    x = x * self.get_submodule(name)(input_ids)
                case Segments():
                    x = x + self._look_up_index(step, name, input_ids, given)
                case Levels():
                    levels = (
                        self._look_up_index(level, f"{name}.{place}", input_ids, given)
                        for place, level in enumerate(step.levels)
                    )
                    x = x + reduce(torch.add, levels)
                case Positions():
                    rows = self._rows(step, input_ids, offset, attention_mask, position_ids)
                    x = self.get_submodule(name)(x, position_ids=rows)
                case Mask():
                    x = x if attention_mask is None else x * attention_mask.unsqueeze(-1).to(x.dtype)
            x = self._round(x)
        vectors: Tensor = self.dropout(x) if len(steps) == len(self.config.steps) else x
        return vectors

    def _round(self, x: Tensor) -> Tensor:
        return x if self._arithmetic == torch.float32 else x.to(self._arithmetic).to(torch.float32)

    def _look_up_index(self, step: Segments, name: str, input_ids: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors (1 or B, L, width) of the index of `step`; the module `name` is its table."""
        table = self.tokens if step.table == "tokens" else self.get_submodule(name)
        vectors: Tensor = table(given.get(step.input, torch.zeros_like(input_ids)))
        return vectors if step.by == 1 else self._round(vectors * step.by)

    def _rows(
        self,
        step: Positions,
        input_ids: Tensor,
        offset: int | Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Return the row in the position table of each token: int64 (1 or B, L)."""
        checked = not torch.compiler.is_exporting()
        if checked:
            check_position_ids(input_ids, position_ids, offset)
        if position_ids is not None or step.counts == "slots":
            index = positions_of(input_ids, position_ids, offset)
            if checked and (step.table != "exact" or step.grid):  # computed sinusoids have no end
                self._check_limit(index + 1, None if position_ids is not None else input_ids.shape[1])
            return index + step.first if step.first else index
        if step.counts == "mask":
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        else:
            real = input_ids.ne(self.config.padding_idx or 0).to(torch.int64)
        start = torch.as_tensor(offset, dtype=torch.int64, device=input_ids.device).reshape(-1, 1)
        count = (start + real.cumsum(1)) * real
        if checked:
            self._check_limit(count, None)
        return count + (step.first - 1)

    def _check_limit(self, counts: Tensor, length: int | None) -> None:
        """Compare the largest of `counts`, position index + 1, with the limit."""
        end, limit = int(counts.max()) if counts.numel() else 0, self.config.max_len
        if limit is not None and end > limit:
            got = f"position {end - 1}" if length is None else f"length {length} + offset {end - length} = {end}"
            raise ValueError(f"{got} exceeds the maximum length {limit}")
