"""The router's HTTP edge: OpenAI's API, tokens, health, the live page, on the same path as gRPC."""

import time
from collections.abc import Callable

from kvrelay.router.http.app import HttpApi, make_app
from kvrelay.router.http.page import Page
from kvrelay.router.http.server import HttpServer
from kvrelay.router.keys import ApiKeys
from kvrelay.router.live import LiveFeed
from kvrelay.router.service import InferenceService

__all__ = ["HttpServer", "make_http"]


def make_http(
    service: InferenceService, keys: ApiKeys, render_metrics: Callable[[], bytes], feed: LiveFeed
) -> HttpServer:
    """The server with all its routes."""
    page = Page(feed, service.info.name, has_chat_template=service.has_chat_template)
    routes = [*HttpApi(service, render_metrics, int(time.time())).routes(), *page.routes()]
    return HttpServer(make_app(service, keys, routes), service.config.max_connections)
