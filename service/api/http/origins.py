"""Protection from web pages: the host names that the service answers to, and the origins that may change its state.

A page can point its own DNS name at this machine (DNS rebinding). `Host` and `Origin` of its requests then agree, so an
origin proves nothing before the host is checked.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from starlette.types import Scope

from preblock.service.core.errors import Forbidden, Misdirected
from preblock.service.observability.context import Headers

ANY = "*"
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]+))(?::\d*)?")
"""Value of the header `Host` in lower case: an IPv6 address in brackets, or a name; then a port (RFC 9110, 7.2)."""
MAX_HOST_BYTES = 280
"""A name of DNS has at most 253 characters; an absolute one ends with a dot, and a port may follow."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose requests change nothing here."""
OWN_SITES = (b"same-origin", b"none")
"""Values of `Sec-Fetch-Site` for pages of this service, and for requests of the user (Fetch Metadata, section 2.3)."""


class AllowedHosts:
    """The hosts that requests may address: names, addresses, and always those of the loopback interface.

    Args:
        names: names and addresses, without a port; None or "*" among them allows every host.

    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self._names = None if names is None else {_normal(name) for name in names}
        if self._names is not None and ANY in self._names:
            self._names = None
        self._knows = lru_cache(self._find)  # clients repeat their host

    def allow(self, host: bytes | None) -> bool:
        """Return whether a request with this header `Host` is answered. Browsers always send the header."""
        return self._names is None or host is None or (len(host) <= MAX_HOST_BYTES and self._knows(host))

    def check(self, headers: Headers) -> None:
        """Raise Misdirected for a request to a host that is not allowed."""
        host = None if self._names is None else _select(headers, b"host").get(b"host")
        if host is not None and not self.allow(host):
            expected = "localhost, a loopback address, or a name in the setting allowed_hosts of the server"
            raise Misdirected("Host", host.decode("latin-1"), expected)

    def _find(self, host: bytes) -> bool:
        found = HOST.fullmatch(host.decode("latin-1").lower())
        if found is None or self._names is None:
            return False
        name = _normal(found[1] or found[2])
        return name in self._names or is_loopback(name)


def is_loopback(host: str) -> bool:
    """Return whether a host is an address of the loopback interface, or a name that always means it (RFC 6761, 6.3)."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def check_origin(scope: Scope, allowed: Sequence[str]) -> None:
    """Raise Forbidden for a request with an effect, if it comes from a web page of a foreign origin.

    Browsers let any page open a WebSocket, and send a POST whose response it cannot read.

    Args:
        scope: of the request or the WebSocket.
        allowed: foreign origins that are allowed; "*" allows all.

    """
    if scope["type"] == "http" and scope["method"] in SAFE_METHODS:
        return
    found = _select(scope["headers"], b"host", b"origin", b"sec-fetch-site")
    origin, site = found.get(b"origin"), found.get(b"sec-fetch-site")
    if (origin is None and site is None) or site in OWN_SITES or ANY in allowed:
        return
    text, own = (origin or b"").decode("latin-1"), found.get(b"host", b"").decode("latin-1")
    # A browser sends `Sec-Fetch-Site` only to https and to loopback addresses.
    is_own = site is None and own != "" and text.partition("://")[2] == own
    if not is_own and text not in allowed:
        got = text if origin is not None else f"none, with Sec-Fetch-Site {(site or b'').decode('latin-1')}"
        raise Forbidden("Origin", got, ", ".join((f"the origin of {own}", *allowed)))


def _select(headers: Headers, *names: bytes) -> dict[bytes, bytes]:
    """Return the headers with these lower-case names. uvicorn keeps the case of a WebSocket's headers."""
    return {lower: value for name, value in headers if (lower := name.lower()) in names}


def _normal(host: str) -> str:
    """Return a name in lower case without its last dot, or an address in its usual spelling."""
    name = host.lower().removesuffix(".")
    try:
        return str(ip_address(name))
    except ValueError:
        return name
