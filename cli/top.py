"""`kvrelay top`: the router and its nodes, live. `top_view` draws; here are the terminal and the waiting."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live

from kvrelay.cli.client import ClusterView, RouterClient
from kvrelay.cli.cluster import look_of
from kvrelay.cli.config import TopConfig
from kvrelay.cli.main import ExitCode
from kvrelay.cli.top_view import Look, render
from kvrelay.engine.errors import KvrelayError

RATE_WINDOW_S = 5.0  # KV travels in bursts
_QUIT = ("q", "Q", "\x04")


def run(config: TopConfig) -> int:
    """Show until the user leaves; one look with --once. Returns: 0. Raises: KvrelayError if that one fails."""
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how one leaves
        asyncio.run(_show(config))
    return ExitCode.OK


async def _show(config: TopConfig) -> None:
    async with RouterClient(config.router) as client:
        watch = _Watch(client, config)
        if config.once:
            await watch.look()
            watch.print()
        elif config.json or not sys.stdout.isatty():
            while True:
                if await watch.try_look():
                    watch.print()
                else:
                    print(f"kvrelay top: {watch.error}", file=sys.stderr, flush=True)
                await asyncio.sleep(config.interval_s)
        else:
            await _live(watch, config)


async def _live(watch: "_Watch", config: TopConfig) -> None:
    """On the terminal's other screen, which goes away with us."""
    console, keys = Console(), _Keys()
    with keys.listening(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not keys.wants_to_quit:
            await watch.try_look()
            next_at = time.monotonic() + config.interval_s
            while not keys.wants_to_quit:
                width, height = console.size
                live.update(watch.rendered(width, height), refresh=True)
                if not await keys.pressed(next_at - time.monotonic()):
                    break


@dataclass(slots=True)
class _Watch:
    """The latest look, and those before it that rates are counted from."""

    client: RouterClient
    config: TopConfig
    told: ClusterView | None = None
    latest: Look | None = None
    error: str = ""
    _looks: deque[Look] = field(default_factory=deque)

    async def look(self) -> None:
        """Raises: KvrelayError."""
        self.told = await self.client.cluster(timeout_s=self.config.timeout_s)
        self._keep(look_of(self.told, time.monotonic()))

    def _keep(self, look: Look) -> None:
        self.latest, self.error = look, ""
        self._looks.append(look)
        while len(self._looks) > 2 and self._looks[1].at_s < look.at_s - RATE_WINDOW_S:
            self._looks.popleft()

    async def try_look(self) -> bool:
        try:
            await self.look()
        except KvrelayError as error:
            self.error = error.message
        return not self.error

    def rendered(self, width: int, height: int | None) -> RenderableType:
        return render(
            self.config.router,
            self.latest,
            self._looks[0] if self._looks else None,
            error=self.error,
            width=width,
            height=height,
        )

    def print(self) -> None:
        if self.config.json:
            print(json.dumps(asdict(self.told)) if self.told else "null", flush=True)
        else:
            console = Console()
            console.print(self.rendered(console.width, None))


class _Keys:
    """What is pressed, and a terminal's new size, while the event loop runs."""

    def __init__(self) -> None:
        self.wants_to_quit = False
        self._happened = asyncio.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Keys come one by one and are not shown, until the block ends."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._happened.set)
        loop.add_signal_handler(signal.SIGTERM, self._quit)
        modes = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
        try:
            if modes:
                tty.setcbreak(sys.stdin)
                loop.add_reader(sys.stdin, self._read)
            yield
        finally:
            if modes:
                loop.remove_reader(sys.stdin)
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, modes)
            loop.remove_signal_handler(signal.SIGWINCH)
            loop.remove_signal_handler(signal.SIGTERM)

    async def pressed(self, timeout_s: float) -> bool:
        """Wait for a key or a new size. Returns: whether there was one in time."""
        self._happened.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0)):
                return await self._happened.wait()
        return False

    def _read(self) -> None:
        key = os.read(sys.stdin.fileno(), 64)
        if not key or any(one in _QUIT for one in key.decode(errors="replace")):
            self._quit()

    def _quit(self) -> None:
        self.wants_to_quit = True
        self._happened.set()
