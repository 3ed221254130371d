"""A client's request, checked: raw in, `engine.request.Request` out, every mistake an InvalidArgument with the
field, its value and the limit. Pure; `check_*` run before anything is tokenised, `make_request` after.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvrelay.engine.errors import InvalidArgument, NotFound
from kvrelay.engine.legs import TraceContext
from kvrelay.engine.request import Request, RequestKey, SamplingParams, StructuredOutput
from kvrelay.router.api import ChatMessage, RawPrompt, RawRequest, RawSampling
from kvrelay.router.config import RouterConfig
from kvrelay.router.trace_context import MAX_TRACEPARENT, MAX_TRACESTATE, TRACEPARENT, is_tracestate

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What requests are held against."""

    config: RouterConfig
    model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int  # prompt and output together


def check_model(name: str, limits: Limits) -> None:
    """Raises: NotFound. An empty name is whatever is served."""
    if name and name not in limits.model_names:
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        raise NotFound(f"model {shown!r}: not served here; {limits.model_names[0]!r} is")


def check_request(raw: RawRequest, limits: Limits) -> None:
    """Check everything that needs no tokens.

    Raises: InvalidArgument, NotFound.
    """
    config = limits.config
    check_model(raw.model, limits)
    _check_name("request_id", raw.request_id, config.max_id_length)
    _check_name("cache_salt", raw.cache_salt, config.max_id_length)
    if raw.timeout_s is not None and not 0 < raw.timeout_s <= config.max_timeout_s:
        raise InvalidArgument("timeout_s", raw.timeout_s, f"must be in (0, {config.max_timeout_s:g}]")
    _between("priority", raw.priority, -config.max_priority, config.max_priority)
    if raw.trace is not None:
        _check_trace(raw.trace)
    check_prompt(raw.prompt, limits)
    _check_sampling(raw.sampling, limits)


def check_prompt(prompt: RawPrompt, limits: Limits) -> None:
    """Raises: InvalidArgument."""
    if prompt.text is not None:
        _check_text_size("text", [prompt.text], limits)
    elif prompt.token_ids is not None:
        _check_prompt_ids(prompt.token_ids, limits)
    elif prompt.messages is not None:
        _check_messages(prompt.messages, limits)
    else:
        raise InvalidArgument("prompt", None, "one of text, token_ids and chat is needed")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises: InvalidArgument, with the first id that is out of the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidArgument(field, wrong, f"token ids must be in [0, {vocab_size})")


def make_request(
    raw: RawRequest,
    prompt_token_ids: Sequence[int],
    bad_word_ids: Sequence[tuple[int, ...]],
    limits: Limits,
    *,
    key: RequestKey,
    arrival: float,
    deadline: float,
    draw_seed: Callable[[], int],
) -> Request:
    """The validated request, after `check_request` and with its prompt and its bad words tokenised.

    Raises: InvalidArgument for what depends on the tokens.
    """
    check_token_ids("prompt", prompt_token_ids, limits.vocab_size)  # a tokenizer may know more than the model
    check_token_ids("bad_words", [token_id for word in bad_word_ids for token_id in word], limits.vocab_size)
    max_tokens = _resolve_max_tokens(raw.sampling.max_tokens, len(prompt_token_ids), limits)
    min_tokens = raw.sampling.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidArgument("min_tokens", min_tokens, f"must not be above max_tokens, {max_tokens}")
    seed = draw_seed() if raw.sampling.seed is None else raw.sampling.seed
    return Request(
        key=key,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=_make_sampling(raw.sampling, max_tokens, seed, tuple(bad_word_ids), limits.vocab_size),
        priority=raw.priority,
        arrival=arrival,
        deadline=deadline,
        cache_salt=raw.cache_salt,
    )


# --- prompts ------------------------------------------------------------------------------------------------------


