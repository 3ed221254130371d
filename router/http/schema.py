"""The bodies of HTTP requests, as clients write them: types alone, held against the model's limits elsewhere.

Names and meanings are OpenAI's, and vLLM's where OpenAI has none. What is served is listed; what a client may send and
changes nothing here is listed as well, and everything else is refused by name.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

TokenIds = list[int]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How an answer is streamed."""

    include_usage: bool = False
    include_obfuscation: bool = False  # there is none


class Sampling(msgspec.Struct, kw_only=True):
    """What both APIs say of how tokens are chosen."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None

    # structured output: OpenAI's, vLLM's, and vLLM's older names; at most one of them may ask for a form
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # ours
    timeout_s: float | None = None
    return_timings: bool | None = None

    # taken, and without effect here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[str | int | TokenIds], Meta(description="A text, token ids, or a list of either, one answer each.")
    ]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct):
    """One part of a message; text is all that is taken."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None  # taken, and without effect here
    refusal: str | None = None

    # What a client that sends an answer back adds to it, as null or empty; refused where there is something in it.
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[Any] | None = None


class ChatCompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text, or a chat as it would be sent to the model."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str = ""
    tokens: TokenIds
    skip_special_tokens: bool = False
