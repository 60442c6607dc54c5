"""A library's model without the weights of its blocks, and its part for token ids."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from preblock.export.discovery.errors import DiscoveryError
from preblock.export.discovery.library import build_model, library_version
from preblock.export.discovery.trace import WriteWatch
from preblock.models.checkpoints.divided_tensors import find_parts
from preblock.models.checkpoints.weight_files import one_line

SIDES = ("encoder", "decoder")
ENCODED_LENGTH = 3
"""Length of the encoded sequence given to a decoder; no vector before block 0 depends on it."""


class BlockInput(NamedTuple):
    """The input of block 0: the name of the block's list, the vectors, and all other float tensors with their names.

    `takes_ids` says whether a parameter of the block holds the token ids.
    """

    block: str
    vectors: Tensor
    others: tuple[tuple[str, Tensor], ...] = ()
    takes_ids: bool = False


class CapturedInput(Exception):
    """Stops a forward pass at block 0, and carries the input of the block."""

    def __init__(self, given: BlockInput) -> None:
        super().__init__(given.block)
        self.given = given


class BlocklessModel:
    """A model of the library with its tensors outside the blocks, and none inside.

    A block is an element of a module list, with modules of its own. Tensors named in `keys` begin as zeros without
    memory, until `load` replaces them. The library computes all buffers and frozen tables missing from `keys`.

    Args:
        kind: class of the library.
        config: configuration of the library.
        side: "encoder" or "decoder" of an encoder-decoder, "text" of a model with other inputs too; else None.
        keys: names of the tensors in the checkpoint.

    Raises:
        DiscoveryError: the side does not fit, or the library cannot build the model.

    """

    def __init__(self, kind: type[nn.Module], config: Any, side: str | None, keys: Iterable[str]) -> None:
        check_side(config, side)
        self.config, self.side = config, side
        self.model = build_model(kind, config)
        self.part = find_part(self.model, config, side)
        """The module for the token ids; all of the model, if it runs on token ids alone."""
        self.text_config = config.get_text_config() if side == "text" else getattr(self.part, "config", config)
        self.inputs = inspect.signature(self.part.forward).parameters
        if "input_ids" not in self.inputs:
            raise DiscoveryError(
                f"{type(self.part).__name__} of {library_version()} takes no input_ids",
                "discovery finds front-ends of token ids alone; "
                "a model of images or sound needs a row of the stem table",
            )
        self.keys, self._unmatched = match_keys(self.model, keys)
        """Name of a parameter or buffer in the model -> its name in the checkpoint."""
        self.tensors: dict[str, Tensor] = {}
        """Parameters and buffers of the part outside its blocks, by their names in the model."""
        self.trained: set[str] = set()
        """Names of the trained ones among them."""
        self.transposed = False
        """Whether blocks take (L, B, width) in place of (B, L, width)."""
        self.columns_first = False
        """Whether blocks take (B, width, L)."""
        self.copies = 1
        """Copies of each vector at block 0, as (B, L, copies, width): the streams of hyper-connections."""
        self.altered: list[str] = []
        """Tensors of the checkpoint overwritten in part by the library's loader."""
        self._materialise()
        self._initialise()
        if side == "text" and self.part is not self.model:
            self._use_whole()

    def block_input(
        self, inputs: Mapping[str, Tensor], recording: AbstractContextManager[Any] | None = None
    ) -> BlockInput:
        """Run the part up to block 0, and return the input of the block.

        The pass runs in the context `recording`.

        Raises:
            DiscoveryError: the pass fails, or reaches no block.

        """
        blocks: list[Any] = []
        for name, module in self.part.named_modules():
            if isinstance(module, nn.ModuleList) and is_block_list(module):
                blocks.append(module[0])
                # No hook, because some models call the method itself.
                parameters = tuple(inspect.signature(blocks[-1].forward).parameters)
                blocks[-1].forward = _stop_at(name, parameters, inputs.get("input_ids"))
        given: dict[str, Any] = dict(inputs)
        if self.side == "decoder" and "encoder_hidden_states" in self.inputs:
            batch = len(next(iter(inputs.values())))
            given["encoder_hidden_states"] = torch.zeros(batch, ENCODED_LENGTH, self._width())
        if "use_cache" in self.inputs:
            given["use_cache"] = False
        try:
            with recording or nullcontext():
                self.part(**given)
        except CapturedInput as captured:
            return captured.given
        except Exception as error:  # whatever a model raises
            raise DiscoveryError(
                f"{type(self.part).__name__} of {library_version()} fails before block 0: "
                f"{type(error).__name__}: {one_line(error)[:200]}"
            ) from error
        finally:
            for block in blocks:
                vars(block).pop("forward", None)
        raise DiscoveryError(f"{type(self.part).__name__} of {library_version()} runs no list of blocks")

    def load(self, name: str, tensor: Tensor) -> None:
        """Let the parameter or buffer `name` hold `tensor`, without a copy.

        Raises:
            DiscoveryError: it is of another shape.

        """
        expected, found = tuple(self.tensors[name].shape), tuple(tensor.shape)
        if found != expected:
            raise DiscoveryError(f"tensor {self.keys[name]} has the shape {found}, config.json makes it {expected}")
        self.tensors[name].data = tensor

    def alter(self) -> None:
        """Overwrite the tensors in `altered` as the library does when it loads them."""
        for module in self._outside:
            module._is_hf_initialized = False
        self._initialise()

    def token_table(self) -> Tensor | None:
        """Return the table named by the library as the model's own; None if it names none."""
        table = getattr(self._embedding(), "weight", None)
        return table if isinstance(table, Tensor) else None

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the vectors of the library's embedding module for `ids` (B, L).

        Raises:
            DiscoveryError: the model has no such module, or it fails.

        """
        module = self._embedding()
        try:
            vectors: Tensor = module(ids)
        except Exception as error:  # whatever a module raises
            raise DiscoveryError(f"{library_version()} names no token table of the model: {one_line(error)}") from error
        return vectors

    def _embedding(self) -> Any:
        part: Any = self.part
        try:
            return part.get_input_embeddings()
        except (AttributeError, NotImplementedError, TypeError):
            return None

    def parts(self, name: str) -> list[str]:
        """Return the tensors of the checkpoint, unknown to the model, that belong to its parameter or buffer `name`.

        Those of tied ones count too, but not those of the head.
        """
        model: Any = self.model
        head, prefix = model.get_output_embeddings(), f"{model.base_model_prefix}."
        heads = {f"{path}.weight" for path, module in model.named_modules() if module is head}
        tied = {other for other, key in self.keys.items() if key == self.keys.get(name)} - heads
        names = {start + own.removeprefix(prefix) for own in {name} | tied for start in ("", prefix)}
        return sorted({self._unmatched[part] for own in names for part in find_parts(self._unmatched, own)})

    def unmatched(self) -> list[str]:
        """Return the names of the tensors of the checkpoint without a place in the model."""
        return sorted(self._unmatched.values())

    def missing(self) -> list[str]:
        """Return the trained parameters outside the blocks without a tensor in the checkpoint."""
        return [name for name, tensor in self.tensors.items() if tensor.device.type == "meta"]

    def _width(self) -> int:
        sizes = (getattr(self.text_config, key, None) for key in ("d_model", "hidden_size"))
        return next((size for size in sizes if isinstance(size, int)), 1)

    def _materialise(self) -> None:
        """Put the tensors outside the blocks on the CPU."""
        lists = {f"{name}." for name, module in self.model.named_modules() if is_block_list(module)}
        self._outside: list[Any] = []
        made: dict[str, Tensor] = {}
        for path, module in self.model.named_modules():
            if any(path.startswith(name) for name in lists):
                module._is_hf_initialized = True
                continue
            self._outside.append(module)
            for values in (module._parameters, module._buffers):
                for own, value in values.items():
                    if value is None:
                        continue
                    name = f"{path}.{own}" if path else own
                    if value.requires_grad:
                        self.trained.add(name)
                    key = self.keys.get(name)
                    if key is not None or not value.requires_grad:
                        zeros = _make_zeros(name, value)
                        new = nn.Parameter(zeros, requires_grad=False) if values is module._parameters else zeros
                        # The library's initialisers skip a tensor with this flag. They fill in tables of indices: with
                        # zeros, positions would have no rule.
                        loaded = key is not None and value.is_floating_point()
                        new._is_hf_initialized = loaded  # type: ignore[attr-defined]
                        values[own] = made.setdefault(key or name, new)
                    self.tensors[name] = values[own]

    def _initialise(self) -> None:
        """Let the library fill in derived tensors, and note changed tensors of the checkpoint."""
        model: Any = self.model
        loaded = (name for name in self.tensors.keys() & self.keys.keys() if self.tensors[name].is_floating_point())
        watch = WriteWatch({name: self.tensors[name] for name in loaded})
        try:
            with watch:
                model.initialize_weights()
        except Exception as error:  # whatever a model's initialiser raises
            raise DiscoveryError(f"{library_version()} cannot initialise the model: {one_line(error)}") from error
        self.altered = sorted(watch.written)

    def _use_whole(self) -> None:
        """Run the whole model, if it runs on token ids alone: it may replace some ids before its text part."""
        part, inputs = self.part, self.inputs
        self.part, self.inputs = self.model, inspect.signature(self.model.forward).parameters
        try:
            self.block_input({"input_ids": torch.zeros(1, 2, dtype=torch.int64)})
        except DiscoveryError:
            self.part, self.inputs = part, inputs


def _make_zeros(name: str, like: Tensor) -> Tensor:
    try:
        return torch.zeros(like.shape, dtype=like.dtype)
    except RuntimeError as error:
        raise DiscoveryError(f"config.json: {name} of shape {tuple(like.shape)} does not fit into memory") from error


def sides_of(config: Any) -> tuple[str, ...]:
    """Return the sides of a model: both of an encoder-decoder, "text" where other inputs exist, else none."""
    if config.is_encoder_decoder:
        return SIDES
    try:
        return () if config.get_text_config() is config else ("text",)
    except ValueError:
        return ("text",)


def check_side(config: Any, side: str | None) -> None:
    """Raise DiscoveryError unless the model has the side."""
    sides = sides_of(config)
    if side in sides or (side is None and not sides):
        return
    allowed = f"for {config.model_type!r}: {', '.join(sides)}" if sides else "only for models that have sides"
    raise DiscoveryError(f"--side: got {side!r}, expected {allowed}")


def match_keys(model: Any, keys: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the name in the checkpoint of each tensor of `model`, by the library's own rules of renaming.

    Tensors to be converted by arithmetic are left out. The second mapping has all other tensors of the checkpoint, by
    the names that the same rules give.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, str] = {}
    unmatched: dict[str, str] = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state and pattern is None:
            found.setdefault(name, key)
        else:
            unmatched[name] = key
    return _share_tied(found, model.all_tied_weights_keys), unmatched


def _share_tied(found: dict[str, str], tied: Mapping[str, str]) -> dict[str, str]:
    """Return `found` with the tensors that the library fills in from others, in its order.

    A source without a tensor takes the one of its first target that has one; then every target takes its source's.
    """
    found = dict(found)
    for target, source in tied.items():
        if target in found:
            found.setdefault(source, found[target])
    for target, source in tied.items():
        if source in found:
            found.setdefault(target, found[source])
    return found


def is_block_list(module: nn.Module) -> bool:
    """Return whether `module` is a list of blocks: its elements have modules of their own."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and any(True for _ in module[0].children())


