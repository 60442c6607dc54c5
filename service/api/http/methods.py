"""HEAD and OPTIONS requests (RFC 9110, sections 9.3.2 and 9.3.7): every path has them, and no route declares them."""

from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST", "OPTIONS")


def complete_methods(declared: Iterable[str]) -> str:
    """Return the header `Allow` of a path with the `declared` methods: HEAD beside GET, and OPTIONS on every path."""
    listed = {*declared, "OPTIONS"}
    if "GET" in listed:
        listed.add("HEAD")
    return ", ".join(method for method in METHODS if method in listed)


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HEAD as `app` answers GET, without the body."""

    async def send_without_body(message: Message) -> None:
        await send(message if message["type"] != "http.response.body" else {**message, "body": b""})

    get = {**scope, "method": "GET"}
    await app(get, receive, send_without_body)
    if "route" in get:
        scope["route"] = get["route"]  # for the span of the request
