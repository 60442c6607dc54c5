"""The load of a process as a response header, in the formats of ORCA (Open Request Cost Aggregation).

Envoy reads the header, and inference servers send it: https://github.com/envoyproxy/envoy/issues/6614.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial

LOAD, LOAD_FORMAT = b"endpoint-load-metrics", b"endpoint-load-metrics-format"
LoadReport = Callable[[], bytes]
"""Writes the current load as the value of the header."""


def requested_report(headers: Iterable[tuple[bytes, bytes]], load: Callable[[], dict[str, int]]) -> LoadReport | None:
    """Return the report in the format of a request header; None without the header, or for an unknown format.

    Args:
        headers: request headers with lower-case names.
        load: returns the current values by name.

    """
    for name, value in headers:
        if name == LOAD_FORMAT:
            write = _WRITERS.get(value.strip().upper())
            return None if write is None else partial(_report, write, load)
    return None


def _report(write: Callable[[dict[str, int]], bytes], load: Callable[[], dict[str, int]]) -> bytes:
    return write(load())


def _write_json(load: dict[str, int]) -> bytes:
    return b"JSON " + json.dumps({"named_metrics": load}, separators=(",", ":")).encode()


def _write_text(load: dict[str, int]) -> bytes:
    return b"TEXT " + b", ".join(b"named_metrics.%b=%d" % (name.encode(), value) for name, value in load.items())


_WRITERS = {b"JSON": _write_json, b"TEXT": _write_text}
