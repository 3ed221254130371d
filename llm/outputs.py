"""What came of one prompt, in the shape that scripts for offline inference know."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.request import FinishReason, Logprobs, Request
from kvrelay.router.api import Output, Timings, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice, whole."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs] | None  # one a token, where asked for
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One prompt's choices, in order of their index, and what they took."""

    request_id: str
    prompt: str | None  # None: it came as token ids, or as a chat
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[Logprobs] | None  # where asked for; the first token's is empty
    outputs: Sequence[CompletionOutput]
    usage: Usage
    timings: Timings


def make_output(index: int, prompt: str | None, request: Request, answer: Sequence[Output]) -> RequestOutput:
    """Of all that the service said of a request, each choice in one piece."""
    sampling = request.sampling
    asked, asked_of_prompt = sampling.logprobs is not None, sampling.prompt_logprobs is not None
    summary = answer[-1].summary
    assert summary is not None
    return RequestOutput(
        request_id=str(index),
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=tuple(p for output in answer for p in output.prompt_logprobs) if asked_of_prompt else None,
        outputs=tuple(_completion(output, asked) for output in sorted(answer, key=lambda output: output.choice)),
        usage=summary.usage,
        timings=summary.timings,
    )


def _completion(output: Output, asked: bool) -> CompletionOutput:
    assert output.finish_reason is not None
    return CompletionOutput(
        index=output.choice,
        text=output.text,
        token_ids=tuple(output.token_ids),
        logprobs=tuple(output.logprobs) if asked else None,
        finish_reason=output.finish_reason,
    )
