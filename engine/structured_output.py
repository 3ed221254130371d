"""Structured output: which tokens an output may go on with, for the whole of it to have the form that was asked for.

llguidance compiles forms and computes the masks, in Rust and without torch; it is imported when the first form comes.
Its own limits bound what a form may cost, and the size is looked at before it sees any of it. What compiles is
blocking: call it on a thread. A form is checked twice: by the router, so that a wrong one reaches no node, and by each
node, which compiles it for the model's vocabulary.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import TYPE_CHECKING

from kvrelay.engine.errors import Internal, InvalidArgument, ModelError
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.pieces import load_tokenizer, pieces_of, special_ids
from kvrelay.engine.request import StructuredKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_SPECIFICATION_BYTES = 64 * 1024
MAX_CHOICES = 1024
_MAX_COMPILED = 64  # forms that are kept compiled; one takes kilobytes, and up to megabytes once it is in use
_MAX_LEXER_STATES = 50_000  # of one form: 100 MB at the very most
_MAX_REASON = 200
# Between JSON's tokens. Without an end to it small models write space for ever.
_WHITESPACE = r"[ \t\n\r]{1,40}"


def check_structured_output(form: StructuredOutput) -> None:
    """Whether the form can be compiled, whatever the vocabulary is.

    Raises: InvalidArgument, with the compiler's reason.
    """
    _check_size(form)
    if reason := _why_not(form):
        raise _refusal(form, reason)


class FormCompiler:
    """Compiles forms for one model's vocabulary, and keeps those of late. Any thread; one compiles at a time."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    def compile(self, form: StructuredOutput, output_ids: Seq[int] = ()) -> "OutputMatcher":
        """A matcher of its own for an output that has these tokens so far.

        Raises: InvalidArgument for a form that cannot be compiled, or does not go with the output; ModelError for a
        tokenizer that cannot be read.
        """
        _check_size(form)
        with self._lock:
            matcher = OutputMatcher(self._matcher(form).deep_copy())
        try:
            matcher.catch_up(output_ids)
        except Internal as error:
            raise _refusal(form, error.message) from error
        return matcher

    def prepare(self) -> None:
        """Read the vocabulary, which the first form has to wait for otherwise. Raises: ModelError."""
        with self._lock:
            self._prepared()

    def _matcher(self, form: StructuredOutput) -> "LLMatcher":
        from llguidance import LLMatcher

        if (found := self._compiled.get(form)) is not None:
            self._compiled.move_to_end(form)
            return found
        matcher = LLMatcher(self._prepared(), _grammar_of(form), log_level=0, limits=_limits())
        if matcher.is_error():
            raise _refusal(form, matcher.get_error())
        self._compiled[form] = matcher
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return matcher

    def _prepared(self) -> "LLTokenizer":
        if self._tokenizer is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            if not self._info.eos_token_ids:
                raise ModelError(f"{self._info.path}: no token ends a text, and a structured output needs one")
            vocabulary = _Vocabulary(self._info)
            eos_token_ids = list(self._info.eos_token_ids)
            self._tokenizer = vocabulary.known = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=eos_token_ids)
        return self._tokenizer


class _Vocabulary:
    """The tokens as llguidance wants them: with the bytes that a client gets for them, whatever kind of tokenizer."""

    def __init__(self, info: ModelInfo) -> None:
        self._library = load_tokenizer(info.path)
        self._pieces = pieces_of(self._library)
        self.tokens = [self._pieces[token_id] for token_id in range(info.vocab_size)]
        self.special_token_ids = [token_id for token_id in special_ids(self._library) if token_id < info.vocab_size]
        self.eos_token_id = info.eos_token_ids[0]
        self.bos_token_id: int | None = None
        self.known: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """How the model would write it, where only one text can follow. A tokenizer that puts something before what it
        is given cannot say."""
        token_ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if b"".join(self._pieces[token_id] for token_id in token_ids) == text.encode():
            return token_ids
        return [] if self.known is None else self.known.greedy_tokenize(text)


class OutputMatcher:
    """An `engine.request.Matcher`. Belongs to one thread at a time."""

    def __init__(self, matcher: "LLMatcher", num_taken: int = 0) -> None:
        self._matcher = matcher
        self._num_taken = num_taken  # output tokens that it knows of

    def fork(self) -> "OutputMatcher":
        return OutputMatcher(self._matcher.deep_copy(), self._num_taken)

    def allowed(self, output_ids: Seq[int]) -> bytes:
        self.catch_up(output_ids)
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def completes(self, output_ids: Seq[int], token_id: int) -> bool:
        self.catch_up((*output_ids, token_id))
        return self._matcher.is_stopped()

    def catch_up(self, output_ids: Seq[int]) -> None:
        """Raises: Internal where the output has not the form."""
        if self._num_taken < len(output_ids):
            self._matcher.consume_tokens(list(output_ids[self._num_taken :]))
            self._check()
            self._num_taken = len(output_ids)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise Internal(f"structured output: {_one_line(self._matcher.get_error())}")


def _check_size(form: StructuredOutput) -> None:
    field = f"structured_output.{form.kind}"
    if form.kind is StructuredKind.CHOICE:
        if not 0 < len(form.choices) <= MAX_CHOICES:
            raise InvalidArgument(field, len(form.choices), f"must have 1 to {MAX_CHOICES} choices")
        if "" in form.choices:
            raise InvalidArgument(field, "", "a choice must not be empty")
    elif form.kind is not StructuredKind.JSON_OBJECT and not form.specification:
        raise InvalidArgument(field, "", "must not be empty")
    size = sum(len(text.encode(errors="replace")) for text in (form.specification, *form.choices))
    if size > MAX_SPECIFICATION_BYTES:
        raise InvalidArgument(field, f"{size} bytes", f"must be at most {MAX_SPECIFICATION_BYTES} bytes")


@lru_cache(maxsize=_MAX_COMPILED)
def _why_not(form: StructuredOutput) -> str:
    """Why a form cannot be compiled; empty: it can. Raises: InvalidArgument where it is no JSON object."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(_grammar_of(form), None, limits=_limits())


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


def _grammar_of(form: StructuredOutput) -> str:
    """The form as the compiler reads it, not compiled yet. Raises: InvalidArgument where it is no JSON object."""
    from llguidance import LLMatcher

    match form.kind:
        case StructuredKind.JSON_OBJECT:
            return _json_grammar('{"type":"object"}')
        case StructuredKind.JSON_SCHEMA:
            try:
                return _json_grammar(form.specification)
            except ValueError as error:
                raise _refusal(form, str(error)) from None
        case StructuredKind.REGEX:
            return LLMatcher.grammar_from_regex(form.specification)
        case StructuredKind.CHOICE:  # a JSON string is a Lark string
            alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in form.choices)
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")
        case StructuredKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(form.specification)


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    says_itself = '"x-guidance"' in schema  # llguidance's own word for such settings, in the schema
    return LLMatcher.grammar_from_json_schema(schema, None if says_itself else {"whitespace_pattern": _WHITESPACE})


def _refusal(form: StructuredOutput, reason: str) -> InvalidArgument:
    shown = form.choices or form.specification
    return InvalidArgument(f"structured_output.{form.kind}", shown, f"cannot be compiled: {_one_line(reason)}")


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:_MAX_REASON]
