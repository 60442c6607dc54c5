"""Counters of one process. Oracle: prometheus-client's own parser."""

import asyncio
import gc
import time

import pytest

from preblock.service.core.errors import Invalid, NotFound
from preblock.service.engine.admission import Admission, Limits
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext, RequestRecord
from preblock.service.observability.instruments import BUCKETS_SECONDS, MAX_BATCH_LABEL
from preblock.service.observability.logs import AccessLog
from preblock.service.observability.metrics import Metrics
from tests.support.engines import live_settings
from tests.support.scrapes import Samples, samples_of


def samples(metrics: Metrics) -> Samples:
    return samples_of(metrics.expose()[0].decode())


def admission(metrics: Metrics) -> Admission:
    settings = live_settings()
    return Admission(Limits(settings), metrics, AccessLog(settings))


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
def test_error_class_is_the_outcome(error: BaseException, outcome: str) -> None:
    metrics = Metrics()
    with pytest.raises(type(error)), admission(metrics).request("grpc"):
        raise error
    assert samples(metrics)["preblock_requests_total", "", outcome, "grpc"] == 1
    assert samples(metrics)["preblock_request_duration_seconds_count", "grpc"] == 1


def test_ended_request_leaves_no_reference_cycle() -> None:
    metrics = Metrics()
    seen = admission(metrics)
    gc.collect()
    token = CURRENT_REQUEST.set(RequestContext(b"id"))
    with seen.request("native"):
        pass
    CURRENT_REQUEST.reset(token)
    del token
    metrics.flush()
    assert gc.collect() == 0


def test_record_is_counted_once() -> None:
    metrics = Metrics()
    with admission(metrics).request("native") as record:
        record.deferred = True
    assert not record.outcome
    for error in (None, ZeroDivisionError()):
        admission(metrics).end(record, error)
    assert samples(metrics)["preblock_request_duration_seconds_count", "native"] == 1


def test_request_duration_falls_into_histogram_buckets() -> None:
    metrics = Metrics()
    with admission(metrics).request("native"):
        pass
    found = samples(metrics)
    assert found["preblock_request_duration_seconds_bucket", "+Inf", "native"] == 1
    bounds = {key[1] for key in found if key[0] == "preblock_request_duration_seconds_bucket"}
    assert {float(bound) for bound in bounds} == {*BUCKETS_SECONDS, float("inf")}


def test_records_are_summed_by_model_and_batch() -> None:
    metrics, now = Metrics(), time.perf_counter()
    many = MAX_BATCH_LABEL + 1
    for ago, batch, model in ((60, 1, "m"), (59, 2, "m"), (1, 1, "m"), (58, many, "m"), (57, 1, "other")):
        record = RequestRecord("native", started=now - ago - 0.2)
        record.select(model, 1)
        record.selected, record.checked, record.dequeued, record.ran, record.ended = (
            now - ago + late for late in (0, 0.1, 0.3, 0.6, 1)
        )
        record.rows, record.batch, record.tokens = batch, batch, 5
        record.end(None)
        metrics.record(record)
        metrics.count_bytes("native", 10, 20, 0.01, 0.02)
    found = samples(metrics)
    assert found["preblock_requests_total", "m", "ok", "native"] == 4
    assert found["preblock_request_duration_seconds_count", "native"] == 5
    assert found["preblock_request_duration_seconds_sum", "native"] == pytest.approx(5 * 1.2)
    assert found["preblock_request_decode_seconds_total", "native"] == pytest.approx(5 * 0.3)
    assert found["preblock_request_body_read_seconds_total", "native"] == pytest.approx(5 * 0.01)
    assert found["preblock_request_response_write_seconds_total", "native"] == pytest.approx(5 * 0.02)
    assert found["preblock_request_bytes_total", "native"] == 50
    assert found["preblock_response_bytes_total", "native"] == 100
    assert found["preblock_tokens_total", "m"] == 20
    assert found["preblock_tokens_total", "other"] == 5
    assert found["preblock_model_rows_total", "m", "1"] == 1 + 2 + 1 + MAX_BATCH_LABEL + 1
    counts = {key[2]: value for key, value in found.items() if key[:2] == ("preblock_model_stages_total", "m")}
    assert counts == {"1": 2, "2": 1, "more": 1}
    for stage, seconds in (("compute_input", 0.1), ("queue", 0.2), ("compute_infer", 0.3), ("compute_output", 0.4)):
        assert found["preblock_model_stage_seconds_total", "m", "1", stage, "1"] == pytest.approx(2 * seconds)
    assert found["preblock_model_last_request_timestamp_seconds", "m", "1"] == pytest.approx(time.time(), abs=1)
    assert samples(metrics) == found
