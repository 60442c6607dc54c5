"""Parts of both clients: the options of a connection, and methods made from functions."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, get_args

import httpx

from preblock import __version__
from preblock.client.errors import invalid

M = TypeVar("M", bound=Callable[..., Any])


def options(url: str, timeout: float, key: str | None) -> dict[str, Any]:
    """Return the options of an httpx client.

    Raises:
        RequestError: `url` is not an HTTP URL, or `key` cannot be sent.

    """
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise invalid("url", url, f"http://… or https://… ({error})") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise invalid("url", url, "http://… or https://…")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise invalid("key", "other characters", "printable characters of ASCII")
    return {
        "base_url": address,
        # No limit on the wait for a free connection of the pool: the requests before it have their own.
        "timeout": httpx.Timeout(timeout, pool=None),
        "headers": {"User-Agent": f"preblock/{__version__}", "Accept-Encoding": "identity", **authorization(key)},
    }


def authorization(key: str | None) -> dict[str, str]:
    """Return the Authorization header of `key`, if there is one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def socket_address(base: httpx.URL) -> str:
    """Return the WebSocket address of a server."""
    scheme = "wss" if base.scheme == "https" else "ws"
    return str(base.copy_with(scheme=scheme)).rstrip("/")


def like(build: Callable[..., Any]) -> Callable[[M], M]:
    """Give a method the name, the docstring and the signature of `build`.

    The method's result is the last type argument of the result of `build`.
    """

    def describe(method: M) -> M:
        described = wraps(build)(method)
        signature = inspect.signature(build)
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        others = [parameter for name, parameter in signature.parameters.items() if name != "self"]
        *_, result = get_args(signature.return_annotation) or (signature.return_annotation,)
        described.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[me, *others], return_annotation=result
        )
        return described  # type: ignore[return-value]

    return describe
