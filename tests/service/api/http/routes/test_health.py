"""Liveness, readiness and metrics. Oracle: prometheus-client's own parsers."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client import Metric, parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from tritonclient.grpc import service_pb2
from websockets.sync.client import connect as connect_socket

from tests.support.paths import ROOT
from tests.support.protocols import Clients, grpc_raw, native_json, step_frame
from tests.support.servers import Server


def read_metrics(http: httpx.Client) -> dict[tuple[str, ...], float]:
    """Return the samples by name and label values."""
    families: Iterable[Metric] = parser.text_string_to_metric_families(http.get("/metrics").text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_live_and_ready(tiny: httpx.Client, path: str) -> None:
    response = tiny.get(path)
    assert response.status_code == 200
    assert response.content == b""


@pytest.mark.parametrize(
    ("protocol", "label"),
    [(native_json, "native"), (grpc_raw, "grpc")],
)
def test_requests_and_tokens_are_counted(tiny_clients: Clients, protocol: Callable[..., object], label: str) -> None:
    before = read_metrics(tiny_clients.http)
    protocol(tiny_clients, "gpt", {"input_ids": [[1, 2, 3], [4, 5, 6]]})
    protocol(tiny_clients, "gpt", {"input_ids": [[1]]})
    after = read_metrics(tiny_clients.http)
    counts = {key: after[key] - before.get(key, 0) for key in after}
    assert counts["preblock_requests_total", "gpt", "ok", label] == 2
    assert counts["preblock_tokens_total", "gpt"] == 7
    assert counts["preblock_request_duration_seconds_count", label] == 2
    assert counts["preblock_request_duration_seconds_sum", label] > 0


@pytest.mark.parametrize(
    ("path", "model", "outcome"),
    [
        ("/models/gpt/embed", "gpt", "Malformed"),
        ("/models/gpt/embed?nope=1", "gpt", "Malformed"),
        ("/models/bert/versions/9/embed", "", "NotFound"),
        ("/models/nope/embed", "", "NotFound"),
    ],
)
def test_refusals_are_counted_by_kind(tiny: httpx.Client, path: str, model: str, outcome: str) -> None:
    key = ("preblock_requests_total", model, outcome, "native")
    before = read_metrics(tiny).get(key, 0)
    tiny.post(path, content=b"x")
    assert read_metrics(tiny)[key] == before + 1


def test_names_that_clients_invent_make_no_labels(tiny: httpx.Client) -> None:
    tiny.post("/models/invented/embed", json={})
    tiny.post("/v2/models/invented/infer", json={})
    tiny.get("/invented")
    assert "invented" not in tiny.get("/metrics").text


def test_metrics_are_prometheus_text_by_default(tiny: httpx.Client) -> None:
    response = tiny.get("/metrics")
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(parser.text_string_to_metric_families(response.text))
    types = {family.name: family.type for family in families}
    assert types["preblock_requests"] == types["preblock_tokens"] == "counter"
    assert types["preblock_request_duration_seconds"] == "histogram"
    assert types["preblock_streams_open"] == "gauge"
    assert all(family.documentation for family in families)


def test_metrics_are_openmetrics_where_accept_names_it(tiny: httpx.Client) -> None:
    accept = "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"
    response = tiny.get("/metrics", headers={"Accept": accept})
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    names = {family.name for family in read_openmetrics(response.text)}  # type: ignore[no-untyped-call]
    assert {"preblock_requests", "preblock_tokens"} <= names


def documented() -> set[str]:
    """Return the names of the table in docs/operations.md."""
    text = (ROOT / "docs" / "operations.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(preblock_\w+)` \|", text, re.MULTILINE))


def test_every_metric_is_documented(tiny: httpx.Client) -> None:
    families = list(parser.text_string_to_metric_families(tiny.get("/metrics").text))
    names = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    assert {name for name in names if not name.endswith("_created")} == documented()


@pytest.mark.parametrize("size", [1, 6])
def test_bytes_are_counted_by_protocol_both_ways(tiny_clients: Clients, size: int) -> None:
    http, ids = tiny_clients.http, np.ones((1, size), np.int64)
    headers = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
    before = read_metrics(http)
    for _ in range(3):  # the first, and those that are like it
        answer = http.post(f"/models/gpt/embed?shape=1,{size}", content=ids.tobytes(), headers=headers)
        assert len(answer.content) == 16 * size
    text = http.post("/models/gpt/embed", content=b"{wrong")
    (vectors,) = grpc_raw(tiny_clients, "gpt", {"input_ids": ids.tolist()})[:1]
    assert vectors.size
    after = read_metrics(http)
    counts = {key: after[key] - before.get(key, 0) for key in after}
    assert counts["preblock_request_bytes_total", "native"] == 3 * ids.nbytes + len(b"{wrong")
    assert counts["preblock_response_bytes_total", "native"] == 3 * 16 * size + len(text.content)
    assert counts["preblock_request_bytes_total", "grpc"] > ids.nbytes
    assert counts["preblock_response_bytes_total", "grpc"] > 16 * size
    assert 0 < counts["preblock_request_body_read_seconds_total", "native"] < 30
    assert 0 < counts["preblock_request_response_write_seconds_total", "native"] < 30


def test_the_time_until_it_is_checked_is_told_by_each_protocol(tiny_clients: Clients) -> None:
    http, ids = tiny_clients.http, np.ones((1, 2), np.int64)
    headers = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}

    def parsed() -> dict[str, float]:
        name = "preblock_request_decode_seconds_total"
        return {labels[1]: told for labels, told in read_metrics(http).items() if labels[0] == name}

    def native() -> None:
        for _ in range(3):  # the first, and those that are like it
            assert http.post("/models/gpt/embed?shape=1,2", content=ids.tobytes(), headers=headers).is_success

    def decode() -> None:
        with connect_socket(f"{tiny_clients.socket}/models/gpt/decode") as stream:
            for message in (step_frame([1]), '{"input_ids": [1]}', step_frame([1])):
                stream.send(message)
                stream.recv()

    def call() -> None:
        request = service_pb2.ModelInferRequest(model_name="gpt", raw_input_contents=[bytes(16)])
        request.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])

        def requests() -> Iterator[service_pb2.ModelInferRequest]:
            for _ in range(3):
                yield request
                time.sleep(0.1)  # which is no time of the service

        before = parsed().get("grpc-stream", 0)
        assert len(list(tiny_clients.stub.ModelStreamInfer(requests()))) == 3
        assert parsed()["grpc-stream"] - before < 0.1

    asked: dict[str, Callable[[], object]] = {
        "native": native,
        "openai": lambda: http.post("/v1/embeddings", json={"model": "bert", "input": [1, 2]}),
        "grpc": lambda: grpc_raw(tiny_clients, "gpt", {"input_ids": ids.tolist()}),
        "grpc-stream": call,
        "decode": decode,
    }
    for protocol, ask in asked.items():
        before, began = parsed(), time.perf_counter()
        ask()
        seconds, after = time.perf_counter() - began, parsed()
        assert 0 < after.pop(protocol) - before.pop(protocol, 0) < seconds
        assert after == before
    refused = parsed()
    assert http.post("/models/gpt/embed", content=b"{wrong").status_code == 400
    assert http.get("/models").is_success
    assert parsed() == refused


def test_routes_of_fastapi_and_sockets_count_their_bytes_too(tiny: httpx.Client, tiny_server: Server) -> None:
    before, body = read_metrics(tiny), b'{"model": "bert", "input": [1, 2]}'
    answer = tiny.post("/v1/embeddings", content=body, headers={"Content-Type": "application/json"})
    with connect_socket(f"{tiny_server.socket}/models/gpt/decode") as stream:
        stream.send('{"input_ids": [1]}')
        told = stream.recv()
    after = read_metrics(tiny)
    counts = {key: after[key] - before.get(key, 0) for key in after}
    assert counts["preblock_request_bytes_total", "openai"] == len(body)
    assert counts["preblock_response_bytes_total", "openai"] == len(answer.content)
    assert counts["preblock_request_bytes_total", "decode"] == len('{"input_ids": [1]}')
    assert counts["preblock_response_bytes_total", "decode"] == len(told)


def test_what_a_stream_takes_to_send_is_told_and_what_nobody_knows_is_not(tiny_clients: Clients) -> None:
    """Also of frames that are answered in their connection."""
    http, sent = tiny_clients.http, ("preblock_request_response_write_seconds_total", "decode")
    found = [read_metrics(http)]
    with connect_socket(f"{tiny_clients.socket}/models/gpt/decode") as stream:
        for _ in range(4):
            stream.send(step_frame([1]))
            assert len(stream.recv()) > 16
            found.append(read_metrics(http))
    values = [metrics.get(sent, 0) for metrics in found]
    assert values == sorted(set(values))
    request = service_pb2.ModelInferRequest(model_name="gpt", raw_input_contents=[bytes(8)])
    request.inputs.add(name="input_ids", datatype="INT64", shape=[1, 1])
    (answer,) = tiny_clients.stub.ModelStreamInfer(iter([request]))
    assert not answer.error_message
    tiny_clients.stub.ModelInfer(request)
    last = read_metrics(http)
    assert last["preblock_request_response_write_seconds_total", "grpc-stream"] > 0
    assert last.get(("preblock_request_response_write_seconds_total", "grpc"), 0) == 0
    for protocol in (
        "decode",
        "grpc",
        "grpc-stream",
    ):  # of lines and events, which are of the protocol decode too, it is told
        read = "preblock_request_body_read_seconds_total", protocol
        assert last.get(read, 0) == found[0].get(read, 0)


def test_memory_and_provider_are_told(tiny: httpx.Client, tiny_server: Server) -> None:
    found = read_metrics(tiny)
    status = Path(f"/proc/{tiny_server.process.pid}/status").read_text()
    anonymous = 1024 * int(status.partition("RssAnon:")[2].split()[0])
    assert anonymous / 2 < found["preblock_resident_memory_bytes", "anonymous"] < 2 * anonymous
    for model in tiny.get("/models").json():
        declared = model["manifest"]["files"]["model.onnx.data"]["bytes"]
        assert found["preblock_model_tables_bytes", model["name"], str(model["version"])] == declared
    choice = tiny.get("/models/gpt").json()["provider_choice"]
    told = choice["active"], choice["probed"] or "none", choice["requested"]
    assert found["preblock_provider_info", *told] == 1
    assert (choice["requested"], choice["active"]) == ("auto", tiny.get("/models/gpt").json()["provider"])
    assert choice["probed"] == choice["active"] or (choice["probed"] is None and choice["reason"])
