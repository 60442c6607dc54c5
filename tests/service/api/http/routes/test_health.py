"""Liveness, readiness and metrics. Oracle: prometheus-client's own parsers."""

import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from websockets.sync.client import connect as connect_socket

from preblock.service.observability.context import PROTOCOLS
from tests.support.connections import dial, http_request
from tests.support.decode_protocols import step_frame
from tests.support.open_inference import infer_message
from tests.support.paths import ROOT
from tests.support.processes import status_bytes
from tests.support.protocols import Clients
from tests.support.scrapes import read_metrics
from tests.support.servers import Server
from tests.support.waiting import wait_until


def test_unfinished_request_counts_as_running(counted_http: httpx.Client) -> None:
    assert (counted_http.get("/livez").status_code, counted_http.get("/livez").content) == (200, b"")

    def counts(key: tuple[str, ...], number: int) -> bool:
        return read_metrics(counted_http)[key] == number

    idle = {"ready": True, "requests_running": 0, "queue_depth": 0}
    for api, protocol in (("models/gpt/embed", "native"), ("v2/models/gpt/infer", "open-inference")):
        key = "preblock_requests_running", protocol
        wait_until(lambda: counted_http.get("/readyz").json() == idle)
        before = read_metrics(counted_http)
        assert (before[key], before["preblock_queue_depth",]) == (0, 0)
        # A body over 256 KiB, of which only the beginning is sent.
        with dial(counted_http.base_url) as connection:
            connection.sendall(http_request(f"/{api}", b"{", {"Content-Length": "1000000"}))
            wait_until(partial(counts, key, 1))
            assert counted_http.get("/readyz").json() == idle | {"requests_running": 1}
        wait_until(partial(counts, key, 0))


def test_every_protocol_has_a_gauge_of_running_requests(counted_http: httpx.Client) -> None:
    for path in ("positions", "neighbours?id=1"):
        assert counted_http.get(f"/models/gpt/{path}").status_code == 200
    protocols = {key[1] for key in read_metrics(counted_http) if key[0] == "preblock_requests_running"}
    assert protocols == set(PROTOCOLS)


def test_rejections_are_counted_without_unknown_names(counted_http: httpx.Client) -> None:
    for path, model, outcome in (
        ("/models/gpt/embed", "gpt", "Malformed"),
        ("/models/gpt/embed?nope=1", "gpt", "Malformed"),
        ("/models/bert/versions/9/embed", "", "NotFound"),
        ("/models/invented/embed", "", "NotFound"),
    ):
        key = ("preblock_requests_total", model, outcome, "native")
        before = read_metrics(counted_http).get(key, 0)
        counted_http.post(path, content=b"x")
        assert read_metrics(counted_http)[key] == before + 1, path
    counted_http.post("/v2/models/invented/infer", json={})
    counted_http.get("/invented")
    assert "invented" not in counted_http.get("/metrics").text


def test_every_metric_is_documented(counted_http: httpx.Client) -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    families = list(parser.text_string_to_metric_families(counted_http.get("/metrics").text))
    assert {f.name + ("_total" if f.type == "counter" else "") for f in families} == documented
    assert all(family.documentation for family in families)
    open_metrics = counted_http.get("/metrics", headers={"Accept": "application/openmetrics-text"}).text
    units = {family.name: family.unit for family in read_openmetrics(open_metrics)}  # type: ignore[no-untyped-call]
    assert {"preblock_requests", "preblock_tokens"} <= units.keys()
    assert all(unit for name, unit in units.items() if name.endswith(("_seconds", "_bytes")))


def test_metrics_format_follows_accept(counted_http: httpx.Client) -> None:
    plain, openmetrics = "text/plain; version=0.0.4", "application/openmetrics-text"
    for accept, kind in (
        ("", f"{plain}; charset=utf-8"),
        ("text/plain, Application/OpenMetrics-Text", openmetrics),
        (f"{openmetrics};version=1.0.0;q=0.5,text/plain;q=0.3,*/*;q=0.2", openmetrics),
        (f"{openmetrics};q=0.3, text/plain", plain),
        (f"text/plain;q=0.6, {openmetrics};q=0.5, text/plain;version=1.0.0;q=0.2", plain),
        (f"{openmetrics};q=many", plain),
    ):
        answer = counted_http.get("/metrics", headers={"Accept": accept})
        assert answer.headers["Content-Type"].startswith(kind), accept
        assert answer.text.endswith("# EOF\n") == (kind == openmetrics)


def test_decode_seconds_of_a_grpc_stream_exclude_its_pauses(counted_clients: Clients) -> None:
    name = "preblock_request_decode_seconds_total", "grpc-stream"

    def requests() -> Iterator[Any]:
        for _ in range(3):
            yield infer_message([[1, 1]])
            time.sleep(0.1)

    before = read_metrics(counted_clients.http)
    assert len(list(counted_clients.stub.ModelStreamInfer(requests()))) == 3
    assert 0 < read_metrics(counted_clients.http)[name] - before.get(name, 0) < 0.1


def test_read_or_write_seconds_are_counted_by_kind(counted_clients: Clients) -> None:
    http, sent = counted_clients.http, ("preblock_request_response_write_seconds_total", "decode")
    found = [read_metrics(http)]
    with connect_socket(f"{counted_clients.socket}/models/gpt/decode") as stream:
        for _ in range(4):
            stream.send(step_frame([1]))
            assert len(stream.recv()) > 16
            found.append(read_metrics(http))
    values = [metrics.get(sent, 0) for metrics in found]
    assert values == sorted(set(values))
    request = infer_message([[0]])
    assert list(counted_clients.stub.ModelStreamInfer(iter([request])))
    counted_clients.stub.ModelInfer(request)
    last = read_metrics(http)
    assert last["preblock_request_body_read_seconds_total", "grpc"] > 0
    assert last["preblock_request_response_write_seconds_total", "grpc-stream"] > 0
    assert last.get(("preblock_request_response_write_seconds_total", "grpc"), 0) == 0
    for protocol in ("decode", "grpc-stream"):
        read = "preblock_request_body_read_seconds_total", protocol
        assert last.get(read, 0) == found[0].get(read, 0)


def test_memory_and_provider_are_reported(counted_http: httpx.Client, counted_server: Server) -> None:
    found = read_metrics(counted_http)
    anonymous = status_bytes(counted_server.pid, "RssAnon")
    assert anonymous / 2 < found["preblock_resident_memory_bytes", "anonymous"] < 2 * anonymous
    for listed in counted_http.get("/models").json():
        model = counted_http.get(f"/models/{listed['name']}").json()
        declared = model["manifest"]["files"]["model.onnx.data"]["bytes"]
        assert found["preblock_model_tables_bytes", model["name"], str(model["version"])] == declared
    model = counted_http.get("/models/gpt").json()
    choice = model["provider_choice"]
    told = choice["active"], choice["probed"] or "none", choice["requested"]
    assert found["preblock_provider_info", *told] == 1
    assert choice["active"] == model["provider"]