def _check_text_size(field: str, texts: Sequence[str], limits: Limits) -> None:
    max_bytes = limits.config.max_text_bytes
    num_bytes = sum(_num_bytes(field, text) for text in texts)
    if num_bytes > max_bytes:
        raise InvalidArgument(field, f"{num_bytes} bytes", f"at most {max_bytes}")


def _check_prompt_ids(token_ids: Sequence[int], limits: Limits) -> None:
    _check_prompt_length(len(token_ids), limits)
    check_token_ids("token_ids", token_ids, limits.vocab_size)


def _check_messages(messages: Sequence[ChatMessage], limits: Limits) -> None:
    if not messages:
        raise InvalidArgument("chat.messages", [], "must not be empty")
    _at_most("chat.messages", messages, limits.config.max_messages, "messages")
    for i, message in enumerate(messages):
        _check_item(f"chat.messages[{i}].role", message.role, limits.config.max_role_length)
    _check_text_size("chat.messages", [text for turn in messages for text in (turn.role, turn.content)], limits)


def _check_prompt_length(num_tokens: int, limits: Limits) -> None:
    if num_tokens == 0:
        raise InvalidArgument("prompt", "no tokens", "must not be empty")
    if num_tokens >= limits.max_model_len:
        raise InvalidArgument(
            "prompt",
            f"{num_tokens} tokens",
            f"at most {limits.max_model_len - 1}: the context holds {limits.max_model_len} tokens, one of them output",
        )


def _resolve_max_tokens(max_tokens: int | None, num_prompt_tokens: int, limits: Limits) -> int:
    _check_prompt_length(num_prompt_tokens, limits)
    room = limits.max_model_len - num_prompt_tokens
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise InvalidArgument(
            "max_tokens",
            max_tokens,
            f"at most {room}: the context holds {limits.max_model_len} tokens, the prompt has {num_prompt_tokens}",
        )
    return max_tokens


# --- sampling -----------------------------------------------------------------------------------------------------


