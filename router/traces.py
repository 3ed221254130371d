"""A span for each request, and the context under which the nodes hang theirs."""

from typing import TYPE_CHECKING

from kvrelay.engine.legs import TraceContext
from kvrelay.engine.request import Request, RequestKey
from kvrelay.engine.traces import Tracing
from kvrelay.router.api import Output, Summary, Timings
from kvrelay.router.policy import Placement

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_OPERATION = "text_completion"  # OpenTelemetry's word; chats are texts, too, when they come here
_GOOD = frozenset({"stop", "length", "LEFT"})  # who leaves is no error of ours


class RequestTraces:
    """A RequestObserver; `begin` tells it of a request before it is placed. Belongs to the event loop."""

    def __init__(self, tracing: Tracing, model: str) -> None:
        self._tracing = tracing
        self._model = model
        self._spans: dict[RequestKey, Span] = {}
        self._summaries: dict[RequestKey, Summary] = {}

    def begin(self, request: Request, trace: TraceContext | None) -> TraceContext:
        """Returns: the context of the request's own span, for the nodes."""
        from opentelemetry.trace import SpanKind

        parent = self._tracing.read(trace)
        span = self._tracing.start(f"{_OPERATION} {self._model}", request.arrival, parent, kind=SpanKind.SERVER)
        self._spans[request.key] = span
        span.set_attributes(
            {
                "gen_ai.operation.name": _OPERATION,
                "gen_ai.request.model": self._model,
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "kvrelay.request_id": request.key.request_id,
                "kvrelay.attempt": request.key.attempt,
            }
        )
        return self._tracing.write(span)

    def started(self, request: Request, placement: Placement, trace: TraceContext | None) -> None:
        span = self._spans[request.key]
        if placement.prefill is not None:
            span.set_attribute("kvrelay.prefill_node", placement.prefill.facts.name)
        span.set_attribute("kvrelay.decode_node", placement.decode.facts.name)

    def output(self, request: Request, output: Output, now: float) -> None:
        if output.summary is not None:
            self._summaries[request.key] = output.summary

    def ended(self, request: Request, outcome: str, timings: Timings, now: float) -> None:
        from opentelemetry.trace import StatusCode

        span = self._spans.pop(request.key)
        summary = self._summaries.pop(request.key, None)
        if not span.is_recording():
            return
        span.set_attribute("kvrelay.outcome", outcome)
        if summary is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [outcome])
            span.set_attribute("gen_ai.usage.output_tokens", summary.usage.completion_tokens)
            span.set_attribute("kvrelay.cached_tokens", summary.usage.cached_tokens)
        if outcome not in _GOOD:
            span.set_status(StatusCode.ERROR, outcome)
            span.set_attribute("error.type", outcome)
        if timings.route_ms:
            routed = request.arrival + timings.route_ms / 1e3
            self._tracing.span("route", request.arrival, routed, self._tracing.under(span), {})
        for name, after_ms in (("first_token", timings.ttft_ms), ("second_token", timings.second_token_ms)):
            if after_ms:
                span.add_event(name, timestamp=self._tracing.nanoseconds(request.arrival + after_ms / 1e3))
        span.end(self._tracing.nanoseconds(now))

    def close(self) -> None:
        """Send what waits, for two seconds at most. Blocking."""
        self._tracing.close()
