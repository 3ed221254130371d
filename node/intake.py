"""The way of starts and cancels to the engine thread. Where an output is to have a form, that is compiled on the way.

Compiling takes from under a millisecond to a third of a second. It has a thread of its own, so that no other request
waits; what is said of a request meanwhile waits with it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from kvrelay.engine.errors import Internal, KvrelayError, ResourceExhausted
from kvrelay.engine.legs import Delta
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import RequestKey, StructuredOutput
from kvrelay.engine.structured_output import FormCompiler
from kvrelay.node.core import NodeCore
from kvrelay.node.engine_thread import EngineThread
from kvrelay.node.report import Start

log = get_logger(__name__)

THREAD_NAME = "kvrelay-forms"
MAX_COMPILING = 1024  # starts whose forms wait for the compiler


@dataclass(slots=True, eq=False)
class _Compiling:
    """A start whose form is being compiled, and which of its choices were cancelled since."""

    task: "asyncio.Task[None]"
    cancelled: list[int] = field(default_factory=list)


class Intake:
    """Belongs to the event loop."""

    def __init__(
        self, core: NodeCore, engine: EngineThread, compiler: FormCompiler, say: Callable[[Delta], None]
    ) -> None:
        """`say`: tells whoever asked that a leg has ended before it reached the engine."""
        self._core = core
        self._engine = engine
        self._compiler = compiler
        self._say = say
        self._thread = ThreadPoolExecutor(1, THREAD_NAME)
        self._compiling: dict[RequestKey, _Compiling] = {}

    @property
    def num_compiling(self) -> int:
        """Starts that have not reached the engine."""
        return len(self._compiling)

    def start(self, start: Start) -> None:
        """Raises: ResourceExhausted."""
        key, form = start.request.key, start.request.sampling.structured_output
        if form is None:
            self._engine.post(partial(self._core.start, start))
            return
        if len(self._compiling) >= MAX_COMPILING:
            raise ResourceExhausted(f"{MAX_COMPILING} forms of structured outputs wait to be compiled on this node")
        if key not in self._compiling:
            self._compiling[key] = _Compiling(asyncio.create_task(self._compile(start, form)))

    def cancel(self, key: RequestKey, choice: int | None = None) -> None:
        """Raises: ResourceExhausted."""
        compiling = self._compiling.get(key)
        if compiling is None:
            self._engine.post(partial(self._core.cancel, key, choice))
        elif choice is not None:
            compiling.cancelled.append(choice)
        else:
            self._compiling.pop(key).task.cancel()

    def close(self) -> None:
        """Compile nothing more; the one that is being compiled ends in its own time."""
        for compiling in self._compiling.values():
            compiling.task.cancel()
        self._compiling.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, start: Start, form: StructuredOutput) -> None:
        request, key = start.request, start.request.key
        compile_form = partial(self._compiler.compile, form, request.output_token_ids)
        try:
            try:
                matcher = await asyncio.get_running_loop().run_in_executor(self._thread, compile_form)
            finally:
                compiling = self._compiling.pop(key, None)
            self._engine.post(partial(self._core.start, replace(start, matcher=matcher)))
            for choice in compiling.cancelled if compiling else ():
                self._engine.post(partial(self._core.cancel, key, choice))
        except KvrelayError as error:
            self._say(Delta(key=key, error=error, ended=True))
        except Exception as error:  # the root of a request: it fails this one
            log.exception("form_failed", extra=fields(request_id=key.request_id, attempt=key.attempt))
            self._say(Delta(key=key, error=Internal(f"structured output: {error}"), ended=True))
