"""How a gRPC call ends: errors to status codes, in one place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvrelay.engine.errors import DeadlineExceeded, KvrelayError, ResourceExhausted
from kvrelay.engine.log import get_logger

log = get_logger(__name__)

# gRPC's own name for "try again after this long", in milliseconds; its clients' retry policies obey it.
RETRY_HINT = "grpc-retry-pushback-ms"

# gRPC writes a status message as a header, up to twelve bytes a character, and headers have 8 KiB in all.
_MAX_DETAILS = 500

Context = grpc.aio.ServicerContext[Any, Any]


class AnswerCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """The root of every call with one request, which is read in here: one that cannot be read (no protobuf, a string
    that is not UTF-8) is the client's mistake, and gRPC would take it for the server's."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        answer = handler.unary_stream or handler.unary_unary

        async def read_and_answer(body: bytes, context: Context) -> Any:
            async with answering(context):
                return await answer(handler.request_deserializer(body), context)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(read_and_answer, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(read_and_answer, None, handler.response_serializer)


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """The root of a call: whatever goes wrong inside fails this call, with its code, and no other.

    The status is set, and no exception raised: `context.abort` would keep one, and with it the request, in a reference
    cycle until the garbage collector comes by.
    """
    try:
        yield
    except KvrelayError as error:
        if isinstance(error, ResourceExhausted):
            context.set_trailing_metadata(((RETRY_HINT, str(round(1000 * error.retry_s))),))
        _fail(context, status_code(error.code), error.message)
    except DecodeError as error:
        _fail(context, grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be read: {error}")
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise  # gRPC's own: an answer that its health service gave, a write to a caller that is gone
    except Exception:
        log.exception("call_failed")
        _fail(context, grpc.StatusCode.INTERNAL, "internal error; the router's log has it")


async def begin_answer(context: Context) -> None:
    """Send a stream's headers, to be called before its first message, and see that they are out even if the caller is
    cancelled meanwhile.

    The first write would send them too. But if that is cancelled, gRPC sends them once more with the status, refuses
    the whole for it, and the client waits for ever (grpcio 1.85). Headers have no flow control: they do not wait.
    """
    sending = asyncio.ensure_future(context.send_initial_metadata(()))
    try:
        await asyncio.shield(sending)
    except asyncio.CancelledError:
        await asyncio.wait([sending])
        raise


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


def _fail(context: Context, code: grpc.StatusCode, message: str) -> None:
    context.set_code(code)
    context.set_details(message if len(message) <= _MAX_DETAILS else f"{message[: _MAX_DETAILS - 3]}...")
