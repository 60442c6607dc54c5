"""Samples of `GET /metrics`, read by prometheus-client."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.waiting import wait_until

Samples = dict[tuple[str, ...], float]
"""Values by name and label values; labels stand in alphabetical order."""


def samples_of(text: str) -> Samples:
    """Return the samples of a text in the format of Prometheus."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read_metrics(server: httpx.Client | str) -> Samples:
    """Return the samples of a server, given as an HTTP client or an address."""
    if isinstance(server, str):
        return samples_of(httpx.get(f"{server}/metrics", timeout=60).text)
    return samples_of(server.get("/metrics").text)


def wait_for_streams(http: httpx.Client, count: int) -> None:
    """Wait until the server counts so many open streams."""
    wait_until(lambda: read_metrics(http)["preblock_streams_open",] == count)
