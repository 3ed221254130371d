"""How a gRPC call ends: errors to status codes, in one place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvrelay.engine.errors import DeadlineExceeded, KvrelayError, ResourceExhausted
from kvrelay.engine.log import get_logger

log = get_logger(__name__)

# gRPC's own name for "try again after this long", in milliseconds.
_RETRY_HINT = ("grpc-retry-pushback-ms", "1000")

Context = grpc.aio.ServicerContext[Any, Any]


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """The root of a call: whatever goes wrong inside fails this call, with its code, and no other."""
    try:
        yield
    except KvrelayError as error:
        hint = (_RETRY_HINT,) if isinstance(error, ResourceExhausted) else ()
        await context.abort(status_code(error.code), error.message, hint)
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise  # gRPC's own: an answer that was given, a write to a caller that is gone
    except Exception:
        log.exception("call_failed")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the router's log has it")


@asynccontextmanager
async def ending_after(timeout_s: float) -> AsyncIterator[None]:
    """Raises: DeadlineExceeded when the time is up."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"not finished within {timeout_s:.3g} s") from None


def status_code(code: str) -> grpc.StatusCode:
    """gRPC's status of that name; a name that gRPC does not know (a peer said it) is INTERNAL."""
    return grpc.StatusCode.__members__.get(code, grpc.StatusCode.INTERNAL)
