"""Spans of requests, by OpenTelemetry, sent to a collector by its protocol (OTLP) over HTTP.

Where to, how often, and for whom they are sent is said by the variables `OTEL_…` of its specification.
"""

import os
from functools import partial
from threading import Thread
from time import perf_counter, time_ns

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from preblock.service.core.errors import Invalid
from preblock.service.observability.context import Attributes, Headers, RequestContext, SpanData

PROPAGATOR = TraceContextTextMapPropagator()
NONE = Context()
"""That of a visit whose headers name no trace."""
FIELDS = {name.encode(): name for name in PROPAGATOR.fields}
"""Headers that name a trace."""
FLUSH_SECONDS = 5
"""At the end, for which the last spans are awaited."""
STREAMS = ("decode", "grpc-stream")
"""Protocols whose requests are steps of one visit."""
ALLOWED = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}
"""Variables that could ask for another way than this."""


class Tracing:
    """Makes a span of each visit, and sends them from a thread.

    Args:
        version: of the service.

    Raises:
        Invalid: a variable asks for what there is not, or cannot be read.

    """

    def __init__(self, version: str) -> None:
        for name, allowed in ALLOWED.items():
            if (value := os.environ.get(name, allowed)) not in ("", allowed):
                raise Invalid(name, value, f"{allowed}, or nothing")
        try:
            exporter = BatchSpanProcessor(OTLPSpanExporter())
        except ValueError as error:
            raise Invalid("OTEL_…", str(error), "variables as OpenTelemetry has them") from error
        resource = Resource.create({"service.version": version})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "preblock"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(exporter)
        self._tracer = self._provider.get_tracer("preblock", version)

    def trace(self, visit: RequestContext, headers: Headers, name: str, attributes: Attributes) -> SpanData:
        """Begin to trace a visit, as a part of the trace that its headers name."""
        began = time_ns() - _nanoseconds(perf_counter() - visit.began)
        named = _named(headers)
        parent = PROPAGATOR.extract(named) if named else NONE
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=began)
        tell = partial(_end, span, began, visit) if span.is_recording() else None
        visit.trace = trace = SpanData(span.get_span_context().trace_id, name, {}, tell)
        return trace

    def close(self) -> None:
        """Send what was not sent yet, for a few seconds at most."""
        last = Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(FLUSH_SECONDS)


def _end(span: Span, began: int, visit: RequestContext, trace: SpanData) -> None:
    """End the span of a visit that began at `began`, in nanoseconds."""
    span.update_name(trace.name)
    span.set_attributes(_told(visit, trace) | trace.attributes)
    if trace.failed:
        span.set_status(StatusCode.ERROR)
    span.end(began + _nanoseconds(perf_counter() - visit.began))


def _named(headers: Headers) -> dict[str, list[str]]:
    """Return what headers say of a trace."""
    said: dict[str, list[str]] = {}
    for header, value in headers:
        if header in FIELDS:
            said.setdefault(FIELDS[header], []).append(value.decode("latin-1"))
    return said


def _told(visit: RequestContext, trace: SpanData) -> dict[str, str | int | float]:
    """Return what a span says of any request."""
    told: dict[str, str | int | float] = {"preblock.request_id": visit.text}
    if visit.protocol:
        told["preblock.protocol"] = visit.protocol
    if trace.runs:
        told |= {"preblock.rows": trace.rows, "preblock.tokens": trace.tokens}
    if visit.protocol in STREAMS:
        told["preblock.steps"] = trace.runs
    else:
        told |= {f"preblock.{stage}_seconds": seconds for stage, seconds in visit.stages().items()}
    return told


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
