"""W3C's trace context as headers bear it: what makes no sense there is ignored, as the standard asks."""

import re
from collections.abc import Iterable

from kvrelay.engine.legs import TraceContext

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
MAX_TRACEPARENT = 55
MAX_TRACESTATE = 512
_NAMES = ("traceparent", "tracestate")


def is_tracestate(text: str) -> bool:
    return len(text) <= MAX_TRACESTATE and text.isascii() and text.isprintable()


def read_headers(headers: Iterable[tuple[str, str]]) -> TraceContext | None:
    """Of headers with names in lower case. A later version than ours may have more behind what we know."""
    found = {name: value.strip() for name, value in headers if name in _NAMES}
    given = found.get("traceparent", "")
    known, rest = given[:MAX_TRACEPARENT], given[MAX_TRACEPARENT:]
    if not TRACEPARENT.fullmatch(known) or (rest and (known.startswith("00") or not rest.startswith("-"))):
        return None
    state = found.get("tracestate", "")
    return TraceContext(f"00{known[2:]}", state if is_tracestate(state) else "")
