"""Every error that kvrelay raises on purpose, as one tree.

    KvrelayError
    |- InvalidArgument          the request is wrong, and will be wrong again
    |  |- TooLarge              it can never fit; says the numbers
    |  |- InvalidPrompt         one of several prompts; says which
    |- NotFound                 no such model
    |- Unauthenticated          the cluster secret was not proved
    |- ConfigError              a flag or its combination is wrong
    |- ModelError               a model's files are missing, broken or not supported
    |- PreconditionFailed       two nodes do not fit each other
    |  |- LayoutMismatch        says which field differs, and both values
    |- ResourceExhausted        too much waits already          retryable
    |- Unavailable              a node or a leg was lost        retryable
    |  |- TransferFailed        the hand-off ended without KV   retryable
    |- DeadlineExceeded
    |- Internal                 our own bug, caught at a task's root

`code` goes on the wire (gRPC status name, JSON `code`); `retryable` steers the router. Standard library only.
"""

from typing import ClassVar


class KvrelayError(Exception):
    """An error with a code for the wire."""

    code: ClassVar[str] = "INTERNAL"
    retryable: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(KvrelayError):
    """A field of a request that can never be served as it is."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"{field} = {shown}: {limit}")
        self.field = field
        self.limit = limit


class TooLarge(InvalidArgument):
    """A request that can never fit in this node's KV pool."""


class InvalidPrompt(InvalidArgument):
    """One of several prompts that can never be served as it is: number `index` (from 0)."""

    def __init__(self, index: int, error: InvalidArgument) -> None:
        KvrelayError.__init__(self, f"prompts[{index}]: {error.message}")
        self.index = index
        self.field = error.field
        self.limit = error.limit


class NotFound(KvrelayError):
    """A name that nothing here answers to."""

    code = "NOT_FOUND"


class Unauthenticated(KvrelayError):
    """The other side did not prove that it knows the cluster secret."""

    code = "UNAUTHENTICATED"


class ConfigError(KvrelayError):
    """A flag, or a combination of flags, that cannot work."""

    code = "FAILED_PRECONDITION"


class ModelError(KvrelayError):
    """A model whose files are missing, broken or of a kind that is not supported."""

    code = "FAILED_PRECONDITION"


class PreconditionFailed(KvrelayError):
    """Two sides that cannot work together."""

    code = "FAILED_PRECONDITION"


class LayoutMismatch(PreconditionFailed):
    """Two nodes between whose pools KV cannot travel; names the field."""

    def __init__(self, field: str, prefill: object, decode: object) -> None:
        super().__init__(f"{field} differs: {prefill!r} on the prefill node, {decode!r} on the decode node")
        self.field = field


class ResourceExhausted(KvrelayError):
    """Too much waits already; try again later."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, message: str, retry_s: float = 1.0) -> None:
        """`retry_s`: after how long it is worth while to try again."""
        super().__init__(message)
        self.retry_s = retry_s


class Unavailable(KvrelayError):
    """A node, or one leg of a request, was lost."""

    code = "UNAVAILABLE"
    retryable = True


class TransferFailed(Unavailable):
    """A hand-off ended without the KV; `reason` is the connector's word for why."""

    def __init__(self, reason: str, *, retryable: bool = True) -> None:
        super().__init__(f"hand-off failed: {reason}")
        self.retryable = retryable


class DeadlineExceeded(KvrelayError):
    """The request's deadline passed."""

    code = "DEADLINE_EXCEEDED"


class Internal(KvrelayError):
    """A bug of ours, caught where it fails one request and no other."""


class RemoteError(KvrelayError):
    """An error as another process told it, with that process's code."""

    def __init__(self, code: str, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]
        self.retryable = retryable
