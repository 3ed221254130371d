"""An OpenTelemetry collector on loopback: takes spans over OTLP's HTTP, and answers as the test says."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_S = 30.0


@dataclass(frozen=True)
class Span:
    """One span as it came, and the process that sent it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[str]
    is_error: bool
    state: str


@dataclass
class Collector:
    """All spans so far."""

    status: int = 200
    spans: list[Span] = field(default_factory=list)
    num_posts: int = 0
    url: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = str(_attributes(resource.resource.attributes)["service.name"])
            for scope in resource.scope_spans:
                self.spans += [_span(service, span) for span in scope.spans]

    def wait(self, trace_id: str, names: set[str]) -> list[Span]:
        """Until a trace has spans of all these names. Returns: all of the trace."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.trace_id == trace_id]

        with self.changed:
            arrived = self.changed.wait_for(lambda: names <= {span.name for span in found()}, WAIT_S)
            assert arrived, f"{names - {span.name for span in found()}} did not come; {found()}"
            return found()

    def wait_for_posts(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_posts >= count, WAIT_S)


@contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    collector = Collector(status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            with collector.changed:
                collector.num_posts += 1
                if collector.status == 200:
                    collector.take(body)
                collector.changed.notify_all()
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _span(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[event.name for event in span.events],
        is_error=span.status.code == 2,
        state=span.trace_state,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
