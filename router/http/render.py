"""What the router's outputs become in OpenAI's two forms, whole and in chunks. Pure but for ids and the time of day."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from kvrelay.engine.pieces import Pieces
from kvrelay.engine.request import Logprobs
from kvrelay.router.api import Output, Summary
from kvrelay.router.http.answers import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprob,
    ChatLogprobs,
    ChatToken,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TokenLogprobs,
    Usage,
)

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a client asked an answer to be like."""

    model: str
    fingerprint: str
    pieces: Pieces
    num_choices: int  # of each prompt
    include_usage: bool = False  # in a stream: the others always have it
    return_token_ids: bool = False
    return_timings: bool = False
    prompt_logprobs: bool = False
    echoes: Sequence[str] = ()  # each prompt's text, where it is to stand before the answer
    echo_logprobs: bool = False


class Renderer(Protocol):
    """One call's answer. Choices are numbered through over the call's prompts."""

    def chunk(self, output: Output) -> bytes:
        """What is new, as events of a stream; empty if it shows nothing."""

    def end(self) -> bytes:
        """The events behind the last choice's end."""

    def whole(self, outputs: Sequence[Output]) -> bytes:
        """The answer in one piece, of one output a choice."""


class _Renderer:
    """What both forms share."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, style: Style) -> None:
        self._style = style
        self._common: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": style.model,
            "system_fingerprint": style.fingerprint,
        }
        self._summaries: list[Summary] = []
        self._begun: set[int] = set()  # choices of which something was said

    def _begins(self, choice: int) -> bool:
        if choice in self._begun:
            return False
        self._begun.add(choice)
        return True

    def _token_ids(self, output: Output) -> list[int] | UnsetType:
        return list(output.token_ids) if self._style.return_token_ids else UNSET

    def _usage(self) -> Usage:
        counts = [summary.usage for summary in self._summaries]
        prompt, completion = sum(c.prompt_tokens for c in counts), sum(c.completion_tokens for c in counts)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(sum(c.cached_tokens for c in counts)))

    def _timings(self) -> list[dict[str, Any]] | UnsetType:
        if not self._style.return_timings:
            return UNSET
        return [
            {
                "timings": asdict(summary.timings),
                "handoff": None
                if summary.handoff is None
                else asdict(summary.handoff.report)
                | {"prefill_node": summary.handoff.prefill_node, "decode_node": summary.handoff.decode_node},
            }
            for summary in self._summaries
        ]

    def _text_of(self, token_id: int) -> str:
        return self._style.pieces[token_id].decode(errors="replace")

    def _prompt_logprobs(self, entries: Sequence[Logprobs]) -> PromptLogprobs | UnsetType:
        return [self._prompt_logprob(entry) for entry in entries] if self._style.prompt_logprobs else UNSET

    def _prompt_logprob(self, entry: Logprobs) -> dict[str, PromptLogprob] | None:
        if not entry.token_ids:
            return None
        own = entry.token_ids[0]
        found = {str(own): PromptLogprob(entry.logprobs[0], self._text_of(own))}
        likeliest = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
        return found | {
            str(token_id): PromptLogprob(logprob, self._text_of(token_id), rank)
            for rank, (token_id, logprob) in enumerate(likeliest, 1)
        }


@dataclass(slots=True)
class _Offsets:
    """How far the text of a choice's tokens has come, and its prompt's log-probabilities until they are said."""

    length: int = 0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


class CompletionRenderer(_Renderer):
    """POST /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, style: Style, prompt_ids: Sequence[Sequence[int]]) -> None:
        """`prompt_ids`: each prompt's tokens."""
        super().__init__(style)
        self._prompt_ids = prompt_ids
        self._offsets: dict[int, _Offsets] = {}
        self._of_prompts: dict[int, list[Logprobs]] = {}

    def chunk(self, output: Output) -> bytes:
        prompt = output.choice // self._style.num_choices
        if output.prompt_logprobs:
            self._of_prompts.setdefault(prompt, []).extend(output.prompt_logprobs)
        if output.summary is not None:
            self._summaries.append(output.summary)
        if not (output.text or output.finish_reason or output.logprobs or self._style.return_token_ids):
            return b""
        chunk = Completion(
            object=self.chunk_kind,
            choices=[self._choice(output, self._of_prompts.get(prompt, ()))],
            usage=None if self._style.include_usage else UNSET,
            **self._common,
        )
        return b"data: %b\n\n" % _encode(chunk)

    def end(self) -> bytes:
        style = self._style
        if not (style.include_usage or style.return_timings):
            return DONE
        usage = self._usage() if style.include_usage else UNSET
        last = Completion(object=self.chunk_kind, choices=[], usage=usage, kvrelay=self._timings(), **self._common)
        return b"data: %b\n\n%b" % (_encode(last), DONE)

    def whole(self, outputs: Sequence[Output]) -> bytes:
        self._summaries = [output.summary for output in outputs if output.summary is not None]
        for output in outputs:
            if output.prompt_logprobs:
                self._of_prompts[output.choice // self._style.num_choices] = list(output.prompt_logprobs)
        choices = []
        for output in sorted(outputs, key=lambda output: output.choice):
            of_prompt = self._of_prompts.get(output.choice // self._style.num_choices, ())
            choice = self._choice(output, of_prompt)
            choice.prompt_logprobs = self._prompt_logprobs(of_prompt)
            choices.append(choice)
        answer = Completion(
            object=self.kind, choices=choices, usage=self._usage(), kvrelay=self._timings(), **self._common
        )
        return _encode(answer)

    def _choice(self, output: Output, of_prompt: Sequence[Logprobs]) -> CompletionChoice:
        style, text, entries = self._style, output.text, output.logprobs
        token_ids: Sequence[int] = output.token_ids
        if style.echoes and self._begins(output.choice):
            prompt = output.choice // style.num_choices
            text = style.echoes[prompt] + text
            if style.echo_logprobs:
                entries = [*of_prompt, *entries]
                token_ids = [*self._prompt_ids[prompt], *token_ids]
        return CompletionChoice(
            index=output.choice,
            text=text,
            logprobs=self._logprobs(output.choice, token_ids, entries) if entries else None,
            finish_reason=output.finish_reason,
            token_ids=self._token_ids(output),
        )

    def _logprobs(self, choice: int, token_ids: Sequence[int], entries: Sequence[Logprobs]) -> CompletionLogprobs:
        offsets = self._offsets.setdefault(choice, _Offsets())
        told = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            token = self._text_of(token_id)
            told.tokens.append(token)
            told.token_logprobs.append(entry.logprobs[0] if entry.logprobs else None)
            told.top_logprobs.append(self._likeliest(entry))
            told.text_offset.append(offsets.length)
            offsets.length += len(token)
        return told

    def _likeliest(self, entry: Logprobs) -> TokenLogprobs | None:
        """By text; of tokens with the same one the likelier. The token itself is always among them."""
        if not entry.token_ids:
            return None
        found: TokenLogprobs = {}
        ordered = (*zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), (entry.token_ids[0], entry.logprobs[0]))
        for token_id, logprob in ordered:
            found.setdefault(self._text_of(token_id), logprob)
        return found


class ChatRenderer(_Renderer):
    """POST /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def chunk(self, output: Output) -> bytes:
        if output.summary is not None:
            self._summaries.append(output.summary)
        said = b""
        if self._begins(output.choice):
            said = self._event(ChunkChoice(output.choice, Delta(role="assistant", content=""), None, None))
        if not (output.text or output.finish_reason or output.logprobs or self._style.return_token_ids):
            return said
        return said + self._event(
            ChunkChoice(
                output.choice,
                Delta(content=output.text or None),
                self._logprobs(output),
                output.finish_reason,
                self._token_ids(output),
            )
        )

    def end(self) -> bytes:
        style = self._style
        if not (style.include_usage or style.return_timings):
            return DONE
        usage = self._usage() if style.include_usage else UNSET
        last = ChatCompletionChunk(
            object=self.chunk_kind, choices=[], usage=usage, kvrelay=self._timings(), **self._common
        )
        return b"data: %b\n\n%b" % (_encode(last), DONE)

    def whole(self, outputs: Sequence[Output]) -> bytes:
        self._summaries = [output.summary for output in outputs if output.summary is not None]
        choices = [
            ChatChoice(
                output.choice,
                AnswerMessage(output.text),
                self._logprobs(output),
                output.finish_reason,
                self._token_ids(output),
            )
            for output in sorted(outputs, key=lambda output: output.choice)
        ]
        answer = ChatCompletion(
            object=self.kind,
            choices=choices,
            usage=self._usage(),
            kvrelay=self._timings(),
            prompt_logprobs=self._prompt_logprobs([entry for output in outputs for entry in output.prompt_logprobs]),
            **self._common,
        )
        return _encode(answer)

    def _event(self, choice: ChunkChoice) -> bytes:
        usage = None if self._style.include_usage else UNSET
        chunk = ChatCompletionChunk(object=self.chunk_kind, choices=[choice], usage=usage, **self._common)
        return b"data: %b\n\n" % _encode(chunk)

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        if not output.logprobs:
            return None
        return ChatLogprobs([self._logprob(entry) for entry in output.logprobs])

    def _logprob(self, entry: Logprobs) -> ChatLogprob:
        own, *likeliest = (
            self._token(token_id, logprob) for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True)
        )
        return ChatLogprob(own.token, own.logprob, own.bytes, likeliest)

    def _token(self, token_id: int, logprob: float) -> ChatToken:
        piece = self._style.pieces[token_id]
        return ChatToken(piece.decode(errors="replace"), logprob, list(piece))
