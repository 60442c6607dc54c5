"""Every response has the id of its request; responses with tensors also have timings.

Oracles: the client's own requests, and the counters.
"""

import re
from pathlib import Path

import httpx
import numpy as np
import pytest

from preblock.service.app import create_app, create_engine
from preblock.service.core.settings import Settings
from preblock.service.observability.context import RequestContext
from preblock.service.server.run import configure
from tests.support.connections import RawConnection, http_request
from tests.support.prepared import CountedRequests
from tests.support.servers import live_server

BYTES = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
MADE = re.compile(r"[0-9a-f]{16}-[0-9a-f]+")
TIMING = re.compile(r"parse;dur=\d+\.\d{3}, queue;dur=\d+\.\d{3}, run;dur=\d+\.\d{3}")
EMBED = "/models/gpt/embed"


def embed(http: httpx.Client, **headers: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.post(f"{EMBED}?shape=1,2", content=np.array([[1, 2]]).tobytes(), headers=BYTES | headers)


@pytest.fixture
def alike(tiny_http: httpx.Client) -> httpx.Client:
    """A client whose next request to `embed` is prepared."""
    assert embed(tiny_http).status_code == embed(tiny_http).status_code == 200
    return tiny_http


def test_invalid_request_id_is_replaced(alike: httpx.Client) -> None:
    for request_id in ("", "a b", "a\tb", "é", "x" * 129):
        headers = httpx.Headers({b"X-Request-Id": request_id.encode("latin-1")})
        for answer in (alike.get("/livez", headers=headers), alike.post(EMBED, content=b"{}", headers=headers)):
            assert MADE.fullmatch(answer.headers["X-Request-Id"]), request_id
    assert len(RequestContext(b"x" * 128).id) == 128


def test_tracing_headers_do_not_prevent_prepared_requests(tiny_repository: Path) -> None:
    engine = create_engine(Settings(repository=tiny_repository))
    app = create_app(Settings(), engine)
    prepared = CountedRequests(engine, app)
    with live_server(configure(Settings(), app)) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for number in range(1, 21):
            passing = {
                "X-Request-Id": f"r{number}",
                "traceparent": f"00-{number:032x}-{number:016x}-01",
                "tracestate": f"a={number}",
                "baggage": f"b={number}",
            }
            answer = embed(http, **passing)
            assert (answer.headers["X-Request-Id"], len(answer.content)) == (f"r{number}", 32)
    assert prepared.hits == 19  # one prepared request for all of them


def test_pipelined_requests_keep_their_ids(alike: httpx.Client) -> None:
    ids, path, body = [f"p{number}" for number in range(6)], f"{EMBED}?shape=1,2", np.array([[1, 2]]).tobytes()
    with RawConnection(str(alike.base_url)) as client:
        for _ in range(2):
            client.send(b"".join(http_request(path, body, BYTES | {"X-Request-Id": name}) for name in ids))
            heads = [client.answer()[1] for _ in ids]
            assert re.findall(r"x-request-id: (\S+)", "".join(heads)) == ids
