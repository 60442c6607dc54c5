"""The load of the process in a response header, in the formats of ORCA."""

import json
import re

import httpx
import numpy as np
import pytest

EMBED = "/models/gpt/embed"
HEADER, FORMAT = "endpoint-load-metrics", "Endpoint-Load-Metrics-Format"
TEXT = re.compile(r"TEXT named_metrics\.requests_running=\d+, named_metrics\.queue_depth=\d+")
RAW = {"Content-Type": "application/octet-stream"}


def embed(http: httpx.Client, headers: dict[str, str]) -> httpx.Response:
    """Send a request with a known template from the second one on."""
    return http.post(f"{EMBED}?shape=1,2", content=np.array([[1, 2]]).tobytes(), headers=RAW | headers)


def named_metrics(answer: httpx.Response) -> object:
    prefix, _, document = answer.headers[HEADER].partition(" ")
    assert prefix == "JSON"
    assert answer.headers.get_list(HEADER) == [answer.headers[HEADER]]
    return json.loads(document)["named_metrics"]


@pytest.mark.parametrize("value", ["JSON", "json"])
def test_header_has_the_load_of_the_process(counted_http: httpx.Client, value: str) -> None:
    answer = counted_http.get("/readyz", headers={FORMAT: value})
    load = {"requests_running": 0, "queue_depth": 0}
    assert named_metrics(answer) == load
    assert answer.json() == load | {"ready": True}


@pytest.mark.parametrize(
    "body", [{"input_ids": [[1]]}, {"input_ids": [[-1]]}, []], ids=["right", "invalid", "malformed"]
)
def test_every_answer_has_the_header(counted_http: httpx.Client, body: object) -> None:
    assert named_metrics(counted_http.post(EMBED, json=body, headers={FORMAT: "JSON"}))
    assert TEXT.fullmatch(counted_http.post(EMBED, json=body, headers={FORMAT: "TEXT"}).headers[HEADER])


def test_requests_with_a_known_template_and_head_have_the_header(counted_http: httpx.Client) -> None:
    for _ in range(4):
        assert named_metrics(embed(counted_http, {FORMAT: "JSON"}))
        assert TEXT.fullmatch(embed(counted_http, {FORMAT: "text"}).headers[HEADER])
        assert HEADER not in embed(counted_http, {}).headers


@pytest.mark.parametrize("headers", [{}, {FORMAT: "BIN"}, {FORMAT: ""}])
def test_without_a_known_format_there_is_no_header(counted_http: httpx.Client, headers: dict[str, str]) -> None:
    for answer in (counted_http.get("/readyz", headers=headers), embed(counted_http, headers)):
        assert answer.status_code == 200
        assert HEADER not in answer.headers
