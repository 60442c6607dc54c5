"""The one line of a failure, for the command line and the examples. The base install imports this module."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


def describe_failure(error: Exception) -> str | None:
    """Return one line for an error of a file, a request or an export; None for another one, such as a bug."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return " ".join(str(error).split()) if type(error).__module__.startswith("preblock") else None


def fails_in_one_line(main: Callable[P, None]) -> Callable[P, None]:
    """Make a program end with the line of `describe_failure` and exit code 1. Other errors show their traceback."""

    @wraps(main)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            main(*arguments, **options)
        except Exception as error:
            line = describe_failure(error)
            if line is None:
                raise
            raise SystemExit(line) from error

    return run
