"""Every mistake of a client over real gRPC: refused at once by field, value and limit, no node hears of it, and the
next request is served."""

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.fake_node import DECODE, FakeNode, delta
from support.requests import GOOD_PROMPT, chat, field, request, resident_bytes, sampling
from support.router_harness import Harness, running_router
from support.tiny_tokenizers import byte_level, write_model_folder

from kvrelay.proto import inference_pb2 as pb

V, L = byte_level().get_vocab_size(), 128
DEADLINE_S = 10.0  # bench/bad_input.py has the figures: gRPC alone takes up to 0.7 s for a body over the limit
NAN, INF = math.nan, math.inf
GENERATE, TOKENIZE, DETOKENIZE = (f"/kvrelay.v1.Inference/{name}" for name in ("Generate", "Tokenize", "Detokenize"))
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'echo' %}{{ raise_exception('I do not say ' ~ m.content) }}"
    "{% elif m.role == 'deep' %}{{ m.content.a.b }}{% elif m.role == 'sum' %}{{ 1 + m.content }}"
    "{% elif m.role == 'index' %}{{ messages[99].role }}{% elif m.role == 'loop' %}{{ range(10**9) | list }}"
    "{% endif %}{% endfor %}"
)


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path, max_model_len=L)) as harness:
        yield harness


async def failure(router: Harness, body: bytes, method: str = GENERATE) -> tuple[str, str]:
    """The code and the words with which a call ends, in time."""
    call = router.channel.unary_stream(method)(body, timeout=20)
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert time.monotonic() - began < DEADLINE_S
    return caught.value.code().name, caught.value.details() or ""


async def assert_serves(router: Harness, prefill: FakeNode, decode: FakeNode) -> None:
    """No node has heard of anything, and the next request is served."""
    assert prefill.starts.empty()
    assert decode.starts.empty()
    task = asyncio.create_task(router.generate(list(GOOD_PROMPT)))
    await prefill.say(delta(await prefill.next_start(), [70], ended=True))
    await decode.say(delta(await decode.next_start(), [70, 71], finish="length", ended=True))
    assert (await task).token_ids == [70, 71]


