"""The page at /: its files, and the feed that it draws from. The page is anyone's; what it shows asks for a key."""

from contextlib import aclosing
from importlib.resources import files

import msgspec

from kvrelay.router.http.app import HttpRoute
from kvrelay.router.http.call import Call
from kvrelay.router.live import LiveFeed

_KINDS = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
}
_NAMES = ("index.html", "page.css", "page.js", "feed.js", "view.js", "timeline.js", "prompt.js", "key.js")
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        b"form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class Page:
    """The page's routes."""

    def __init__(self, feed: LiveFeed, model: str, *, has_chat_template: bool) -> None:
        self._feed = feed
        self._about = b"event: about\ndata: %b\n\n" % msgspec.json.encode({"model": model, "chat": has_chat_template})

    def routes(self) -> list[HttpRoute]:
        folder = files("kvrelay.router.http") / "assets"
        static = [
            _File((folder / name).read_bytes(), _KINDS[name.rpartition(".")[2]]).route(
                "/" if name == "index.html" else f"/page/{name}"
            )
            for name in _NAMES
        ]
        return [*static, HttpRoute(path="/live", method="GET", handler=self._live)]

    async def _live(self, call: Call, body: bytes) -> None:
        async with call.while_connected(), aclosing(self._feed.watch()) as watched:
            about = self._about
            async for change in watched:
                event = b": still here\n\n" if change is None else b"data: %b\n\n" % msgspec.json.encode(change)
                await call.stream(about + event)
                about = b""


class _File:
    """One file of the page, read once."""

    def __init__(self, content: bytes, kind: bytes) -> None:
        self._content, self._kind = content, kind

    def route(self, path: str) -> HttpRoute:
        return HttpRoute(path=path, method="GET", handler=self._answer, is_open=True)

    async def _answer(self, call: Call, body: bytes) -> None:
        await call.answer(self._content, kind=self._kind, headers=_HEADERS)
