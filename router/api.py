"""What clients ask and what they get, free of any wire format: the gRPC edge speaks in these types.

Raw types hold what a client sent, unchecked; `validation.py` turns them into `engine.request.Request`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.engine.legs import HandoffReport, TraceContext
from kvrelay.engine.request import FinishReason, Logprobs, StructuredOutput


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSampling:
    """Sampling parameters as a client sent them. None: not given."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] = ()
    n: int | None = None
    skip_special_tokens: bool | None = None
    structured_output: StructuredOutput | None = None


# Fields of RawSampling that are one value each, as all edges have them by the same names.
SCALARS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "n",
    "skip_special_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """A prompt in one of its forms; all None: the client sent none."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[ChatMessage] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """A generate request as a client sent it."""

    request_id: str = ""
    model: str = ""
    prompt: RawPrompt = field(default_factory=RawPrompt)
    sampling: RawSampling = field(default_factory=RawSampling)
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    trace: TraceContext | None = None
    stream: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time to the first and to the second token went, in milliseconds."""

    ttft_ms: float
    route_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    first_token_out_ms: float
    second_token_ms: float
    exposed_transfer_ms: float
    decode_queue_ms: float
    first_decode_step_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """The hand-off of one request, as the decode node saw it, and between whom it was."""

    report: HandoffReport
    prefill_node: str
    decode_node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the last output of a request says of the whole of it."""

    usage: Usage
    timings: Timings
    handoff: Handoff | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """New tokens of a choice and the new text they made certain; its last one has a finish reason, the request's last
    one a summary. Log-probabilities of the prompt come once a request, in order, before the first token of any choice.
    """

    choice: int
    text: str = ""
    token_ids: Sequence[int] = ()
    first_token_index: int = 0
    logprobs: Sequence[Logprobs] = ()  # one a token, where asked for
    prompt_logprobs: Sequence[Logprobs] = ()
    first_prompt_index: int = 0
    finish_reason: FinishReason | None = None
    summary: Summary | None = None
