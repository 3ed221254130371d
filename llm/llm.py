"""A model in this process, for scripts and notebooks: the tokens, text and numbers of a served one, without sockets.

`colocated.py` is what runs; here prompts in their many forms become the router's raw requests, and its outputs one
object a prompt. Imports torch when a model is loaded, and not before.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from operator import index as as_int
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

from kvrelay.engine import model_store
from kvrelay.engine.config import EngineConfig, Quantization
from kvrelay.engine.errors import InvalidArgument, InvalidPrompt, KvrelayError
from kvrelay.engine.request import Request
from kvrelay.llm.loop_thread import THREAD_NAME as LOOP_THREAD, LoopThread
from kvrelay.llm.outputs import RequestOutput, make_output
from kvrelay.llm.progress import MakeBar, progress
from kvrelay.llm.sampling import SamplingParams
from kvrelay.node.engine_thread import THREAD_NAME as ENGINE_THREAD
from kvrelay.router.api import ChatMessage, Output, RawPrompt, RawRequest

if TYPE_CHECKING:
    from kvrelay.llm.colocated import Colocated
    from kvrelay.node.report import Snapshot

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, str]]
Answer = tuple[int, Sequence[Output]]  # of prompt number so and so
Answers = Generator[Answer]
_BATCHES_AHEAD = 2  # requests that the node knows of at once, in its max_num_seqs: it never waits for the next one


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig, for editors and type checkers; `docs/configuration.md` says what each is."""

    model_impl: Literal["auto", "kvrelay", "transformers"]
    device: Literal["cpu", "cuda"]
    dtype: Literal["auto", "bfloat16", "float32"]
    kernels: Literal["auto", "reference"]
    quantization: Quantization
    threads: int
    nice: int
    block_size: int
    kv_cache_size: str
    num_blocks: int
    swap_space: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    priority_ageing_s: float
    prefix_caching: bool
    watermark: float


