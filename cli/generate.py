"""`kvrelay generate`: prompts in, answers out, as they come."""

import asyncio
import json
import sys
from dataclasses import asdict

from kvrelay.cli import report
from kvrelay.cli.client import Piece, RouterClient
from kvrelay.cli.config import GenerateConfig
from kvrelay.cli.main import ExitCode, exit_code
from kvrelay.engine.errors import KvrelayError

MAX_AT_ONCE = 32


def run(config: GenerateConfig) -> int:
    """Ask, and show every answer. Returns: 0, or the exit code of the first error; the other prompts still run."""
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in config.prompt]
    return asyncio.run(_generate(config, prompts))


async def _generate(config: GenerateConfig, prompts: list[str]) -> int:
    code: int = ExitCode.OK
    gate = asyncio.Semaphore(MAX_AT_ONCE)
    async with RouterClient(config.router) as client:
        answers = [Answer(client, config, prompt, gate) for prompt in prompts]
        try:
            for index, answer in enumerate(answers):
                error = await (_print_json(index, answer) if config.json else _print_text(index, answer))
                if error:
                    code = code or exit_code(error)
                elif config.timings:
                    print(
                        *report.describe(answer.last.usage, answer.last.timings, answer.last.handoff),
                        sep="\n",
                        file=sys.stderr,
                    )
        finally:
            await asyncio.gather(*(answer.cancel() for answer in answers))
    return code


class Answer:
    """One prompt's answer as it comes in, from its construction on."""

    def __init__(self, client: RouterClient, config: GenerateConfig, prompt: str, gate: asyncio.Semaphore) -> None:
        self.last = Piece(text="", token_ids=())
        # Not bounded: the model's context bounds an answer, and answers behind the one that is shown must not stall.
        self._pieces: asyncio.Queue[Piece | KvrelayError | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._fetch(client, config, prompt, gate))

    async def _fetch(self, client: RouterClient, config: GenerateConfig, prompt: str, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                async for piece in client.generate(
                    prompt,
                    raw=config.raw,
                    model=config.model,
                    sampling=config.sampling(),
                    priority=config.priority,
                    timeout_s=config.timeout_s,
                ):
                    self._pieces.put_nowait(piece)
            self._pieces.put_nowait(None)
        except KvrelayError as error:
            self._pieces.put_nowait(error)

    async def next(self) -> Piece | None:
        """The next piece; None after the last. Raises: KvrelayError."""
        piece = await self._pieces.get()
        if isinstance(piece, KvrelayError):
            raise piece
        self.last = piece or self.last
        return piece

    async def cancel(self) -> None:
        """Stop it, if it still runs; the router learns of it."""
        self._task.cancel()
        await asyncio.wait([self._task])


async def _print_text(index: int, answer: Answer) -> KvrelayError | None:
    if index:
        print()
    try:
        while piece := await answer.next():
            print(piece.text, end="", flush=True)
    except KvrelayError as error:
        print(f"\nkvrelay generate: prompt {index + 1}: {error}", file=sys.stderr)
        return error
    print(flush=True)
    return None


async def _print_json(index: int, answer: Answer) -> KvrelayError | None:
    text, token_ids = "", list[int]()
    failed: KvrelayError | None = None
    try:
        while piece := await answer.next():
            text += piece.text
            token_ids += piece.token_ids
    except KvrelayError as error:
        failed = error
    last = answer.last
    result = {
        "index": index,
        "text": text,
        "token_ids": token_ids,
        "finish_reason": last.finish_reason,
        "usage": asdict(last.usage) if last.usage else None,
        "timings": asdict(last.timings) if last.timings else None,
        "handoff": asdict(last.handoff) if last.handoff else None,
    }
    if failed:
        result["error"] = {"code": failed.code, "message": failed.message, "retryable": failed.retryable}
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return failed