def _check_sampling(raw: RawSampling, limits: Limits) -> None:
    config = limits.config
    _between("n", raw.n, 1, config.max_choices)
    for name in ("logprobs", "prompt_logprobs"):
        _between(name, getattr(raw, name), 0, min(config.max_logprobs, limits.vocab_size))
    _check_items("stop", raw.stop, config.max_stop_strings, config.max_stop_length)
    _check_items("bad_words", raw.bad_words, config.max_bad_words, config.max_bad_word_length)
    _at_most("stop_token_ids", raw.stop_token_ids, config.max_stop_token_ids, "ids")
    check_token_ids("stop_token_ids", raw.stop_token_ids, limits.vocab_size)
    _at_least("max_tokens", raw.max_tokens, 1)
    _at_least("min_tokens", raw.min_tokens, 0)
    if raw.max_tokens is not None and (raw.min_tokens or 0) > raw.max_tokens:
        raise InvalidArgument("min_tokens", raw.min_tokens, f"must not be above max_tokens, {raw.max_tokens}")
    _within("temperature", raw.temperature, 0.0, 100.0)
    _within("top_p", raw.top_p, 0.0, 1.0, open_low=True)
    _within("min_p", raw.min_p, 0.0, 1.0)
    _at_least("top_k", raw.top_k, -1)
    _within("presence_penalty", raw.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", raw.frequency_penalty, -2.0, 2.0)
    _within("repetition_penalty", raw.repetition_penalty, 0.0, 100.0, open_low=True)
    _check_logit_bias(raw.logit_bias, limits)
    _between("seed", raw.seed, 0, 2**64 - 1)
    if raw.structured_output is not None:
        _check_beside_form(raw)


def _check_beside_form(raw: RawSampling) -> None:
    """The form says when an output ends; whether it can be compiled is asked elsewhere."""
    if not isinstance(raw.structured_output, StructuredOutput):
        raise InvalidArgument("structured_output", raw.structured_output, "must be a StructuredOutput")
    for name in ("min_tokens", "ignore_eos"):
        if getattr(raw, name):
            raise InvalidArgument(name, getattr(raw, name), "a structured output ends when its form says so")


def _check_logit_bias(logit_bias: Mapping[int, float], limits: Limits) -> None:
    if len(logit_bias) > limits.config.max_logit_bias:
        raise InvalidArgument("logit_bias", f"{len(logit_bias)} entries", f"at most {limits.config.max_logit_bias}")
    check_token_ids("logit_bias", tuple(logit_bias), limits.vocab_size)
    for token_id, bias in logit_bias.items():
        _within(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


def _make_sampling(
    raw: RawSampling, max_tokens: int, seed: int, bad_word_ids: tuple[tuple[int, ...], ...], vocab_size: int
) -> SamplingParams:
    top_k = raw.top_k or 0
    given = {
        "min_tokens": raw.min_tokens,
        "temperature": raw.temperature,
        "top_k": top_k if 0 < top_k < vocab_size else 0,  # 0: all
        "top_p": raw.top_p,
        "min_p": raw.min_p,
        "presence_penalty": raw.presence_penalty,
        "frequency_penalty": raw.frequency_penalty,
        "repetition_penalty": raw.repetition_penalty,
        "logit_bias": tuple(sorted(raw.logit_bias.items())),
        "stop": tuple(raw.stop),
        "stop_token_ids": tuple(raw.stop_token_ids),
        "include_stop_str_in_output": raw.include_stop_str_in_output,
        "ignore_eos": raw.ignore_eos,
        "logprobs": raw.logprobs,
        "prompt_logprobs": raw.prompt_logprobs,
        "n": raw.n,
        "skip_special_tokens": raw.skip_special_tokens,
        "structured_output": raw.structured_output,
    }
    kept = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(max_tokens=max_tokens, seed=seed, bad_word_ids=bad_word_ids, **kept)  # type: ignore[arg-type]


# --- shared -------------------------------------------------------------------------------------------------------


def _at_most(field: str, value: Sequence[object], limit: int, unit: str) -> None:
    if len(value) > limit:
        raise InvalidArgument(field, f"{len(value)} {unit}", f"at most {limit}")


def _at_least(field: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InvalidArgument(field, value, f"must be at least {least}")


def _between(field: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise InvalidArgument(field, value, f"must be in [{least}, {most}]")


def _within(field: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    """NaN is within nothing."""
    if value is not None and (not low <= value <= high or (open_low and value == low)):
        raise InvalidArgument(field, value, f"must be in {'(' if open_low else '['}{low:g}, {high:g}]")


def _num_bytes(field: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(field, f"{len(text)} characters", "must be UTF-8; a surrogate stands alone") from None


def _check_item(field: str, text: str, max_length: int) -> None:
    _at_most(field, text, max_length, "characters")
    if not _num_bytes(field, text):
        raise InvalidArgument(field, text, "must not be empty")


def _check_items(field: str, texts: Sequence[str], max_items: int, max_length: int) -> None:
    _at_most(field, texts, max_items, "strings")
    for i, text in enumerate(texts):
        _check_item(f"{field}[{i}]", text, max_length)


def _check_name(field: str, name: str, max_length: int) -> None:
    _at_most(field, name, max_length, "characters")
    _num_bytes(field, name)
    if _CONTROL.search(name):
        raise InvalidArgument(field, name, "must not hold control characters")


def _check_trace(trace: TraceContext) -> None:
    _at_most("trace.traceparent", trace.traceparent, MAX_TRACEPARENT, "characters")
    if not TRACEPARENT.fullmatch(trace.traceparent):
        raise InvalidArgument("trace.traceparent", trace.traceparent, "expected 00-<32 hex digits>-<16>-<2>")
    _at_most("trace.tracestate", trace.tracestate, MAX_TRACESTATE, "characters")
    if not is_tracestate(trace.tracestate):
        raise InvalidArgument("trace.tracestate", trace.tracestate, "must be printable ASCII")
