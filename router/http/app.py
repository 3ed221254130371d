"""The routes. Each is guarded, read, served and answered in one place; what they do is elsewhere."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvrelay import __version__
from kvrelay.router.api import RawPrompt
from kvrelay.router.http.answers import Health, Model, ModelList, Text, Tokens
from kvrelay.router.http.call import Call, answering
from kvrelay.router.http.errors import HttpError, body_of
from kvrelay.router.http.generate import Generation
from kvrelay.router.http.openapi import make_document
from kvrelay.router.http.read import BadBody, decode_body, read_messages
from kvrelay.router.http.schema import DetokenizeRequest, TokenizeRequest
from kvrelay.router.keys import ApiKeys
from kvrelay.router.service import InferenceService

METRICS = b"text/plain; version=0.0.4; charset=utf-8"  # Prometheus's form of text

Handler = Callable[[Call, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRoute:
    """A path, how it is called, and what serves it. An open one asks for no key: it tells nothing that is anyone's."""

    path: str
    method: str
    handler: Handler
    is_open: bool = False


class HttpApi:
    """The routes, but for the page's."""

    def __init__(self, service: InferenceService, render_metrics: Callable[[], bytes], started_at_unix_s: int) -> None:
        """`render_metrics`: what Prometheus reads."""
        self._service = service
        self._render_metrics = render_metrics
        self._started_at = started_at_unix_s
        fingerprint = f"kvrelay-{__version__}-{service.info.fingerprint[:8]}"
        self._generation = Generation(service, fingerprint)

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute(path="/v1/completions", method="POST", handler=self._generation.complete),
            HttpRoute(path="/v1/chat/completions", method="POST", handler=self._generation.chat),
            HttpRoute(path="/v1/models", method="GET", handler=self._list_models),
            HttpRoute(path="/tokenize", method="POST", handler=self._tokenize),
            HttpRoute(path="/detokenize", method="POST", handler=self._detokenize),
            HttpRoute(path="/health", method="GET", handler=self._health, is_open=True),
            HttpRoute(path="/metrics", method="GET", handler=self._metrics),
            HttpRoute(path="/openapi.json", method="GET", handler=self._describe),
        ]

    async def _list_models(self, call: Call, body: bytes) -> None:
        service = self._service
        await call.answer_json(ModelList([Model(service.info.name, self._started_at, service.max_model_len())]))

    async def _tokenize(self, call: Call, body: bytes) -> None:
        asked = decode_body(body, TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise BadBody("prompt", "one of prompt and messages is needed")
        messages = None if asked.messages is None else read_messages(asked.messages)
        with self._service.admission.admit():
            prompt = RawPrompt(text=asked.prompt, messages=messages)
            token_ids = await self._service.tokenize(asked.model, prompt)
        await call.answer_json(Tokens(list(token_ids), len(token_ids), self._service.max_model_len()))

    async def _detokenize(self, call: Call, body: bytes) -> None:
        asked = decode_body(body, DetokenizeRequest)
        with self._service.admission.admit():
            text = await self._service.detokenize(
                asked.model, asked.tokens, skip_special_tokens=asked.skip_special_tokens
            )
        await call.answer_json(Text(text))

    async def _health(self, call: Call, body: bytes) -> None:
        if not self._service.is_serving:
            raise HttpError(503, "not_serving", "no decode node is there, or this router is shutting down")
        await call.answer_json(Health("ok"))

    async def _metrics(self, call: Call, body: bytes) -> None:
        await call.answer(self._render_metrics(), kind=METRICS)

    async def _describe(self, call: Call, body: bytes) -> None:
        await call.answer(make_document(self._service.info.name))


class Guarded:
    """A route as an ASGI application: key, body, handler, and whatever goes wrong, as an answer."""

    def __init__(self, route: HttpRoute, keys: ApiKeys, service: InferenceService) -> None:
        self._route = route
        self._keys = keys
        self._config = service.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        async with answering(call):
            if not self._route.is_open:
                self._keys.check(call.header(b"authorization").decode("latin-1"))
            body = await call.read_body(self._config.max_body_bytes, self._config.http_body_timeout_s)
            await self._route.handler(call, body)


def make_app(service: InferenceService, keys: ApiKeys, routes: Sequence[HttpRoute]) -> Starlette:
    """`routes`: all of them."""
    config = service.config
    middleware = []
    if config.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
            )
        )
    return Starlette(
        routes=[Route(route.path, Guarded(route, keys, service), methods=[route.method]) for route in routes],
        middleware=middleware,
        exception_handlers={404: _no_route, 405: _no_route},
    )


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "no such path" if status == 404 else f"{request.method} is not how this path is called"
    code = "unknown_path" if status == 404 else "unknown_method"
    return Response(
        body_of(HttpError(status, code, what)),
        status,
        headers=dict(getattr(error, "headers", None) or {}),
        media_type="application/json",
    )
