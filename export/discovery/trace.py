"""The operations of a forward pass, recorded as a graph of values."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a forward pass, and its operation.

    Args:
        operation: name of the torch operation, without its overload; "input", "tensor" or "constant" for a tensor
            that none made.
        arguments: `Value`s and plain arguments of the operation, in order.
        tensor: the tensor itself.
        name: name of an input, or of a parameter or buffer.

    """

    operation: str
    arguments: tuple[Any, ...]
    tensor: Tensor
    name: str = ""

    def sources(self) -> Iterator["Value"]:
        """Yield the inputs of the operation."""
        return (argument for argument in self.arguments if isinstance(argument, Value))

    def leaves(self, ends: Set[str] = frozenset()) -> set[str]:
        """Return the names of all inputs, parameters and buffers behind the value, none behind operations `ends`."""
        found, seen, waiting = set[str](), set[int](), [self]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if value.name:
                found.add(value.name)
            if value.operation not in ends:
                waiting.extend(value.sources())
        return found


class Recorder(TorchDispatchMode):
    """Records every torch operation inside its context.

    Args:
        inputs: tensors given to the model, by name.
        tensors: parameters and buffers, by name.

    """

    def __init__(self, inputs: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = [*(("tensor", *item) for item in tensors.items()), *(("input", *item) for item in inputs.items())]
        # A value keeps its tensor alive, so that no other tensor gets the same id.
        self._values = {id(tensor): Value(kind, (), tensor, name) for kind, name, tensor in reversed(named)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        arguments = tuple(self._wrap(argument) for argument in (*args, *(kwargs or {}).values()))
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].removesuffix("_")
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._values[id(tensor)] = Value(name, arguments, tensor)
        return result

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value of a tensor; a constant if no recorded operation made it."""
        return self._values.setdefault(id(tensor), Value("constant", (), tensor))

    def _wrap(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            parts = [self._wrap(part) for part in argument]
            values = [part for part in parts if isinstance(part, Value)]
            if not values:
                return argument
            return values[0] if len(parts) == 1 else Value("list", tuple(parts), values[0].tensor)
        return self.value_of(argument) if isinstance(argument, Tensor) else argument


class WriteWatch(TorchDispatchMode):
    """Notes each given tensor written by an operation inside its context, also through a view or `.data`.

    Args:
        tensors: the tensors, by name.

    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, set[str]] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                self._names.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
        self.written: set[str] = set()
        """Names of the written tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation, and note its written tensors."""
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            target = given.get(argument.name)
            if isinstance(target, Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                self.written |= self._names.get(target.untyped_storage().data_ptr(), set())
        return func(*args, **(kwargs or {}))
