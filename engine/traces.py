"""OpenTelemetry's exporter of one process. Without an endpoint nothing of OpenTelemetry is imported.

Spans wait in a bounded queue and are sent by a thread of their own: a collector that is gone or slow costs spans, no
request. Who is sampled is the client's word where it sends a traceparent, else OTEL_TRACES_SAMPLER's, else everybody.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.legs import TraceContext
from kvrelay.engine.log import fields, get_logger

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

log = get_logger(__name__)

_SEND_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 2.0
_PATH = "/v1/traces"


def check_endpoint(endpoint: str) -> None:
    """Raises: ConfigError."""
    parts = urlsplit(endpoint)
    if endpoint and (parts.scheme not in ("http", "https") or not parts.netloc):
        raise ConfigError(f"otlp_endpoint = {endpoint!r}: must be a URL such as http://127.0.0.1:4318")


class Tracing:
    """Makes spans of times on this process's clock, and sends them. Any thread."""

    def __init__(self, endpoint: str, service: str, instance: str, clock: Clock) -> None:
        """`service` and `instance`: what the process is, and which one. Raises: ConfigError where OpenTelemetry is not
        installed."""
        try:
            from opentelemetry.context import Context
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError("otlp_endpoint: needs OpenTelemetry, pip install 'kvrelay[otel]'") from error
        _complain_once(endpoint)
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_SEND_TIMEOUT_S)))
        self._tracer = self._provider.get_tracer("kvrelay")
        self._propagator = TraceContextTextMapPropagator()
        self._make_context, self._set_span = Context, set_span_in_context
        self._offset = time.time() - clock.now()  # taken once: spans of one process keep their distances

    def start(self, name: str, at: float, parent: "Context", **more: Any) -> "Span":
        """A span that is to be ended. `parent`: of `read` or `under`."""
        return self._tracer.start_span(name, context=parent, start_time=self.nanoseconds(at), **more)

    def span(self, name: str, start: float, end: float, parent: "Context", attributes: Mapping[str, str | int]) -> None:
        """A span that is over."""
        self.start(name, start, parent, attributes=attributes).end(self.nanoseconds(max(start, end)))

    def nanoseconds(self, at: float) -> int:
        """Of the wall clock, at a moment of this process's clock."""
        return int((at + self._offset) * 1e9)

    def read(self, trace: TraceContext | None) -> "Context":
        """Another's context; an empty one where there is none that makes sense."""
        if trace is None:
            return self._make_context()
        carrier = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
        return self._propagator.extract(carrier, context=self._make_context())

    def under(self, span: "Span") -> "Context":
        """The context of what belongs to a span."""
        return self._set_span(span, self._make_context())

    def write(self, span: "Span") -> TraceContext:
        """The same, for another process."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self.under(span))
        return TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))

    def close(self) -> None:
        """Send what waits, for two seconds at most. Blocking."""
        closing = threading.Thread(target=self._provider.shutdown, name="kvrelay-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


class _OneLine(logging.Handler):
    """The first complaint of OpenTelemetry's loggers as a line of ours; the others are dropped."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._has_said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_said:
            self._has_said = True
            log.warning("traces_not_sent", extra=fields(endpoint=self._endpoint, reason=record.getMessage()[:200]))


def _complain_once(endpoint: str) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers = [_OneLine(endpoint)]
