"""What headers say of a trace, and what is ignored."""

import pytest

from kvrelay.engine.legs import TraceContext
from kvrelay.router.trace_context import read_headers

TRACE = f"{'1' * 32}-{'2' * 16}-01"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], None),
        ([("traceparent", f"00-{TRACE}")], TraceContext(f"00-{TRACE}")),
        ([("tracestate", "a=1"), ("traceparent", f" 00-{TRACE} ")], TraceContext(f"00-{TRACE}", "a=1")),
        ([("traceparent", f"01-{TRACE}-more")], TraceContext(f"00-{TRACE}")),  # a later version, as far as we know it
        ([("traceparent", f"01-{TRACE}more")], None),
        ([("traceparent", f"00-{TRACE}-more")], None),
        ([("traceparent", f"ff-{TRACE}")], None),
        ([("traceparent", f"00-{'0' * 32}-{'2' * 16}-01")], None),
        ([("traceparent", "junk"), ("tracestate", "a=1")], None),
        ([("traceparent", "")], None),
        ([("tracestate", "a=1")], None),
        ([("traceparent", f"00-{TRACE}"), ("tracestate", "a" * 513)], TraceContext(f"00-{TRACE}")),
        ([("traceparent", f"00-{TRACE}"), ("tracestate", "\u00e9")], TraceContext(f"00-{TRACE}")),
    ],
)
def test_a_header_that_makes_no_sense_is_ignored(headers: list[tuple[str, str]], expected: TraceContext | None) -> None:
    assert read_headers(headers) == expected
