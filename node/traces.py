"""A span for each leg on this node and, below it, its segments: made of what the engine reports, outside its steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrelay.engine.legs import Delta, Leg, LegReport
from kvrelay.engine.request import RequestKey
from kvrelay.engine.traces import Tracing
from kvrelay.node.report import Start

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


_Attributes = Mapping[str, str | int]
_NONE: _Attributes = {}


@dataclass(slots=True, eq=False)
class _Leg:
    """A leg that runs here and is sampled."""

    kind: Leg
    span: "Span"
    under: "Context"
    received_at: float
    reported_at: float = 0.0  # when its first own token was heard of
    num_tokens: int = 0


class LegTraces:
    """Belongs to the event loop. Times are the node's clock."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._legs: dict[RequestKey, _Leg] = {}

    def start(self, start: Start, now: float) -> None:
        """A router asks for a leg; what nobody traces is not looked at again."""
        span = self._tracing.start(str(start.leg), now, self._tracing.read(start.trace))
        if not span.is_recording():
            return
        request = start.request
        span.set_attributes(
            {
                "kvrelay.request_id": request.key.request_id,
                "kvrelay.attempt": request.key.attempt,
                "kvrelay.prompt_tokens": len(request.prompt_token_ids),
            }
        )
        self._legs[request.key] = _Leg(start.leg, span, self._tracing.under(span), now)

    def hear(self, delta: Delta, now: float) -> None:
        """What the engine says of a leg."""
        leg = self._legs.get(delta.key)
        if leg is None:
            return
        leg.num_tokens += len(delta.token_ids)
        if delta.report is not None:
            leg.reported_at = now
            self._say_segments(leg, delta.report, now)
        if delta.ended:
            self._end(delta.key, delta.error.code if delta.error else "", now)

    def cancel(self, key: RequestKey, now: float) -> None:
        """Nobody wants the leg any more."""
        self._end(key, "", now, cancelled=True)

    def close(self) -> None:
        """Send what waits, for two seconds at most. Blocking."""
        self._tracing.close()

    def _say_segments(self, leg: _Leg, report: LegReport, now: float) -> None:
        """From the last backwards: each is a duration, and the last one has just ended."""
        leg.span.set_attribute("kvrelay.cached_tokens", report.num_cached_tokens)
        computes_from = now - report.compute_ms / 1e3
        queued_from = computes_from - report.queue_ms / 1e3
        self._segment(leg, "first step" if report.handoff else "compute", computes_from, now)
        self._segment(leg, "queue", queued_from, computes_from)
        if report.handoff is not None:
            handoff = report.handoff
            moved: _Attributes = {
                "kvrelay.kv_bytes": handoff.kv_bytes,
                "kvrelay.kv_blocks": handoff.kv_blocks,
                "kvrelay.cached_blocks": handoff.cached_blocks,
                "kvrelay.transport": handoff.transport,
            }
            granted_at = queued_from - handoff.transfer_ms / 1e3
            self._segment(leg, "transfer", granted_at, queued_from, moved)
            self._segment(leg, "grant", granted_at - handoff.grant_ms / 1e3, granted_at)

    def _segment(self, leg: _Leg, name: str, start: float, end: float, attributes: _Attributes = _NONE) -> None:
        """Never before the leg itself: the report was heard a little later than it was made."""
        start, end = max(start, leg.received_at), max(end, leg.received_at)
        self._tracing.span(name, start, end, leg.under, attributes)

    def _end(self, key: RequestKey, error_code: str, now: float, *, cancelled: bool = False) -> None:
        leg = self._legs.pop(key, None)
        if leg is None:
            return
        if leg.reported_at and leg.kind is not Leg.PREFILL:
            self._segment(leg, "steps", leg.reported_at, now)
        leg.span.set_attributes({"kvrelay.output_tokens": leg.num_tokens, "kvrelay.cancelled": cancelled})
        if error_code:
            from opentelemetry.trace import StatusCode

            leg.span.set_status(StatusCode.ERROR, error_code)
            leg.span.set_attribute("error.type", error_code)
        leg.span.end(self._tracing.nanoseconds(now))
