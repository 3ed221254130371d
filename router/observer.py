"""Who is told of each request's life: metrics, the live page, traces. They count and keep; they never wait."""

from typing import Protocol

from kvrelay.engine.legs import TraceContext
from kvrelay.engine.request import Request
from kvrelay.router.api import Output, Timings
from kvrelay.router.policy import Placement


class RequestObserver(Protocol):
    """Called on the event loop, in order, for each request: `started` once it is placed, `output` for each output,
    `ended` last and always, though nothing came before it. None of them raises, and each costs next to nothing."""

    def started(self, request: Request, placement: Placement, trace: TraceContext | None) -> None:
        """Its legs are being started."""

    def output(self, request: Request, output: Output, now: float) -> None:
        """This goes to the client now; the last one has a summary."""

    def ended(self, request: Request, outcome: str, timings: Timings, now: float) -> None:
        """`outcome`: a FinishReason, an error's code, or LEFT (cancelled, out of time). Without a summary the times are
        those that are known."""
