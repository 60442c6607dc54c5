"""Optional features of a service, for `benchmarks.tensors --with`: environment variables and request headers."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import NamedTuple

import trustme

from preblock.service.core.auth import new_key


class Guard(NamedTuple):
    """The environment variables of the servers, and the headers of each request."""

    variables: dict[str, str]
    headers: Mapping[str, str] = MappingProxyType({})


def keys(folder: Path) -> Guard:
    """Require an API key, and count its requests per second."""
    file = folder / "keys.toml"
    key, entry = new_key("benchmark", (), admin=False)
    file.write_text(entry)
    variables = {"PREBLOCK_API_KEYS_FILE": str(file), "PREBLOCK_RATE_LIMIT_PER_SECOND": "1000000"}
    return Guard(variables, {"Authorization": f"Bearer {key}"})


def tls(folder: Path) -> Guard:
    """Serve over TLS, the bare application too."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    made = trustme.CA().issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(str(certificate))
    made.private_key_pem.write_to_path(str(key))
    return Guard({"PREBLOCK_TLS_CERT_FILE": str(certificate), "PREBLOCK_TLS_KEY": str(key)})


def tracing(_: Path) -> Guard:
    """Trace one percent of the requests, and export the spans."""
    port = _Collector.start()
    return Guard(
        {
            "PREBLOCK_TRACING": "otlp",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.01",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        }
    )


def proxies(_: Path) -> Guard:
    """Trust the proxy headers of each request, in the bare application too."""
    return Guard(
        {"PREBLOCK_TRUSTED_PROXIES": "127.0.0.1"}, {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https"}
    )


def lines(_: Path) -> Guard:
    """Log one percent of the requests."""
    return Guard({"PREBLOCK_ACCESS_LOG_SAMPLE_RATE": "0.01"})


def pages(_: Path) -> Guard:
    """Allow cross-origin requests of one site."""
    return Guard({"PREBLOCK_CORS_ORIGINS": "https://pages.example"})


GUARDS: dict[str, Callable[[Path], Guard]] = {
    "keys": keys,
    "tls": tls,
    "tracing": tracing,
    "proxies": proxies,
    "lines": lines,
    "pages": pages,
}


@contextmanager
def guarded(names: list[str], folder: Path) -> Iterator[dict[str, str]]:
    """Set the variables while the block runs, and yield the headers."""
    guards = [GUARDS[name](folder) for name in names]
    before = dict(os.environ)
    try:
        for guard in guards:
            os.environ |= guard.variables
        yield {name: value for guard in guards for name, value in guard.headers.items()}
    finally:
        os.environ.clear()
        os.environ |= before


class _Collector(BaseHTTPRequestHandler):
    """An HTTP server to receive and discard spans."""

    @classmethod
    def start(cls) -> int:
        """Listen, and return the port."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), cls)
        Thread(target=server.serve_forever, daemon=True).start()
        return server.server_port

    def do_POST(self) -> None:
        """Read the body, and answer with 200."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""
