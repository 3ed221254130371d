"""The router's HTTP edge: OpenAI's API, tokens, health, on the same path as gRPC."""

import time
from collections.abc import Callable

from kvrelay.router.http.app import HttpApi, make_app
from kvrelay.router.http.server import HttpServer
from kvrelay.router.keys import ApiKeys
from kvrelay.router.service import InferenceService

__all__ = ["HttpServer", "make_http"]


def make_http(service: InferenceService, keys: ApiKeys, render_metrics: Callable[[], bytes]) -> HttpServer:
    """The server with all its routes."""
    routes = HttpApi(service, render_metrics, int(time.time())).routes()
    return HttpServer(make_app(service, keys, routes), service.config.max_connections)