def find_part(model: Any, config: Any, side: str | None) -> nn.Module:
    """Return the part of `model` for the token ids of a side; all of the model without a side."""
    if side in SIDES:
        part: nn.Module = getattr(model, side, None) or getattr(model, f"get_{side}")()
        return part
    if side == "text":
        text = config.get_text_config()
        for module in model.modules():
            own = getattr(module, "config", None)
            if own is text and module is not model and "input_ids" in inspect.signature(module.forward).parameters:
                return module  # type: ignore[no-any-return]
    whole: nn.Module = model
    return whole


def _stop_at(name: str, parameters: Sequence[str], ids: Tensor | None) -> Any:
    def stop(*arguments: Any, **keywords: Any) -> None:
        named = [*zip(chain(parameters, repeat("")), arguments, strict=False), *keywords.items()]
        tensors = [(own, tensor) for own, value in named for tensor in _float_tensors(value)]
        stated = keywords.get("hidden_states")
        vectors = stated if isinstance(stated, Tensor) else tensors[0][1]
        others = tuple(pair for pair in tensors if pair[1] is not vectors)
        # Further keywords of a call may go unread.
        takes_ids = ids is not None and any(value is ids for own, value in named if own in parameters)
        raise CapturedInput(BlockInput(name, vectors, others, takes_ids))

    return stop


def _float_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in `value`, and in the lists, tuples and mappings inside it."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _float_tensors(part)
