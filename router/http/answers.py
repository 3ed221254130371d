"""The bodies of HTTP answers, in OpenAI's form. A field that is UNSET is left out; None is null."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

TokenLogprobs = dict[str, float]


class PromptTokensDetails(Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of a call: of all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatToken(Struct):
    """One token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatToken):
    """A token of an answer, and the likeliest ones in its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Struct):
    """Of a choice's new tokens."""

    content: list[ChatLogprob]


class CompletionLogprobs(Struct):
    """Of a choice's new tokens, in parallel lists. The first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[TokenLogprobs | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """vLLM's form, keyed by token id; the rank is known of the likeliest ones."""

    logprob: float
    decoded_token: str
    rank: int | UnsetType = UNSET


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Struct):
    """A choice of a completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Answer(Struct, kw_only=True):
    """What all answers say of themselves."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    kvrelay: list[dict[str, Any]] | UnsetType = UNSET  # times and hand-off of each prompt, where asked for


class Completion(Answer, kw_only=True):
    """A completion, or a chunk of one."""

    choices: list[CompletionChoice]


class Delta(Struct, omit_defaults=True):
    """What is new of a message."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(Struct):
    """What is new of a chat's choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Answer, kw_only=True):
    """A chunk of a chat's answer."""

    choices: list[ChunkChoice]


class AnswerMessage(Struct):
    """A whole answer of a chat."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    """A whole choice of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Answer, kw_only=True):
    """A chat's answer."""

    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Model(Struct):
    """What is served."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "kvrelay"


class ModelList(Struct):
    """All that is served: one."""

    data: list[Model]
    object: str = "list"


class Tokens(Struct):
    """A text's tokens."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(Struct):
    """Tokens' text."""

    prompt: str


class Error(Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """OpenAI's form of an error."""

    error: Error


class Health(Struct):
    """Whether requests can be served."""

    status: str
