"""What the router does for clients, free of any wire format: every edge calls this."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence

from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import DeadlineExceeded, InvalidArgument
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.pieces import Pieces
from kvrelay.engine.request import Request, RequestKey
from kvrelay.engine.structured_output import check_structured_output
from kvrelay.router import validation
from kvrelay.router.admission import Admission
from kvrelay.router.api import Output, RawPrompt, RawRequest
from kvrelay.router.config import RouterConfig
from kvrelay.router.detokenizer import decode
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.registry import Registry
from kvrelay.router.tokenizer import Tokenizer
from kvrelay.router.validation import Limits
from kvrelay.router.whole import whole

_INLINE_TOKENS = 4096  # decoding this many takes the event loop a few milliseconds


class InferenceService:
    """Validates, tokenises, names and times requests; the dispatcher runs them. Belongs to the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        info: ModelInfo,
        tokenizer: Tokenizer,
        registry: Registry,
        dispatcher: Dispatcher,
        *,
        epoch: str,
        clock: Clock,
    ) -> None:
        self.info = info
        self.admission = Admission(config.max_requests, self._max_waiting, clock)
        self._config = config
        self._tokenizer = tokenizer
        self._registry = registry
        self._dispatcher = dispatcher
        self._epoch = epoch
        self._clock = clock
        self._numbers = itertools.count()

    @property
    def config(self) -> RouterConfig:
        return self._config

    @property
    def pieces(self) -> Pieces:
        """What each token adds to a text."""
        return self._tokenizer.pieces

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken, and there is a decode node to place them on."""
        return not self.admission.draining and self._registry.num_serving() > 0

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.has_chat_template

    def max_model_len(self) -> int:
        """The longest prompt and output together that can be served now."""
        limits = (self.info.max_model_len, self._config.max_model_len, self._registry.max_model_len())
        return min(limit for limit in limits if limit)

    async def prepare(self, raw: RawRequest, edge_timeout_s: float | None) -> Request:
        """Check and tokenise a request, and give it its name inside: unique among all routers and their lives.

        `edge_timeout_s`: what the client's connection allows; the earlier of the two deadlines holds.
        Raises: InvalidArgument, NotFound, DeadlineExceeded.
        """
        arrival = self._clock.now()
        limits = self._limits()
        validation.check_request(raw, limits)
        timeout_s = self._config.default_timeout_s if raw.timeout_s is None else raw.timeout_s
        if edge_timeout_s is not None:
            timeout_s = min(timeout_s, edge_timeout_s)
        if timeout_s <= 0:
            raise DeadlineExceeded("the deadline had passed before the request came")
        try:
            async with asyncio.timeout(timeout_s):
                token_ids = await self._tokenize(raw.prompt, at_most=limits.max_model_len - 1)
                if raw.sampling.structured_output is not None:
                    await asyncio.to_thread(check_structured_output, raw.sampling.structured_output)
                bad_word_ids = await self._tokenizer.encode_bad_words(raw.sampling.bad_words)
        except TimeoutError:
            raise DeadlineExceeded(f"not finished within {timeout_s:.3g} s") from None
        return validation.make_request(
            raw,
            token_ids,
            bad_word_ids,
            limits,
            key=RequestKey(f"{self._epoch}-{next(self._numbers)}", attempt=0),
            arrival=arrival,
            deadline=arrival + timeout_s,
            draw_seed=lambda: secrets.randbits(64),
        )

    def generate(self, raw: RawRequest, request: Request, *, on_output: Callable[[], None]) -> AsyncGenerator[Output]:
        """Run what `prepare` made. To be closed (`aclosing`), whatever happens.

        `on_output`: called when there is output, before it goes to the client, or is gathered for it.
        """
        outputs = self._dispatcher.generate(request, raw.trace, on_output)
        return outputs if raw.stream else whole(outputs)

    def remaining_s(self, request: Request) -> float:
        return request.deadline - self._clock.now()

    async def tokenize(self, model: str, prompt: RawPrompt) -> Sequence[int]:
        """The token ids that a request with this prompt would have.

        Raises: InvalidArgument, NotFound.
        """
        limits = self._limits()
        validation.check_model(model, limits)
        validation.check_prompt(prompt, limits)
        return await self._tokenize(prompt)

    async def detokenize(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of these token ids.

        Raises: InvalidArgument, NotFound.
        """
        validation.check_model(model, self._limits())
        if len(token_ids) > self.info.max_model_len:
            raise InvalidArgument("token_ids", f"{len(token_ids)} ids", f"at most {self.info.max_model_len}")
        validation.check_token_ids("token_ids", token_ids, self.info.vocab_size)
        if len(token_ids) <= _INLINE_TOKENS:
            return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(decode, self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def _max_waiting(self) -> int:
        return self._config.max_waiting * max(1, self._registry.num_serving())

    def _limits(self) -> Limits:
        return Limits(
            config=self._config,
            model_names=(self.info.name,),
            vocab_size=self.info.vocab_size,
            max_model_len=self.max_model_len(),
        )

    async def _tokenize(self, prompt: RawPrompt, *, at_most: int | None = None) -> Sequence[int]:
        if prompt.text is not None:
            return await self._tokenizer.encode(prompt.text, at_most=at_most)
        if prompt.messages is not None:
            return await self._tokenizer.encode_chat(prompt.messages, at_most=at_most)
        assert prompt.token_ids is not None
        return prompt.token_ids