BAD: dict[str, tuple[pb.GenerateRequest, str, list[str]]] = {
    # name: the request, the code, and what the answer's words hold
    # --- prompts
    "no prompt": (request(None), "INVALID_ARGUMENT", ["prompt", "one of text, token_ids and chat"]),
    "empty text": (request(""), "INVALID_ARGUMENT", ["prompt", "no tokens"]),
    "no ids": (request([]), "INVALID_ARGUMENT", ["prompt", "no tokens"]),
    "no messages": (request(chat()), "INVALID_ARGUMENT", ["chat.messages = []"]),
    "empty role": (request(chat(("user", "a"), ("", "a"))), "INVALID_ARGUMENT", ["chat.messages[1].role"]),
    "long role": (request(chat(("r" * 65, "a"))), "INVALID_ARGUMENT", ["messages[0].role", "65 char", "at most 64"]),
    "unknown role": (request(chat(("wizard", "a"))), "INVALID_ARGUMENT", ["chat.messages", "unknown role wizard"]),
    "many messages": (request(chat(*[("user", "")] * 10**5)), "INVALID_ARGUMENT", ["100000 messages", "at most 1024"]),
    "long content": (request(chat(("user", "x" * 2**20))), "INVALID_ARGUMENT", ["1048580 bytes", "at most 1048576"]),
    "long text": (request("x" * (2**20 + 1)), "INVALID_ARGUMENT", ["text = '1048577 bytes'", "at most 1048576"]),
    "text far over the context": (request("x" * 2**20), "INVALID_ARGUMENT", ["more than 127 tokens", "at most 127"]),
    "chat far over the context": (
        request(chat(("user", "x " * 2**18))),
        "INVALID_ARGUMENT",
        ["more than 127 tokens", "at most 127"],
    ),
    "text over the context": (request("x" * 2**10), "INVALID_ARGUMENT", ["tokens", "at most 127"]),
    "chat over the context": (request(chat(("user", "x" * 2**10))), "INVALID_ARGUMENT", ["tokens", "at most 127"]),
    "ids at the limit": (request([5] * L), "INVALID_ARGUMENT", ["128 tokens", "at most 127"]),
    "ids over the limit": (request([5] * (L + 1)), "INVALID_ARGUMENT", ["129 tokens", "at most 127"]),
    "very many ids": (request([5] * 10**6), "INVALID_ARGUMENT", ["1000000 tokens", "at most 127"]),
    "output over the limit": (
        request([5] * (L - 1), sampling={"max_tokens": 2}),
        "INVALID_ARGUMENT",
        ["max_tokens = 2", "at most 1", "128 tokens", "127"],
    ),
    "body over the limit": (request("x" * 5 * 2**20), "RESOURCE_EXHAUSTED", ["larger than max"]),
    # --- ids
    **{
        f"{field} {bad}": (message, "INVALID_ARGUMENT", [field, str(bad), f"[0, {V})"])
        for bad in (-1, V, V + 1, 2**31, 2**40, 2**63 - 1, -(2**63))
        for field, message in (
            ("token_ids", request([1, bad])),
            ("stop_token_ids", sampling(stop_token_ids=[1, bad], min_tokens=1)),
            ("logit_bias", sampling(logit_bias={bad: 1.0})),
        )
    },
    # --- numbers
    **{
        f"{field} {bad}": (sampling(**{field: bad}), "INVALID_ARGUMENT", [f"{field} = {bad}", limit])
        for field, limit, values in (
            ("max_tokens", "at least 1", (0, -1, -(2**63))),
            ("max_tokens", "at most 125", (L - 2, 2**31, 2**63 - 1)),
            ("min_tokens", "at least 0", (-1, -(2**63))),
            ("min_tokens", "max_tokens, 125", (L - 2, 2**63 - 1)),
            ("n", "[1, 16]", (0, -1, 17, 10**6, 2**63 - 1)),
            ("logprobs", "[0, 20]", (-1, 21, V, 2**63 - 1)),
            ("prompt_logprobs", "[0, 20]", (-1, 21, V, 2**63 - 1)),
            ("top_k", "at least -1", (-2, -(2**63))),
            ("temperature", "[0, 100]", (-1.0, 100.1, 1e30, NAN, INF, -INF)),
            ("top_p", "(0, 1]", (0.0, -1.0, 1.1, 1e30, NAN, INF, -INF)),
            ("min_p", "[0, 1]", (-0.1, 1.1, 1e30, NAN, INF, -INF)),
            ("presence_penalty", "[-2, 2]", (-2.1, 2.1, 1e30, NAN, INF, -INF)),
            ("frequency_penalty", "[-2, 2]", (-2.1, 2.1, 1e30, NAN, INF, -INF)),
            ("repetition_penalty", "(0, 100]", (0.0, -1.0, 100.1, 1e30, NAN, INF, -INF)),
        )
        for bad in values
    },
    **{
        f"logit_bias value {bad}": (
            sampling(logit_bias={7: bad}),
            "INVALID_ARGUMENT",
            [f"logit_bias[7] = {bad}", "[-100, 100]"],
        )
        for bad in (100.1, -1e30, NAN, INF, -INF)
    },
    **{
        f"timeout_s {bad}": (request(timeout_s=bad), "INVALID_ARGUMENT", [f"timeout_s = {bad}", "(0, 3600]"])
        for bad in (0.0, -1.0, 3600.1, 1e30, NAN, INF, -INF)
    },
    # --- small bodies, huge work
    "many stop strings": (sampling(stop=["a"] * 10**5), "INVALID_ARGUMENT", ["stop = '100000 strings'", "at most 16"]),
    "long stop string": (sampling(stop=["x" * 10**6]), "INVALID_ARGUMENT", ["stop[0]", "1000000", "at most 256"]),
    "empty stop string": (sampling(stop=["a", ""]), "INVALID_ARGUMENT", ["stop[1]", "must not be empty"]),
    "many stop ids": (sampling(stop_token_ids=[-1] * 10**5), "INVALID_ARGUMENT", ["100000 ids", "at most 64"]),
    "many bad words": (sampling(bad_words=["a"] * 10**5), "INVALID_ARGUMENT", ["100000 strings", "at most 128"]),
    "long bad word": (sampling(bad_words=["a", "x" * 10**6]), "INVALID_ARGUMENT", ["bad_words[1]", "at most 64"]),
    "empty bad word": (sampling(bad_words=["a", ""]), "INVALID_ARGUMENT", ["bad_words[1]", "must not be empty"]),
    "blank bad word": (sampling(bad_words=["  "]), "INVALID_ARGUMENT", ["bad_words[0]", "no tokens"]),
    "huge logit bias": (
        sampling(logit_bias=dict.fromkeys(range(10**5), 1.0)),
        "INVALID_ARGUMENT",
        ["logit_bias = '100000 entries'", "at most 1024"],
    ),
    # --- names
    "unknown model": (request(model="gpt"), "NOT_FOUND", ["'gpt'", "'tiny' is"]),
    "long model": (request(model="g" * 10**6), "NOT_FOUND", ["'tiny' is"]),
    "long id": (request(request_id="x" * 257), "INVALID_ARGUMENT", ["request_id", "257", "at most 256"]),
    "NUL in an id": (request(request_id="a\0b"), "INVALID_ARGUMENT", ["request_id = 'a\\x00b'", "control"]),
    "long salt": (request(cache_salt="x" * 10**6), "INVALID_ARGUMENT", ["cache_salt", "1000000", "at most 256"]),
    "NUL in a salt": (request(cache_salt="\0"), "INVALID_ARGUMENT", ["cache_salt = '\\x00'", "control"]),
    "bad trace": (request(trace=pb.TraceContext(traceparent="00-1-2-3")), "INVALID_ARGUMENT", ["trace.traceparent"]),
    "long trace": (request(trace=pb.TraceContext(traceparent="0" * 10**6)), "INVALID_ARGUMENT", ["at most 55"]),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_refused_by_name_and_the_next_one_is_served(router: Harness, name: str) -> None:
    """A15, D03, D04, D05, D06, E03, E05."""
    prefill, decode = await router.pair()
    message, code, words = BAD[name]
    found, details = await failure(router, message.SerializeToString())
    assert found == code
    assert all(word in details for word in words), details
    assert len(details) <= 500
    await assert_serves(router, prefill, decode)


MARK = b"MARK"
TEXTS = {
    "request_id": request(request_id="MARK"),
    "model": request(model="MARK"),
    "text": request("MARK"),
    "role": request(chat(("MARK", "a"))),
    "content": request(chat(("user", "MARK"))),
    "stop": sampling(stop=["MARK"]),
    "bad_words": sampling(bad_words=["MARK"]),
    "cache_salt": request(cache_salt="MARK"),
    "traceparent": request(trace=pb.TraceContext(traceparent="MARK")),
}


@pytest.mark.parametrize("raw", [b"\xc4\xe3\xba\xc3", b"\xed\xa0\xbdA", b"\xffAAA", b"AAA\xf0"])
async def test_a_string_that_is_not_utf_8_is_the_clients_mistake_in_every_field(router: Harness, raw: bytes) -> None:
    """D09: GBK, a lone surrogate, a stray byte, half a character; the bytes are not echoed."""
    prefill, decode = await router.pair()
    for message in TEXTS.values():
        body = message.SerializeToString()
        assert body.count(MARK) == 1
        code, details = await failure(router, body.replace(MARK, raw))
        assert code == "INVALID_ARGUMENT"
        assert "UTF-8" in details
    for method in (TOKENIZE, DETOKENIZE):
        body = pb.TokenizeRequest(model="MARK", text="a").SerializeToString()  # both begin with the model's name
        assert (await failure(router, body.replace(MARK, raw), method))[0] == "INVALID_ARGUMENT"
    await assert_serves(router, prefill, decode)


async def test_a_body_that_is_no_protobuf_is_the_clients_mistake(router: Harness) -> None:
    """D09."""
    prefill, decode = await router.pair()
    whole = request("Where is Rome?").SerializeToString()
    for body in (b"\xff\xff", whole[:-1], b"\x0a\xff\xff\xff\xff\x0f", b"{}", b"\x00"):
        code, details = await failure(router, body)
        assert (code, "cannot be read" in details) == ("INVALID_ARGUMENT", True)
    assert (await failure(router, b""))[0] == "INVALID_ARGUMENT"  # a request with nothing in it
    await assert_serves(router, prefill, decode)


@pytest.mark.parametrize("method", [TOKENIZE, DETOKENIZE])
async def test_the_small_calls_have_the_same_limits(router: Harness, method: str) -> None:
    """D04, E03."""
    cases = {
        TOKENIZE: [
            pb.TokenizeRequest(),
            pb.TokenizeRequest(text="x" * (2**20 + 1)),
            pb.TokenizeRequest(chat=chat()),
            pb.TokenizeRequest(chat=chat(*[("user", "")] * 10**5)),
            pb.TokenizeRequest(chat=chat(("wizard", "a"))),
        ],
        DETOKENIZE: [
            *(pb.DetokenizeRequest(token_ids=[1, bad]) for bad in (-1, V, V + 1, 2**31, 2**63 - 1)),
            pb.DetokenizeRequest(token_ids=[1] * (L + 1)),
            pb.DetokenizeRequest(token_ids=[1] * 10**6),
        ],
    }
    for message in cases[method]:
        assert (await failure(router, message.SerializeToString(), method))[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("role", ["echo", "deep", "sum", "index", "loop"])
async def test_a_template_that_fails_is_the_clients_mistake_and_its_words_are_cut(tmp_path: Path, role: str) -> None:
    """D06: the template's words can be as long as the message, and gRPC's headers cannot."""
    model = write_model_folder(tmp_path, max_model_len=L, tokenizer_config={"chat_template": TEMPLATE})
    async with running_router(model) as router:
        prefill, decode = await router.pair()
        code, details = await failure(router, request(chat((role, "😀\0" * 10**5))).SerializeToString())
        assert (code, len(details) <= 500) == ("INVALID_ARGUMENT", True)
        assert details.startswith("chat.messages")
        code, details = await failure(router, request(chat(("user", "nothing is shown"))).SerializeToString())
        assert (code, "no tokens" in details) == ("INVALID_ARGUMENT", True)
        await assert_serves(router, prefill, decode)


async def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    """D06."""
    model = write_model_folder(tmp_path, max_model_len=L, tokenizer_config={"chat_template": None})
    async with running_router(model) as router:
        prefill, decode = await router.pair()
        code, details = await failure(router, request(chat(("user", "a"))).SerializeToString())
        assert (code, "no chat template" in details) == ("INVALID_ARGUMENT", True)
        await assert_serves(router, prefill, decode)


async def test_an_empty_text_is_served_where_the_tokenizer_begins_every_text_with_bos(tmp_path: Path) -> None:
    """D03."""
    async with running_router(write_model_folder(tmp_path, byte_level(adds_bos=True))) as router:
        decode = await router.node(DECODE, "D")
        task = asyncio.create_task(router.generate(""))
        start = await decode.next_start()
        assert list(start.prompt_token_ids) == [0]
        await decode.say(delta(start, [70], finish="length", ended=True))
        assert (await task).token_ids == [70]


@pytest.mark.parametrize("length", [L - 2, L - 1])
async def test_the_longest_prompts_that_fit_are_served(router: Harness, length: int) -> None:
    """D05: with as many tokens as the context has left."""
    prefill, decode = await router.pair()
    for fields in ({}, {"max_tokens": L - length}):
        task = asyncio.create_task(router.generate([V - 1] * length, sampling=fields))
        starts = [await prefill.next_start(), await decode.next_start()]
        assert {start.sampling.max_tokens for start in starts} == {L - length}
        await prefill.say(delta(starts[0], [70], ended=True))
        await decode.say(delta(starts[1], [70], finish="stop", ended=True))
        await task


async def test_fifty_bad_requests_do_not_count_against_a_node(router: Harness) -> None:
    """B09."""
    prefill, decode = await router.pair()
    for _ in range(50):
        assert (await failure(router, request([5] * 500).SerializeToString()))[0] == "INVALID_ARGUMENT"
    await assert_serves(router, prefill, decode)


async def test_bad_requests_leave_no_memory_behind(router: Harness) -> None:
    """E03: bodies of megabytes that hold as many small things as they can, each gone before the next one comes."""
    prefill, decode = await router.pair()
    many, prompt = 2 * 10**6, request().SerializeToString()
    bodies = [
        field(5, field(1, b"") * many),  # messages of a chat
        field(4, field(1, bytes(many))),  # token ids
        prompt + field(6, field(11, b"") * many),  # stop strings
        prompt + field(6, field(18, b"") * many),  # bad words
        sampling(logit_bias=dict.fromkeys(range(10**5), 1.0)).SerializeToString(),
    ]

    async def send_all() -> None:
        for body in bodies:
            code, _ = await failure(router, body)
            assert code == "INVALID_ARGUMENT"

    gc.disable()  # what only the garbage collector finds would pile up meanwhile
    try:
        await send_all()
        before = resident_bytes()
        for _ in range(5):
            await send_all()
        assert resident_bytes() - before < 50e6
    finally:
        gc.enable()
    await assert_serves(router, prefill, decode)
