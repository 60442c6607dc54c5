"""Messages of rejected arguments and files."""

from collections.abc import Callable
from typing import Any


def rejection(kind: type[Exception], call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Return the message of the error of this kind that a call raises; "no error" if it raises none."""
    try:
        call(*arguments, **named)
    except kind as error:
        return str(error)
    return "no error"
