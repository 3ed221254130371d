"""Protobuf to the router's own types and back, on the clients' side. Generated classes travel no further in."""

from collections.abc import Sequence
from typing import overload

from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.legs import TraceContext
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.request import Logprobs, StructuredKind, StructuredOutput
from kvrelay.proto import inference_pb2 as pb
from kvrelay.router.api import SCALARS, ChatMessage, Handoff, Output, RawPrompt, RawRequest, RawSampling, Timings, Usage


def read_request(message: pb.GenerateRequest) -> RawRequest:
    """As the client sent it. Lists stay the message's own: their size is not known to be sane yet."""
    return RawRequest(
        request_id=message.request_id,
        model=message.model,
        prompt=read_prompt(message),
        sampling=_read_sampling(message.sampling),
        priority=message.priority,
        timeout_s=message.timeout_s if message.HasField("timeout_s") else None,
        cache_salt=message.cache_salt,
        trace=TraceContext(message.trace.traceparent, message.trace.tracestate) if message.HasField("trace") else None,
        stream=message.stream if message.HasField("stream") else True,
    )


def read_prompt(message: pb.GenerateRequest | pb.TokenizeRequest) -> RawPrompt:
    """Whichever form of the prompt is set."""
    match message.WhichOneof("prompt"):
        case "text":
            return RawPrompt(text=message.text)
        case "chat":
            return RawPrompt(messages=_Messages(message.chat))
        case "token_ids" if isinstance(message, pb.GenerateRequest):
            return RawPrompt(token_ids=message.token_ids.ids)
        case _:
            return RawPrompt()


class _Messages(Sequence[ChatMessage]):
    """A chat's messages, each made when it is looked at: a small body can hold millions."""

    def __init__(self, chat: pb.ChatPrompt) -> None:
        self._turns = chat.messages

    def __len__(self) -> int:
        return len(self._turns)

    @overload
    def __getitem__(self, index: int) -> ChatMessage: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ChatMessage]: ...

    def __getitem__(self, index: int | slice) -> ChatMessage | Sequence[ChatMessage]:
        if isinstance(index, slice):
            return [ChatMessage(turn.role, turn.content) for turn in self._turns[index]]
        return ChatMessage(self._turns[index].role, self._turns[index].content)


def _read_sampling(message: pb.SamplingParams) -> RawSampling:
    given = {name: getattr(message, name) for name in SCALARS if message.HasField(name)}
    return RawSampling(
        stop=message.stop,
        stop_token_ids=message.stop_token_ids,
        logit_bias=message.logit_bias,
        bad_words=message.bad_words,
        structured_output=_read_structured_output(message) if message.HasField("structured_output") else None,
        **given,
    )


def _read_structured_output(message: pb.SamplingParams) -> StructuredOutput:
    """Raises: InvalidArgument where no form is set."""
    asked = message.structured_output
    if (kind := asked.WhichOneof("form")) is None:
        raise InvalidArgument("structured_output", None, f"one of {', '.join(StructuredKind)} is needed")
    text = asked.json_schema or asked.regex or asked.grammar  # those that are not set are empty
    return StructuredOutput(kind=StructuredKind(kind), specification=text, choices=tuple(asked.choice.choices))


def write_output(request_id: str, output: Output) -> pb.GenerateResponse:
    """One piece of a choice."""
    message = pb.GenerateResponse(
        request_id=request_id,
        choice=output.choice,
        text=output.text,
        token_ids=output.token_ids,
        first_token_index=output.first_token_index,
    )
    if output.logprobs:
        message.logprobs.extend(map(_write_logprobs, output.logprobs))
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(map(_write_logprobs, output.prompt_logprobs))
        message.first_prompt_index = output.first_prompt_index
    if output.finish_reason is not None:
        message.finish_reason = output.finish_reason
    if output.summary is not None:
        message.usage.CopyFrom(_write_usage(output.summary.usage))
        message.timings.CopyFrom(_write_timings(output.summary.timings))
        if output.summary.handoff is not None:
            message.handoff.CopyFrom(_write_handoff(output.summary.handoff))
    return message


def write_model(info: ModelInfo, max_model_len: int) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        model=info.name,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id,
    )


def _write_logprobs(logprobs: Logprobs) -> pb.Logprobs:
    return pb.Logprobs(token_ids=logprobs.token_ids, logprobs=logprobs.logprobs)


def _write_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _write_timings(timings: Timings) -> pb.Timings:
    return pb.Timings(
        ttft_ms=timings.ttft_ms,
        route_ms=timings.route_ms,
        prefill_queue_ms=timings.prefill_queue_ms,
        prefill_ms=timings.prefill_ms,
        first_token_out_ms=timings.first_token_out_ms,
        second_token_ms=timings.second_token_ms,
        exposed_transfer_ms=timings.exposed_transfer_ms,
        decode_queue_ms=timings.decode_queue_ms,
        first_decode_step_ms=timings.first_decode_step_ms,
        total_ms=timings.total_ms,
    )


def _write_handoff(handoff: Handoff) -> pb.HandoffReport:
    report = handoff.report
    return pb.HandoffReport(
        kv_bytes=report.kv_bytes,
        kv_blocks=report.kv_blocks,
        cached_blocks=report.cached_blocks,
        grant_ms=report.grant_ms,
        transfer_ms=report.transfer_ms,
        transport=report.transport,
        prefill_node=handoff.prefill_node,
        decode_node=handoff.decode_node,
    )
