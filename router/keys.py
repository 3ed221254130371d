"""API keys: who may call. Both edges ask here; nodes prove the cluster secret instead."""

import hmac
import os
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import grpc

from kvrelay.engine.errors import Unauthenticated

API_KEYS = "KVRELAY_API_KEY"
_BEARER = "bearer "
_GUARDED = ("/kvrelay.v1.Inference/", "/kvrelay.v1.Cluster/")


class ApiKeys:
    """The keys that open the router; without any it is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def of(cls, configured: Iterable[str]) -> "ApiKeys":
        """Those of the flag, and those of the environment, which other users do not see; there commas part them."""
        from_environment = os.environ.get(API_KEYS, "").split(",")
        return cls([*configured, *filter(None, map(str.strip, from_environment))])

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, authorization: str) -> None:
        """`authorization`: the header's value, "Bearer KEY". How long it takes says nothing of the keys.

        Raises: Unauthenticated.
        """
        if not self._digests:
            return
        given = _digest(authorization[len(_BEARER) :] if authorization[: len(_BEARER)].lower() == _BEARER else "")
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise Unauthenticated("an API key is needed: authorization: Bearer KEY")


class AskForKey(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Asks for a key whoever calls what clients call; nodes prove the cluster secret, and health is open."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method.startswith(_GUARDED):
            metadata = dict(handler_call_details.invocation_metadata or ())
            try:
                self._keys.check(str(metadata.get("authorization", "")))
            except Unauthenticated as error:
                return _refuser(error)
        return await continuation(handler_call_details)


def _refuser(error: Unauthenticated) -> Any:
    """Answers any call, of whatever kind, with this error."""

    async def refuse(body: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        context.set_code(grpc.StatusCode.UNAUTHENTICATED)
        context.set_details(error.message)

    return grpc.unary_stream_rpc_method_handler(refuse)


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()
