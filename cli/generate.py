"""`kvrelay generate`: prompts in, answers out, as they come."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict

from kvrelay.cli import report
from kvrelay.cli.client import Piece, RouterClient
from kvrelay.cli.config import GenerateConfig
from kvrelay.cli.main import ExitCode, exit_code
from kvrelay.engine.errors import KvrelayError, Unavailable

MAX_AT_ONCE = 32


def run(config: GenerateConfig) -> int:
    """Ask, and show every answer. Returns: 0, or the exit code of the first error; the other prompts still run."""
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in config.prompt]
    return asyncio.run(_generate(config, prompts))


async def _generate(config: GenerateConfig, prompts: list[str]) -> int:
    code: int = ExitCode.OK
    gate = asyncio.Semaphore(MAX_AT_ONCE)
    show = _print_json if config.json else _print_text
    async with RouterClient(config.router) as client:
        answers = [Answer(client, config, prompt, gate) for prompt in prompts]
        try:
            for index, answer in enumerate(answers):
                error = await show(index, answer)
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
    """The answer to one prompt as it comes in, from its construction on: one choice, or several."""

    def __init__(self, client: RouterClient, config: GenerateConfig, prompt: str, gate: asyncio.Semaphore) -> None:
        self.last = Piece()
        self.num_choices = config.n
        # Not bounded: the model's context bounds an answer, and what is behind what is shown must not stall.
        self._pieces = [asyncio.Queue[Piece | KvrelayError]() for _ in range(config.n)]
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
                    self.last = piece
                    self._pieces[piece.choice].put_nowait(piece)
            end: KvrelayError = Unavailable("the answer stopped before its end")
        except KvrelayError as error:
            end = error
        for pieces in self._pieces:
            pieces.put_nowait(end)  # read by those that have not finished

    async def pieces(self, choice: int) -> AsyncIterator[Piece]:
        """A choice from its first piece to its last.

        Raises: KvrelayError.
        """
        finished = False
        while not finished:
            piece = await self._pieces[choice].get()
            if isinstance(piece, KvrelayError):
                raise piece
            yield piece
            finished = bool(piece.finish_reason)

    async def wait(self) -> None:
        """Until everything is in, or has failed."""
        await asyncio.wait([self._task])

    async def cancel(self) -> None:
        """Stop it, if it still runs; the router learns of it."""
        self._task.cancel()
        await asyncio.wait([self._task])


async def _print_text(index: int, answer: Answer) -> KvrelayError | None:
    try:
        for choice in range(answer.num_choices):
            if index or choice:
                print()
            async for piece in answer.pieces(choice):
                print(piece.text, end="", flush=True)
            print(flush=True)
    except KvrelayError as error:
        print(f"\nkvrelay generate: prompt {index + 1}: {error}", file=sys.stderr)
        return error
    await answer.wait()
    return None


async def _print_json(index: int, answer: Answer) -> KvrelayError | None:
    await answer.wait()
    last, failed = answer.last, None
    for choice in range(answer.num_choices):
        pieces: list[Piece] = []
        try:
            async for piece in answer.pieces(choice):
                pieces.append(piece)  # noqa: PERF401  what came before an error is shown too
        except KvrelayError as error:
            failed = error
        result = {
            "index": index,
            "choice": choice,
            "text": "".join(piece.text for piece in pieces),
            "token_ids": [token_id for piece in pieces for token_id in piece.token_ids],
            "finish_reason": pieces[-1].finish_reason if pieces else "",
            "usage": asdict(last.usage) if last.usage else None,
            "timings": asdict(last.timings) if last.timings else None,
            "handoff": asdict(last.handoff) if last.handoff else None,
        }
        for name in ("logprobs", "prompt_logprobs"):
            if any(getattr(piece, name) for piece in pieces):
                result[name] = [asdict(position) for piece in pieces for position in getattr(piece, name)]
        if failed:
            result["error"] = {"code": failed.code, "message": failed.message, "retryable": failed.retryable}
        print(json.dumps(result, ensure_ascii=False), flush=True)
    return failed