class LLM:
    """One model with its KV pool, an engine thread and an event loop on a thread of its own.

    Threads may share it: what they ask for runs in the same batches. `close` (or `with`) gives everything back; so does
    the end of its life. Loading sets torch's number of threads, which is the process's.
    """

    def __init__(self, model: str = "smollm2", **options: Unpack[EngineOptions]) -> None:
        """`model` as `--model` takes it, fetched if need be.

        Raises: ModelError, ConfigError.
        """
        config = EngineConfig(model=model, **options)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as on a node; to be set before torch is loaded
        info = model_store.load_info(config.model)
        from kvrelay.engine.model_runner import ModelRunner
        from kvrelay.llm.colocated import Colocated

        self.model = info.name
        runner = ModelRunner.load(info, config)
        try:
            self._thread: LoopThread[Colocated] = LoopThread(Colocated(config, info, runner).serving())
        except BaseException:
            runner.close()
            raise
        # Refers to nothing that refers to this object: whoever drops it closes it.
        self._close = weakref.finalize(self, _close, self._thread, runner.close)

    @property
    def max_model_len(self) -> int:
        """The longest prompt and output together, in tokens."""
        return self._thread.resource.service.max_model_len()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt, a text or token ids; results in the order of the prompts.

        `sampling_params`: for all, or one a prompt. `priority`: one a prompt, lower runs first. `use_tqdm`: a bar where
        somebody looks, none, or one of the caller's class. All prompts are checked before any runs; they run in
        continuous batches, and the rest waits.

        Raises: InvalidPrompt, which says which one; another KvrelayError if one fails as it runs, which ends the
        others. An interrupt ends all of them, and leaves this object as it was.
        """
        single = isinstance(prompts, str)
        items: Sequence[Any] = [prompts] if single else _listed("prompts", prompts)
        raws = _raw_requests(items, _text_or_ids, sampling_params, priority)
        texts = [item if isinstance(item, str) else None for item in items]
        return self._run(raws, texts, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The same of conversations, in the model's chat template: a list of `{"role": ..., "content": ...}`, or a list
        of such lists."""
        items: Sequence[Any] = _listed("messages", messages)
        if items and isinstance(items[0], Mapping):
            items = [items]
        raws = _raw_requests(items, _chat, sampling_params, priority)
        return self._run(raws, [None] * len(items), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[Output]:
        """Complete one prompt, piece by piece: new text and tokens of a choice each; the last one has a summary.

        To leave early is to close it, which ends the request. Raises: InvalidPrompt, now; KvrelayError, later.
        """
        (raw,) = _raw_requests([prompt], _text_or_ids, sampling_params, None)
        ((_, request),) = self._prepare([raw])
        colocated, streamed = self._thread.resource, replace(raw, stream=True)

        async def run(emit: Callable[[Output], None]) -> None:
            async with aclosing(colocated.generate(streamed, request)) as outputs:
                async for output in outputs:
                    emit(output)

        return self._thread.follow(run)

    def tokenize(self, prompt: str | Conversation) -> list[int]:
        """The token ids that a request with this text, or this conversation, would have. Raises: InvalidArgument."""
        raw = RawPrompt(text=prompt) if isinstance(prompt, str) else _chat(prompt)
        return list(self._thread.call(self._thread.resource.service.tokenize("", raw)))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these token ids. Raises: InvalidArgument."""
        ids = _token_ids("token_ids", token_ids)
        service = self._thread.resource.service
        return self._thread.call(service.detokenize("", ids, skip_special_tokens=skip_special_tokens))

    def statistics(self) -> "Snapshot":
        """Blocks, batches and queues, as of the engine's last step."""
        return self._thread.resource.statistics()

    def close(self) -> None:
        """End what runs, and give threads and memory back. Again: nothing. Raises nothing for what other threads asked
        for: they get Unavailable."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, raws: Sequence[RawRequest]) -> list[tuple[RawRequest, Request]]:
        """Raises: InvalidPrompt for the first that cannot be served."""
        colocated = self._thread.resource

        async def prepare_all() -> list[tuple[RawRequest, Request]]:
            prepared = []
            for index, raw in enumerate(raws):
                try:
                    prepared.append((raw, await colocated.prepare(raw)))
                except InvalidArgument as error:
                    raise InvalidPrompt(index, error) from error
            return prepared

        return self._thread.call(prepare_all())

    def _run(
        self, raws: Sequence[RawRequest], texts: Sequence[str | None], use_tqdm: bool | MakeBar
    ) -> list[RequestOutput]:
        prepared = self._prepare(raws)
        outputs: list[RequestOutput | None] = [None] * len(prepared)
        colocated = self._thread.resource
        running: Answers = self._thread.follow(lambda emit: _run_all(colocated, prepared, emit))
        with progress(len(prepared), use_tqdm) as advance, closing(running):
            for index, answer in running:
                output = outputs[index] = make_output(index, texts[index], prepared[index][1], answer)
                advance(output)
        return [output for output in outputs if output is not None]


async def _run_all(
    colocated: "Colocated",
    prepared: Sequence[tuple[RawRequest, Request]],
    emit: Callable[[Answer], None],
) -> None:
    """All of them, as many at once as keep the node busy: the next one goes in when one has ended."""
    in_turn = iter(sorted(range(len(prepared)), key=lambda index: prepared[index][1].priority))
    failed: list[KvrelayError] = []

    async def run_some() -> None:
        for index in in_turn:
            try:
                emit((index, await colocated.run(*prepared[index])))
            except KvrelayError as error:
                error.add_note(f"prompts[{index}]")
                failed.append(error)
                raise

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(prepared), _BATCHES_AHEAD * colocated.num_seats)):
                group.create_task(run_some())
    except BaseExceptionGroup:
        if failed:
            raise failed[0] from None
        raise


# --- what callers pass, as the router takes it


def _raw_requests(
    items: Sequence[Any],
    read: Callable[[Any], RawPrompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    priority: Sequence[int] | None,
) -> list[RawRequest]:
    """Raises: InvalidPrompt for a prompt that is none, InvalidArgument for lists that do not match it."""
    one = sampling_params or SamplingParams()
    sampling = [one] * len(items) if isinstance(one, SamplingParams) else _matching("sampling_params", one, items)
    priorities = [0] * len(items) if priority is None else _matching("priority", priority, items)
    raws = []
    for index, item in enumerate(items):
        try:
            prompt = read(item)
        except InvalidArgument as error:
            raise InvalidPrompt(index, error) from error
        raws.append(
            RawRequest(prompt=prompt, sampling=sampling[index], priority=as_int(priorities[index]), stream=False)
        )
    return raws


def _listed(field: str, items: object) -> Sequence[Any]:
    if not isinstance(items, Iterable) or isinstance(items, Mapping | str | bytes):
        raise InvalidArgument(field, items, "must be a list")
    return items if isinstance(items, Sequence) else list(items)


def _matching(field: str, values: Any, items: Sequence[Any]) -> Sequence[Any]:
    listed = _listed(field, values)
    if len(listed) != len(items):
        raise InvalidArgument(field, f"{len(listed)} of them", f"must be one, or one for each of {len(items)} prompts")
    if field == "sampling_params" and not all(isinstance(value, SamplingParams) for value in listed):
        raise InvalidArgument(field, values, "must be SamplingParams")
    return listed


def _text_or_ids(prompt: object) -> RawPrompt:
    return RawPrompt(text=prompt) if isinstance(prompt, str) else RawPrompt(token_ids=_token_ids("prompt", prompt))


def _token_ids(field: str, token_ids: Any) -> list[int]:
    try:
        return [as_int(token_id) for token_id in token_ids]
    except TypeError:
        raise InvalidArgument(field, token_ids, "must be a text or a list of token ids") from None


def _chat(messages: Any) -> RawPrompt:
    turns = []
    for i, message in enumerate(_listed("messages", messages)):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise InvalidArgument(f"messages[{i}]", message, 'must be {"role": a text, "content": a text}')
        turns.append(ChatMessage(role, content))
    return RawPrompt(messages=turns)


def _close(thread: "LoopThread[Colocated]", close_runner: Callable[[], None]) -> None:
    """Where the last reference is dropped by a thread that is to end, another one has to wait for it."""
    if threading.current_thread().name in (LOOP_THREAD, ENGINE_THREAD):
        threading.Thread(target=_close, args=(thread, close_runner)).start()
        return
    thread.close()
    close_runner()
