"""Every mistake of a client: the field, its value and the limit, before any work is done for it."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.engine.errors import InvalidArgument, NotFound
from kvrelay.engine.legs import TraceContext
from kvrelay.engine.request import Request, RequestKey, SamplingParams
from kvrelay.router.api import ChatMessage, RawPrompt, RawRequest, RawSampling
from kvrelay.router.config import RouterConfig
from kvrelay.router.validation import Limits, check_request, make_request

V, L = 400, 128
LIMITS = Limits(config=RouterConfig(), model_names=("tiny",), vocab_size=V, max_model_len=L)
PROMPT = RawPrompt(token_ids=[1, 2, 3])
NAN, INF = math.nan, math.inf
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


def raw(prompt: RawPrompt = PROMPT, *, more: dict[str, Any] | None = None, **sampling: Any) -> RawRequest:
    return RawRequest(prompt=prompt, sampling=RawSampling(**sampling), **(more or {}))


def validated(
    request: RawRequest,
    num_prompt_tokens: int = 3,
    limits: Limits = LIMITS,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
) -> Request:
    check_request(request, limits)
    return make_request(
        request,
        [1] * num_prompt_tokens,
        bad_word_ids,
        limits,
        key=RequestKey("r", 0),
        arrival=1.0,
        deadline=2.0,
        draw_seed=lambda: 77,
    )


def refused(request: RawRequest, num_prompt_tokens: int = 3) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        validated(request, num_prompt_tokens)
    return caught.value


def test_an_unset_field_gets_its_default_and_an_unset_seed_is_drawn() -> None:
    request = validated(raw())
    assert request.sampling == SamplingParams(max_tokens=L - 3, seed=77)
    assert (request.key, request.arrival, request.deadline) == (RequestKey("r", 0), 1.0, 2.0)


def test_every_set_field_arrives() -> None:
    given = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "seed": 2**64 - 1,
        "stop": ("a", "b"),
        "stop_token_ids": (0, V - 1),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 20,
        "n": 16,
        "skip_special_tokens": False,
    }
    request = raw(more={"priority": -3, "cache_salt": "s"}, logit_bias={7: -1.0, 5: 2.0}, bad_words=["a"], **given)
    request = validated(request, bad_word_ids=((4, 5), (6,)))
    assert request.sampling == SamplingParams(logit_bias=((5, 2.0), (7, -1.0)), bad_word_ids=((4, 5), (6,)), **given)
    assert (request.priority, request.cache_salt) == (-3, "s")


@pytest.mark.parametrize(("given", "kept"), [(-1, 0), (0, 0), (1, 1), (V - 1, V - 1), (V, 0), (2**62, 0)])
def test_a_top_k_that_keeps_all_is_zero(given: int, kept: int) -> None:
    assert validated(raw(top_k=given)).sampling.top_k == kept


@pytest.mark.parametrize(
    "prompt",
    [RawPrompt(), RawPrompt(token_ids=[]), RawPrompt(messages=[])],
)
def test_an_empty_prompt_is_refused_in_every_form(prompt: RawPrompt) -> None:
    """D03."""
    refused(raw(prompt))


def test_a_text_that_becomes_no_tokens_is_refused() -> None:
    """D03: "" on a tokenizer without BOS; with BOS it is one token, and served."""
    assert "no tokens" in refused(raw(RawPrompt(text="")), num_prompt_tokens=0).message
    assert validated(raw(RawPrompt(text="")), num_prompt_tokens=1).prompt_token_ids == (1,)


@pytest.mark.parametrize("bad", [-1, V, V + 1, 2**31, 2**63 - 1, -(2**63)])
def test_an_id_outside_the_vocabulary_is_refused_in_every_field(bad: int) -> None:
    """D04."""
    for request in (raw(RawPrompt(token_ids=[1, bad])), raw(stop_token_ids=[0, bad], min_tokens=1)):
        error = refused(request)
        assert str(bad) in error.message
        assert f"[0, {V})" in error.message


def test_what_a_tokenizer_makes_of_text_must_be_in_the_models_vocabulary_too() -> None:
    """D04: a tokenizer may know tokens that the model does not."""
    key = RequestKey("r", 0)
    for prompt, words, field in (([1, V], (), "prompt"), ([1], ((1,), (2, V)), "bad_words")):
        with pytest.raises(InvalidArgument, match=f"{field} = {V}"):
            make_request(raw(), prompt, words, LIMITS, key=key, arrival=0.0, deadline=1.0, draw_seed=lambda: 1)


def test_the_last_id_of_the_vocabulary_is_taken() -> None:
    """D04."""
    check_request(raw(RawPrompt(token_ids=[V - 1]), stop_token_ids=[V - 1]), LIMITS)


@pytest.mark.parametrize("num_prompt_tokens", [L - 2, L - 1, L, L + 1])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 10**9])
def test_the_edge_of_the_context_is_one_rule(num_prompt_tokens: int, max_tokens: int | None) -> None:
    """D05: prompt and output together fit in the context, and one token of it is output."""
    request, room = raw(RawPrompt(text="t"), max_tokens=max_tokens), L - num_prompt_tokens
    if room >= 1 and (max_tokens is None or max_tokens <= room):
        assert validated(request, num_prompt_tokens).sampling.max_tokens == (max_tokens or room)
        return
    error = refused(request, num_prompt_tokens)
    assert error.field == ("prompt" if room < 1 else "max_tokens")
    assert str(L) in error.message
    assert str(num_prompt_tokens) in error.message


def test_too_many_ids_are_refused_by_their_number_alone() -> None:
    """E03: ids out of the vocabulary behind it are not even looked at."""
    assert "at most 127" in refused(raw(RawPrompt(token_ids=range(-(10**9), 0)))).message


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0.0, 5e-324, 1e-5, 100.0], [-1.0, 100.1, 1e30, NAN, INF, -INF, 10**400]),
        ("top_p", [1.0, 1e-9], [0.0, -1.0, 1.1, 1e30, NAN, INF]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, NAN, INF, -INF]),
        ("top_k", [-1, 0, 1], [-2, -(2**63)]),
        ("max_tokens", [1, L - 3], [0, -1, L - 2, 10**9, -(2**63)]),
        ("min_tokens", [0, 1, L - 3], [-1, L - 2, 2**62]),
        ("seed", [0, 2**64 - 1], [-1, 2**64]),
        ("stop", [["a"] * 16, ["x" * 256]], [["a"] * 17, [""], ["x" * 257], ["a"] * 10**5]),
        ("stop_token_ids", [[1] * 64], [[1] * 65]),
        ("n", [1, 2, 16], [0, 17, 10**6, -1, 2**63 - 1]),
        ("presence_penalty", [0.0, -2.0, 2.0], [2.1, -2.1, NAN, INF]),
        ("frequency_penalty", [0.0, -2.0, 2.0], [2.1, -1e30, NAN, -INF]),
        ("repetition_penalty", [1.0, 1e-3, 100.0], [0.0, -1.0, 100.1, NAN, INF]),
        ("logprobs", [0, 1, 20], [-1, 21, V, 2**63 - 1]),
        ("prompt_logprobs", [0, 1, 20], [-1, 21, V, 2**63 - 1]),
        (
            "logit_bias",
            [{}, {0: -100.0, V - 1: 100.0}],
            [{V: 1.0}, {-1: 1.0}, {2**62: 1.0}, {1: NAN}, {1: 100.1}, {1: -INF}, dict.fromkeys(range(10**5), 1.0)],
        ),
        ("bad_words", [[], ["a"] * 128, ["x" * 64]], [["a"] * 129, [""], ["a", "x" * 65], ["a"] * 10**5]),
    ],
)
def test_each_sampling_field_has_its_limits(field: str, good: list[Any], bad: list[Any]) -> None:
    """D04, E03, E05: refused by name, fast, whatever the size."""
    for value in good:
        validated(raw(**{field: value}))
    for value in bad:
        started = time.monotonic()
        error = refused(raw(**{field: value}))
        assert time.monotonic() - started < 1
        assert error.field.startswith(field)
        assert len(error.message) < 300


def test_min_tokens_above_max_tokens_is_refused_whether_given_or_resolved() -> None:
    assert "max_tokens, 4" in refused(raw(max_tokens=4, min_tokens=5)).message
    assert f"max_tokens, {L - 3}" in refused(raw(min_tokens=L)).message


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("priority", [0, 100, -100], [101, -101, 2**63 - 1, -(2**63)]),
        ("timeout_s", [1e-3, 3600.0], [0.0, -1.0, NAN, INF, 3601.0]),
        ("request_id", ["", "x" * 256, "Größe 😀"], ["x" * 257, "a\0", "a\nb", "\x7f", "\ud83d"]),
        ("cache_salt", ["x" * 256], ["x" * 257, "\0", "\udc00"]),
        (
            "trace",
            [TraceContext(TRACE), TraceContext(TRACE, "a=1,b=2")],
            [
                TraceContext(""),
                TraceContext(TRACE.upper().replace("1", "A")),
                TraceContext(TRACE.replace("1", "0")),
                TraceContext(f"ff{TRACE[2:]}"),
                TraceContext(f"{TRACE}-more"),
                TraceContext("0" * 10**6),
                TraceContext(TRACE, "a" * 513),
                TraceContext(TRACE, "a\n"),
            ],
        ),
    ],
)
def test_each_request_field_has_its_limits(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        validated(raw(more={field: value}))
    for value in bad:
        assert refused(raw(more={field: value})).field.startswith(field)


def test_texts_and_chats_are_measured_before_they_are_tokenised() -> None:
    """E03."""
    limits = replace(LIMITS, config=RouterConfig(max_text_size="10B", max_messages=2))
    for prompt, size in (
        (RawPrompt(text="é" * 5 + "x"), "11 bytes"),
        (RawPrompt(messages=[ChatMessage("user", "é" * 4)]), "12 bytes"),
        (RawPrompt(messages=[ChatMessage("u", "")] * 3), "3 messages"),
    ):
        with pytest.raises(InvalidArgument, match=size):
            check_request(raw(prompt), limits)
    check_request(raw(RawPrompt(text="é" * 5)), limits)


@pytest.mark.parametrize("role", ["", "x" * 65, "\ud83d"])
def test_a_role_is_a_short_word(role: str) -> None:
    """D06."""
    messages = [ChatMessage("user", "a"), ChatMessage(role, "a")]
    assert refused(raw(RawPrompt(messages=messages))).field == "chat.messages[1].role"


def test_a_surrogate_that_stands_alone_is_refused_in_every_text() -> None:
    """D09: JSON can spell what UTF-8 cannot hold."""
    lone = "a\ud83d"
    for request, field in (
        (raw(RawPrompt(text=lone)), "text"),
        (raw(RawPrompt(messages=[ChatMessage("user", lone)])), "chat.messages"),
        (raw(stop=[lone]), "stop[0]"),
        (raw(bad_words=["a", lone]), "bad_words[1]"),
    ):
        error = refused(request)
        assert error.field == field
        error.message.encode()
    with pytest.raises(NotFound) as caught:
        check_request(raw(more={"model": lone}), LIMITS)
    caught.value.message.encode()


def test_a_vocabulary_bounds_what_log_probabilities_can_be_asked_for() -> None:
    """E03."""
    limits = replace(LIMITS, vocab_size=5)
    check_request(raw(logprobs=5), limits)
    with pytest.raises(InvalidArgument, match=r"logprobs = 6: must be in \[0, 5\]"):
        check_request(raw(logprobs=6), limits)


def test_a_model_that_is_not_served_is_not_found() -> None:
    check_request(raw(more={"model": "tiny"}), LIMITS)
    with pytest.raises(NotFound, match="'tiny' is") as caught:
        check_request(raw(more={"model": "x" * 10**6}), LIMITS)
    assert len(caught.value.message) < 200
