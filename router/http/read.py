"""Bodies of HTTP requests to the router's own raw types. Pure: what they mean is checked where gRPC's is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.legs import TraceContext
from kvrelay.router.api import SCALARS, ChatMessage, RawPrompt, RawRequest, RawSampling
from kvrelay.router.config import RouterConfig
from kvrelay.router.http.response_format import FIELDS, structured_output
from kvrelay.router.http.schema import ChatCompletionRequest, CompletionRequest, Message, Sampling
from kvrelay.router.trace_context import read_headers

Body = TypeVar("Body")


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """A body as its type.

    Raises: InvalidArgument, with the place of what does not fit. What was sent is not repeated.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        field = place.strip("`").removeprefix("$").removeprefix(".")
        raise BadBody(field, what) from None
    except msgspec.DecodeError as error:
        raise BadBody("", f"the body is no JSON: {error}") from None
    except RecursionError:
        raise BadBody("", "the body is nested too deep") from None


class BadBody(InvalidArgument):
    """A body that is no request at all, or a field of the wrong type."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(field, None, what)
        self.message = f"{field}: {what}" if field else what
        self.args = (self.message,)


def read_trace(headers: Sequence[tuple[bytes, bytes]]) -> TraceContext | None:
    """W3C's headers; without a traceparent that makes sense there is no trace."""
    return read_headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)


# --- completions


def read_completion(body: CompletionRequest, config: RouterConfig) -> list[RawRequest]:
    """One request a prompt, in order. Raises: InvalidArgument."""
    if body.suffix:
        raise InvalidArgument("suffix", body.suffix, "text in the middle is not supported")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs", body.prompt_logprobs, "not in a stream, but by echo")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidArgument("best_of", body.best_of, f"not supported but as n, {body.n or 1}")
    prompts = _read_prompts(body.prompt, config.max_prompts)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = body.logprobs
    sampling = replace(_read_sampling(body), logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)
    return [_read_request(body, prompt, sampling) for prompt in prompts]


def _read_prompts(prompt: str | list[Any], max_prompts: int) -> list[RawPrompt]:
    if isinstance(prompt, str):
        return [RawPrompt(text=prompt)]
    if all(isinstance(item, int) for item in prompt):  # an empty list too: a prompt of no tokens
        return [RawPrompt(token_ids=prompt)]
    if len(prompt) > max_prompts:
        raise InvalidArgument("prompt", f"{len(prompt)} prompts", f"at most {max_prompts}")
    return [_read_prompt(i, item) for i, item in enumerate(prompt)]


def _read_prompt(index: int, item: str | int | list[int]) -> RawPrompt:
    if isinstance(item, str):
        return RawPrompt(text=item)
    if isinstance(item, int):
        raise InvalidArgument(f"prompt[{index}]", item, "token ids and texts in one list")
    return RawPrompt(token_ids=item)


# --- chats


def read_chat(body: ChatCompletionRequest) -> RawRequest:
    """Raises: InvalidArgument."""
    for name in ("tools", "functions"):
        if getattr(body, name):
            raise InvalidArgument(name, f"{len(getattr(body, name))} entries", "calls of tools are not supported")
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidArgument("tool_choice", body.tool_choice, "calls of tools are not supported")
    if body.modalities not in (None, ["text"]):
        raise InvalidArgument("modalities", body.modalities, "text alone is supported")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs", body.prompt_logprobs, "not in a stream")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgument("top_logprobs", body.top_logprobs, "needs logprobs to be true")
    given = body.max_completion_tokens
    if given is not None and body.max_tokens not in (None, given):
        raise InvalidArgument("max_tokens", body.max_tokens, f"differs from max_completion_tokens, {given}")
    sampling = replace(
        _read_sampling(body),
        max_tokens=body.max_tokens if given is None else given,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return _read_request(body, RawPrompt(messages=read_messages(body.messages)), sampling)


def read_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Parts of a message are joined. Raises: InvalidArgument."""
    return [ChatMessage(_ROLES.get(turn.role, turn.role), _read_content(i, turn)) for i, turn in enumerate(messages)]


_ROLES = {"developer": "system"}  # its newer name
_NOT_SERVED_IN_MESSAGES = ("annotations", "audio", "function_call", "tool_calls")


def _read_content(index: int, message: Message) -> str:
    for name in _NOT_SERVED_IN_MESSAGES:
        if getattr(message, name):
            raise InvalidArgument(f"messages[{index}].{name}", None, "not supported")
    content = message.content
    if content is None:
        raise InvalidArgument(f"messages[{index}].content", None, "must be given")
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidArgument(f"messages[{index}].content[{i}]", part.type, "text alone is supported")
    return "".join(part.text or "" for part in content)


# --- both


def _read_request(body: Sampling, prompt: RawPrompt, sampling: RawSampling) -> RawRequest:
    return RawRequest(
        request_id=body.request_id or "",
        model=body.model,
        prompt=prompt,
        sampling=sampling,
        priority=body.priority,
        timeout_s=body.timeout_s,
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
    )


def _read_sampling(body: Sampling) -> RawSampling:
    given: dict[str, Any] = {name: getattr(body, name) for name in SCALARS if name != "logprobs"}
    stop = body.stop or ()
    return RawSampling(
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=body.stop_token_ids or (),
        logit_bias=_read_logit_bias(body.logit_bias or {}),
        bad_words=body.bad_words or (),
        structured_output=structured_output({name: getattr(body, name) for name in FIELDS}),
        **given,
    )


def _read_logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    read: dict[int, float] = {}
    for name, bias in biases.items():
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise InvalidArgument("logit_bias", name, "keys must be token ids")
        read[int(name)] = bias
    return read
