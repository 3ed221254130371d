"""Logging: stable event names, values as fields, readable on a terminal or as JSON. Standard library only.

log = get_logger(__name__)
log.info("kv_handoff_failed", extra=fields(request_id=..., attempt=0, reason="PEER_LOST"))
"""

import json
import logging
import sys
import time
from typing import Any

_FIELDS = "kvrelay_fields"


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def fields(**values: Any) -> dict[str, Any]:
    """The `extra` of a log call: values with names, units last in the name."""
    return {_FIELDS: values}


class _Formatter(logging.Formatter):
    def __init__(self, node: str, as_json: bool) -> None:
        super().__init__()
        self._node = node
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = getattr(record, _FIELDS, {})
        error = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            line = {
                "time": record.created,
                "level": record.levelname,
                "node": self._node,
                "event": record.getMessage(),
                **values,
            }
            if error:
                line["error"] = error
            return json.dumps(line, default=str)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        shown = " ".join(f"{name}={_shown(value)}" for name, value in values.items())
        text = (
            f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._node} {record.getMessage()} {shown}".rstrip()
        )
        return f"{text}\n{error}" if error else text


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text) if not text or any(c.isspace() for c in text) else text


def configure(node: str, *, as_json: bool = False, level: int = logging.INFO) -> None:
    """Send kvrelay's events to standard error. Called once, by a process's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(node, as_json))
    root = logging.getLogger("kvrelay")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
