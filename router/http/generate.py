"""POST /v1/completions and /v1/chat/completions: from a body to its answer, on the path that gRPC takes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.request import Request
from kvrelay.router.admission import Stay
from kvrelay.router.answer import ending_after
from kvrelay.router.api import Output, RawRequest
from kvrelay.router.http.call import Call
from kvrelay.router.http.read import BadBody, decode_body, read_chat, read_completion, read_trace
from kvrelay.router.http.render import ChatRenderer, CompletionRenderer, Renderer, Style
from kvrelay.router.http.schema import ChatCompletionRequest, CompletionRequest, Sampling
from kvrelay.router.service import InferenceService

_MAX_UNREAD = 64  # outputs of a call's several prompts that wait for the socket


class Generation:
    """The two routes that generate. Errors are answered around it."""

    def __init__(self, service: InferenceService, fingerprint: str) -> None:
        self._service = service
        self._fingerprint = fingerprint

    async def complete(self, call: Call, raw_body: bytes) -> None:
        """Raises: KvrelayError, ClientLeft."""
        body = decode_body(raw_body, CompletionRequest)
        raws = read_completion(body, self._service.config)
        async with self._prepared(call, raws) as prepared:
            style = replace(
                self._style(body),
                prompt_logprobs=body.prompt_logprobs is not None,
                echoes=[await self._echo(raw) for raw in raws] if body.echo else (),
                echo_logprobs=bool(body.echo) and body.logprobs is not None,
            )
            prompt_ids = [request.prompt_token_ids for _, request, _ in prepared]
            await self._answer(call, prepared, CompletionRenderer(style, prompt_ids))

    async def chat(self, call: Call, raw_body: bytes) -> None:
        """Raises: KvrelayError, ClientLeft."""
        body = decode_body(raw_body, ChatCompletionRequest)
        async with self._prepared(call, [read_chat(body)]) as prepared:
            style = replace(self._style(body), prompt_logprobs=body.prompt_logprobs is not None)
            await self._answer(call, prepared, ChatRenderer(style))

    def _style(self, body: Sampling) -> Style:
        if body.stream_options is not None and not body.stream:
            raise BadBody("stream_options", "only where stream is true")
        return Style(
            model=self._service.info.name,
            fingerprint=self._fingerprint,
            pieces=self._service.pieces,
            num_choices=body.n or 1,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            return_token_ids=bool(body.return_token_ids),
            return_timings=bool(body.return_timings),
        )

    async def _echo(self, raw: RawRequest) -> str:
        if raw.prompt.text is not None:
            return raw.prompt.text
        return await self._service.detokenize(raw.model, raw.prompt.token_ids or (), skip_special_tokens=False)

    @asynccontextmanager
    async def _prepared(
        self, call: Call, raws: Sequence[RawRequest]
    ) -> AsyncIterator[list[tuple[RawRequest, Request, Stay]]]:
        """Each prompt's place among those that wait, and what it is checked to be; while the client is there.

        Raises: KvrelayError, ClientLeft.
        """
        trace = read_trace(call.headers)
        async with call.while_connected(), AsyncExitStack() as stack:
            prepared = []
            for i, given in enumerate(raws):
                stay = stack.enter_context(self._service.admission.admit_request())
                raw = replace(given, trace=trace)
                try:
                    prepared.append((raw, await self._service.prepare(raw, None), stay))
                except InvalidArgument as error:
                    if len(raws) > 1:
                        error.message = f"prompt {i}: {error.message}"
                    raise
            yield prepared

    async def _answer(
        self, call: Call, prepared: Sequence[tuple[RawRequest, Request, Stay]], renderer: Renderer
    ) -> None:
        timeout_s = min(self._service.remaining_s(request) for _, request, _ in prepared)
        each = [self._service.generate(raw, request, on_output=stay.begin) for raw, request, stay in prepared]
        outputs = each[0] if len(each) == 1 else merged(each, prepared[0][1].sampling.n)
        async with ending_after(timeout_s), aclosing(outputs):
            if not prepared[0][0].stream:
                await call.answer(renderer.whole([output async for output in outputs]))
                return
            async for output in outputs:
                if events := renderer.chunk(output):
                    await call.stream(events)
            await call.end_stream(renderer.end())


async def merged(each: Sequence[AsyncGenerator[Output]], num_choices: int) -> AsyncGenerator[Output]:
    """The outputs of several requests as they come, their choices numbered through. Closes them, and is to be closed.

    Raises: what the first that fails raises; the others are ended.
    """
    queue: asyncio.Queue[Output | Exception | None] = asyncio.Queue(_MAX_UNREAD)

    async def read(index: int, outputs: AsyncGenerator[Output]) -> None:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    await queue.put(replace(output, choice=index * num_choices + output.choice))
            await queue.put(None)
        except Exception as error:  # noqa: BLE001  the root of a task: raised again where it is read
            await queue.put(error)

    tasks = [asyncio.create_task(read(index, outputs)) for index, outputs in enumerate(each)]
    try:
        num_open = len(each)
        while num_open:
            said = await queue.get()
            if isinstance(said, Exception):
                raise said
            if said is None:
                num_open -= 1
            else:
                yield said
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
