"""Counters of one process. Oracle: prometheus-client's own parser."""

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from preblock.service.core.errors import Invalid, NotFound
from preblock.service.observability.instruments import LARGEST_BATCH, SECONDS
from preblock.service.observability.metrics import Metrics
from preblock.service.observability.timing import RunTimer


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    text = metrics.expose("")[0].decode()
    return {
        (s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(text) for s in family.samples
    }


def test_a_request_that_ends_well_is_ok() -> None:
    metrics = Metrics()
    with metrics.request("native") as observation:
        observation.model = "m"
    assert samples(metrics)["preblock_requests_total", "m", "ok", "native"] == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Invalid("f", 1, "0"), "Invalid"),
        (NotFound("f", 1, "0"), "NotFound"),
        (ZeroDivisionError(), "internal_error"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_the_kind_of_an_error_is_the_outcome_and_the_error_goes_on(error: BaseException, outcome: str) -> None:
    metrics = Metrics()
    with pytest.raises(type(error)), metrics.request("grpc"):
        raise error
    assert samples(metrics)["preblock_requests_total", "", outcome, "grpc"] == 1
    assert samples(metrics)["preblock_request_duration_seconds_count", "grpc"] == 1


def test_seconds_fall_into_every_bucket_above_them() -> None:
    metrics = Metrics()
    with metrics.request("native"):
        pass
    found = samples(metrics)
    assert found["preblock_request_duration_seconds_bucket", "+Inf", "native"] == 1
    bounds = {key[1] for key in found if key[0] == "preblock_request_duration_seconds_bucket"}
    assert {float(bound) for bound in bounds} == {*SECONDS, float("inf")}


def test_many_answers_are_summed_by_what_they_share_and_the_last_of_them_is_the_last() -> None:
    """Also where they are told long after."""
    metrics, now = Metrics(), time.perf_counter()
    for ago, batch in ((60, 1), (59, 2), (58, LARGEST_BATCH + 1), (57, LARGEST_BATCH + 2), (1, 1)):
        execution = RunTimer(metrics, "m", 1)
        execution.marks = [now - ago + late for late in (0, 0.1, 0.3, 0.6, 1)]
        execution.rows = execution.batch = batch
        metrics.answered("native", execution, 5, now - ago - 0.2, 10, 20, 0.01, 0.02)
    found = samples(metrics)
    assert found["preblock_requests_total", "m", "ok", "native"] == 5
    assert (
        found["preblock_request_duration_seconds_count", "native"]
        == found["preblock_request_duration_seconds_sum", "native"]
        == 5
    )
    assert found["preblock_request_decode_seconds_total", "native"] == pytest.approx(5 * 0.3)
    assert found["preblock_request_body_read_seconds_total", "native"] == pytest.approx(5 * 0.01)
    assert found["preblock_request_response_write_seconds_total", "native"] == pytest.approx(5 * 0.02)
    assert found["preblock_request_bytes_total", "native"] == 50
    assert found["preblock_response_bytes_total", "native"] == 100
    assert found["preblock_tokens_total", "m"] == 25
    assert found["preblock_model_rows_total", "m", "1"] == 1 + 2 + 2 * LARGEST_BATCH + 3 + 1
    counts = {key[2]: value for key, value in found.items() if key[0] == "preblock_model_stages_total"}
    assert counts == {"1": 2, "2": 1, "more": 2}
    for phase, seconds in (("compute_input", 0.1), ("queue", 0.2), ("compute_infer", 0.3), ("compute_output", 0.4)):
        assert found["preblock_model_stage_seconds_total", "m", "1", phase, "1"] == pytest.approx(2 * seconds)
    assert found["preblock_model_last_request_timestamp_seconds", "m", "1"] == pytest.approx(time.time(), abs=1)
    assert samples(metrics) == found


def test_tokens_are_summed_for_each_model() -> None:
    metrics = Metrics()
    for model, count in (("a", 3), ("b", 5), ("a", 4)):
        metrics.tokens(model, count)
    assert samples(metrics)["preblock_tokens_total", "a"] == 7
    assert samples(metrics)["preblock_tokens_total", "b"] == 5


def test_a_stream_is_counted_while_it_is_open_and_no_longer() -> None:
    metrics = Metrics()

    def gauge() -> float:
        return samples(metrics)["preblock_streams_open",]

    with metrics.stream(), metrics.stream():
        assert gauge() == 2
    assert gauge() == 0
    with pytest.raises(ZeroDivisionError), metrics.stream():
        raise ZeroDivisionError
    assert gauge() == 0


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4"),
        ("text/plain", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
    ],
)
def test_the_format_follows_accept(accept: str, kind: str) -> None:
    content, media_type = Metrics().expose(accept)
    assert media_type.startswith(kind)
    assert content.endswith(b"# EOF\n") == ("openmetrics" in kind)
