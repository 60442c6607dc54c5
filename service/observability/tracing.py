"""Spans of requests by OpenTelemetry, exported to a collector by OTLP over HTTP.

The standard variables `OTEL_…` set the collector's address, the export interval and the sampling.
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
NO_PARENT = Context()
TRACE_HEADERS = {name.encode(): name for name in PROPAGATOR.fields}
FLUSH_TIMEOUT_SECONDS = 5
"""Maximum time to export the last spans at the end."""
STREAMS = ("decode", "grpc-stream")
"""Protocols with several steps in one request context."""
ALLOWED = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}
"""The only supported value of each of these variables."""


class Tracing:
    """Makes a span for each request, and exports spans in a thread.

    Args:
        version: of the service.

    Raises:
        Invalid: an `OTEL_…` variable has an unsupported or invalid value.

    """

    def __init__(self, version: str) -> None:
        for name, allowed in ALLOWED.items():
            if (value := os.environ.get(name, allowed)) not in ("", allowed):
                raise Invalid(name, value, f"{allowed}, or nothing")
        try:
            exporter = BatchSpanProcessor(OTLPSpanExporter())
        except ValueError as error:
            raise Invalid("OTEL_…", str(error), "values of OpenTelemetry's specification") from error
        resource = Resource.create({"service.version": version})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "preblock"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(exporter)
        self._tracer = self._provider.get_tracer("preblock", version)

    def trace(self, context: RequestContext, headers: Headers, name: str, attributes: Attributes) -> SpanData:
        """Start a span for a request, as a child of the trace in its headers."""
        began = time_ns() - _nanoseconds(perf_counter() - context.began)
        carrier: dict[str, list[str]] = {}
        for header, value in headers:
            if header in TRACE_HEADERS:
                carrier.setdefault(TRACE_HEADERS[header], []).append(value.decode("latin-1"))
        parent = PROPAGATOR.extract(carrier) if carrier else NO_PARENT
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=began)
        on_end = partial(_end, span, began, context) if span.is_recording() else None
        number = span.get_span_context().trace_id
        context.trace = trace = SpanData(f"{number:032x}" if number else "", name, {}, on_end)
        return trace

    def close(self) -> None:
        """Export the remaining spans, within `FLUSH_TIMEOUT_SECONDS`."""
        shutdown = Thread(target=self._provider.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(FLUSH_TIMEOUT_SECONDS)


def _end(span: Span, began: int, context: RequestContext, trace: SpanData) -> None:
    """End the span of a request; `began` is its start in nanoseconds."""
    span.update_name(trace.name)
    span.set_attribute("preblock.request_id", context.text)
    if context.protocol:
        span.set_attribute("preblock.protocol", context.protocol)
    if trace.runs:
        span.set_attributes({"preblock.rows": trace.rows, "preblock.tokens": trace.tokens})
    if context.protocol in STREAMS:
        span.set_attribute("preblock.steps", trace.runs)
    else:
        span.set_attributes({f"preblock.{stage}_seconds": seconds for stage, seconds in context.stages().items()})
    span.set_attributes(trace.attributes)
    if trace.failed:
        span.set_status(StatusCode.ERROR)
    span.end(began + _nanoseconds(perf_counter() - context.began))


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
