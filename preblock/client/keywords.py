"""Unknown keywords of the client's methods: a TypeError with a suggestion, as Python 3.13 has it."""

import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

MIN_SIMILARITY = 0.8
"""Least similarity of a misspelling to a keyword, from 0 to 1 for equal; for methods with further names."""


def checks_keywords(method: Callable[P, T]) -> Callable[P, T]:
    """Return `method` with a TypeError for each unknown keyword; `**indices` may have names unlike the keywords."""
    parameters = inspect.signature(method).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {parameter.name for parameter in parameters if parameter.kind in by_name and parameter.name != "self"}
    further = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def check(keywords: Iterable[str]) -> None:
        for keyword in keywords:
            if keyword not in known:
                _refuse(method.__qualname__, keyword, known, further)

    if not inspect.iscoroutinefunction(method):

        @wraps(method)
        def call(*args: P.args, **keywords: P.kwargs) -> T:
            check(keywords)
            return method(*args, **keywords)

        return call

    @wraps(method)
    async def call_async(*args: P.args, **keywords: P.kwargs) -> Any:
        check(keywords)
        return await method(*args, **keywords)

    return cast("Callable[P, T]", call_async)


def _refuse(method: str, keyword: str, known: Collection[str], further: bool) -> None:
    """Raise TypeError, unless `keyword` may be one of the `further` names."""
    similar = get_close_matches(keyword, known, 1, MIN_SIMILARITY if further else 0.6)
    if further and not similar:
        return
    hint = f"did you mean {similar[0]!r}?" if similar else f"its keywords are {', '.join(sorted(known))}"
    raise TypeError(f"{method}() got an unexpected keyword argument {keyword!r}; {hint}")
