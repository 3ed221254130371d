"""Every mistake of an HTTP client: refused with OpenAI's body, no node hears of it, and the next request is served."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.http_router import Reply, answering_router, call, head, read_reply, text_of
from support.router_harness import Harness
from support.tiny_tokenizers import byte_level, write_model_folder

from kvrelay.cli.client import RouterClient
from kvrelay.engine.errors import RemoteError

V, L = byte_level().get_vocab_size(), 128
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with answering_router(tmp_path, max_body_size="64KiB") as harness:
        yield harness


async def assert_serves(router: Harness) -> None:
    """No request is left, and the next one is served."""
    await router.assert_idle()
    reply = await call(router, COMPLETIONS, {"prompt": "Where?", "max_tokens": 2})
    assert reply.json["choices"][0]["text"] == text_of(2)


def prompt(**more: Any) -> dict[str, Any]:
    return {"prompt": "Where?", "max_tokens": 2} | more


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": 2} | more


USER = {"role": "user", "content": "Where?"}

BAD: dict[str, tuple[str, Any, int, str | None]] = {
    # name: path, body, status, param
    # --- D03: prompts of nothing
    "no prompt": (COMPLETIONS, {"max_tokens": 2}, 400, None),
    "an empty text": (COMPLETIONS, prompt(prompt=""), 400, "prompt"),
    "a list of an empty text": (COMPLETIONS, prompt(prompt=[""]), 400, "prompt"),
    "an empty list": (COMPLETIONS, prompt(prompt=[]), 400, "prompt"),
    "a list of an empty list": (COMPLETIONS, prompt(prompt=[[]]), 400, "prompt"),
    "null": (COMPLETIONS, prompt(prompt=None), 400, "prompt"),
    # --- D04: token ids out of the vocabulary, in any field
    "a negative id": (COMPLETIONS, prompt(prompt=[-1]), 400, "prompt"),
    "an id too high": (COMPLETIONS, prompt(prompt=[V]), 400, "prompt"),
    "an id of 40 bits": (COMPLETIONS, prompt(prompt=[2**40]), 400, "prompt"),
    "an id of 80 bits": (COMPLETIONS, prompt(prompt=[2**80]), 400, "prompt"),
    "a fraction of an id": (COMPLETIONS, prompt(prompt=[1.5]), 400, "prompt[0]"),
    "ids and texts": (COMPLETIONS, prompt(prompt=["a", 1]), 400, "prompt[1]"),
    "a stop id too high": (COMPLETIONS, prompt(stop_token_ids=[V], min_tokens=1), 400, "stop_token_ids"),
    "a stop id of 63 bits": (COMPLETIONS, prompt(stop_token_ids=[2**63]), 400, "stop_token_ids"),
    "a bias too high": (COMPLETIONS, prompt(logit_bias={"999999": 1}), 400, "logit_bias"),
    "a bias of a word": (COMPLETIONS, prompt(logit_bias={"x": 1}), 400, "logit_bias"),
    "a negative bias": (COMPLETIONS, prompt(logit_bias={"-1": 1}), 400, "logit_bias"),
    "a bias of 5,000 digits": (COMPLETIONS, prompt(logit_bias={"1" * 5000: 1}), 400, "logit_bias"),
    # --- D05: the edge of the context
    "a prompt as long as the context": (COMPLETIONS, prompt(prompt=[5] * L), 400, "prompt"),
    "more than there is room for": (COMPLETIONS, prompt(max_tokens=10**9), 400, "max_tokens"),
    "one more than there is room for": (COMPLETIONS, prompt(prompt=[5] * (L - 1)), 400, "max_tokens"),
    "no tokens": (COMPLETIONS, prompt(max_tokens=0), 400, "max_tokens"),
    # --- D06: messages that the template does not take
    "no messages": (CHAT, chat(), 400, "messages"),
    "content of null": (CHAT, chat({"role": "user", "content": None}), 400, "messages[0].content"),
    "content of a number": (CHAT, chat({"role": "user", "content": 5}), 400, "messages[0].content"),
    "an unknown role": (CHAT, chat({"role": "wizard", "content": "a"}), 400, "messages"),
    "an empty role": (CHAT, chat({"role": "", "content": "a"}), 400, "messages[0].role"),
    "a picture": (
        CHAT,
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        400,
        "messages[0].content[0]",
    ),
    "a tool's call sent back": (
        CHAT,
        chat(USER, {"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}),
        400,
        "messages[1].tool_calls",
    ),
    # --- what is not served
    "tools": (CHAT, chat(USER, tools=[{"type": "function"}]), 400, "tools"),
    "a tool that must be called": (CHAT, chat(USER, tool_choice="required"), 400, "tool_choice"),
    "sound": (CHAT, chat(USER, modalities=["audio"]), 400, "modalities"),
    "two limits": (CHAT, chat(USER, max_completion_tokens=3), 400, "max_tokens"),
    "top_logprobs alone": (CHAT, chat(USER, top_logprobs=3), 400, "top_logprobs"),
    "prompt_logprobs in a stream": (CHAT, chat(USER, prompt_logprobs=1, stream=True), 400, "prompt_logprobs"),
    "stream options without a stream": (CHAT, chat(USER, stream_options={}), 400, "stream_options"),
    "an unknown field": (CHAT, chat(USER, max_token=3), 400, None),
    "too many prompts": (COMPLETIONS, prompt(prompt=["a"] * 129), 400, "prompt"),
    "a second prompt that is too long": (COMPLETIONS, prompt(prompt=["a", [5] * L]), 400, "prompt"),
    # --- types
    "a number as text": (COMPLETIONS, prompt(temperature="1"), 400, "temperature"),
    "a flag as number": (COMPLETIONS, prompt(stream=1), 400, "stream"),
    "a body that is a list": (COMPLETIONS, [], 400, None),
    "another model": (COMPLETIONS, prompt(model="gpt"), 404, None),
    "a control character": (COMPLETIONS, prompt(cache_salt="\x00"), 400, "cache_salt"),
    # --- D09: bodies that are no JSON
    "nothing": (COMPLETIONS, b"", 400, None),
    "GBK": (COMPLETIONS, '{"prompt":"你好"}'.encode("gbk"), 400, None),
    "cut off": (COMPLETIONS, b'{"prompt":"a', 400, None),
    "a lone surrogate": (COMPLETIONS, b'{"prompt":"\\ud83d"}', 400, None),
    "a surrogate as UTF-8": (COMPLETIONS, b'{"prompt":"\xed\xa0\xbd"}', 400, None),
    "not a number": (COMPLETIONS, b'{"prompt":"a","temperature":NaN}', 400, None),
    "infinite": (COMPLETIONS, b'{"prompt":"a","temperature":1e999}', 400, "temperature"),
    "deep": (COMPLETIONS, b'{"prompt":"a","metadata":{"a":' + b"[" * 30_000, 400, None),
    "two bodies": (COMPLETIONS, b'{"prompt":"a"}{"prompt":"a"}', 400, None),
    "too large": (COMPLETIONS, b"x" * (64 * 2**10 + 1), 413, None),
}


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_mistake_is_refused_by_name_and_the_next_request_is_served(
    router: Harness, stream: bool, chunked: bool
) -> None:
    """D03, D04, D05, D06, D09."""
    for name, (path, body, status, param) in BAD.items():
        asked = body
        if stream and isinstance(body, dict) and "stream" not in body and "stream_options" not in body:
            asked = body | {"stream": True}
        reply = await call(router, path, asked, chunked=chunked)
        assert (reply.status, reply.json["error"]["param"]) == (status, param), (name, reply.body)
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}, name
        assert len(reply.body) < 700, f"{name}: repeats what was sent"
    await assert_serves(router)


async def test_a_nul_in_a_prompt_is_a_character_like_others(router: Harness) -> None:
    """D09."""
    reply = await call(router, COMPLETIONS, prompt(prompt="a\x00b"))
    assert reply.status == 200


async def test_the_context_s_last_token_can_be_had(router: Harness) -> None:
    """D05."""
    reply = await call(router, COMPLETIONS, {"prompt": [5] * (L - 1)})
    assert reply.json["usage"] == {
        "prompt_tokens": L - 1,
        "completion_tokens": 1,
        "total_tokens": L,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_template_s_own_words_come_back_and_it_goes_on_working(tmp_path: Path) -> None:
    """D06."""
    template = (
        "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    write_model_folder(tmp_path / "made")
    async with answering_router(tmp_path) as plain:
        assert (await call(plain, CHAT, chat(USER, USER))).status == 200
    from support.router_harness import running_router

    folder = tmp_path / "strict"
    async with running_router(write_model_folder(folder, tokenizer_config={"chat_template": template})) as router:
        reply = await call(router, CHAT, chat(USER, USER))
        assert reply.status == 400
        assert "Roles must alternate" in reply.json["error"]["message"]
        assert (await call(router, "/tokenize", {"messages": [USER]})).status == 200


async def test_a_body_that_is_said_to_be_too_large_is_not_waited_for(router: Harness) -> None:
    host, port = router.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head("POST", COMPLETIONS, b"").replace(b"length: 0", b"length: 9999999999"))
    reply = await read_reply(reader)
    writer.close()
    assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")
    await assert_serves(router)


async def test_a_body_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async with answering_router(tmp_path, http_body_timeout_s=0.2) as router:
        host, port = router.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head("POST", COMPLETIONS, b"x" * 100) + b"x" * 10)
        reply = await read_reply(reader)
        writer.close()
        assert (reply.status, reply.json["error"]["code"]) == (408, "timeout")
        await assert_serves(router)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/v1/models", 405), ("POST", "/v1/nope", 404)],
)
async def test_an_unknown_path_or_method_has_openai_s_body(
    router: Harness, method: str, path: str, status: int
) -> None:
    reply = await call(router, path, method=method)
    assert (reply.status, reply.json["error"]["type"]) == (status, "invalid_request_error")


async def test_too_much_at_once_says_when_to_come_back(tmp_path: Path) -> None:
    async with answering_router(tmp_path, max_requests=1) as router:
        reply = await call(router, COMPLETIONS, prompt(prompt=["a", "b"]))
        assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(reply.headers["retry-after"]) >= 1
        assert int(reply.headers["retry-after-ms"]) >= 100
        await assert_serves(router)


async def test_a_deadline_ends_a_call_with_its_status(tmp_path: Path) -> None:
    from support.router_harness import running_router

    async with running_router(write_model_folder(tmp_path)) as router:
        await router.pair()  # which says nothing
        for stream in (False, True):
            reply = await call(router, COMPLETIONS, prompt(timeout_s=0.2, stream=stream))
            assert (reply.status, reply.json["error"]["code"]) == (504, "deadline_exceeded")


# --- keys


OPEN = ("/health",)
ROUTES: dict[str, Any] = {
    COMPLETIONS: prompt(),
    CHAT: chat(USER),
    "/v1/models": None,
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [70]},
    "/openapi.json": None,
    "/health": None,
}


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_but_health_asks_for_a_key(tmp_path: Path, path: str) -> None:
    async with answering_router(tmp_path, api_key=("first", "second")) as router:
        for key, lets_in in (("first", True), ("second", True), ("third", False), ("", False), ("firs", False)):
            reply = await call(router, path, ROUTES[path], headers=[("Authorization", f"Bearer {key}")])
            assert reply.status == (200 if lets_in or path in OPEN else 401), (key, reply.body)
        reply = await call(router, path, ROUTES[path])
        assert reply.status == (200 if path in OPEN else 401)
        if path not in OPEN:
            assert reply.json["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"


async def test_grpc_asks_its_clients_for_the_same_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering_router(tmp_path, api_key=("right",)) as router:
        for key in ("", "wrong"):
            monkeypatch.setenv("KVRELAY_API_KEY", key)
            async with RouterClient(router.address) as client:
                for ask in (client.model, client.nodes, client.cluster):
                    with pytest.raises(RemoteError) as caught:
                        await ask(timeout_s=10)
                    assert caught.value.code == "UNAUTHENTICATED"
                with pytest.raises(RemoteError, match="an API key is needed"):
                    async for _ in client.generate("Where?", raw=True, sampling={"max_tokens": 2}):
                        pass
                assert await client.is_serving(timeout_s=10)
        monkeypatch.setenv("KVRELAY_API_KEY", "right,other")
        async with RouterClient(router.address) as client:
            pieces = [piece async for piece in client.generate("Where?", raw=True, sampling={"max_tokens": 2})]
            assert "".join(piece.text for piece in pieces) == text_of(2)
            assert len((await client.cluster(timeout_s=10)).nodes) == 2


async def test_a_wrong_key_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    async with answering_router(tmp_path, api_key=("right",)) as router:
        host, port = router.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head("POST", COMPLETIONS, b"x" * 1000))  # and no byte of it comes
        assert (await read_reply(reader)).status == 401
        writer.close()


# --- CORS


async def test_other_origins_are_let_in_only_where_they_are_named(tmp_path: Path) -> None:
    origin = [("Origin", "https://example.org")]
    ask = [*origin, ("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "authorization")]
    async with answering_router(tmp_path / "a") as closed:
        assert "access-control-allow-origin" not in (await call(closed, "/v1/models", headers=origin)).headers
        assert (await call(closed, COMPLETIONS, method="OPTIONS", headers=ask)).status == 405
    async with answering_router(tmp_path / "b", cors_origins=("https://example.org",)) as router:
        reply = await call(router, "/v1/models", headers=origin)
        assert reply.headers["access-control-allow-origin"] == "https://example.org"
        assert (await call(router, COMPLETIONS, method="OPTIONS", headers=ask)).status == 200
        stranger = await call(router, "/v1/models", headers=[("Origin", "https://other.example")])
        assert "access-control-allow-origin" not in stranger.headers


# --- whatever comes


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
NAMES = ("prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options")
NAMES += ("logprobs", "echo", "top_k", "stop_token_ids", "model", "priority", "timeout_s", "messages", "user")


@pytest.mark.timeout(120)
async def test_whatever_stands_in_any_field_is_answered_or_refused(router: Harness) -> None:
    replies: list[Reply] = []
    loop = asyncio.get_running_loop()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]),
        more=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    )
    def ask(path: str, more: dict[str, Any]) -> None:
        given = prompt() if path == COMPLETIONS else chat(USER) if path == CHAT else {}
        body = json.dumps(given | more).encode()
        reply = asyncio.run_coroutine_threadsafe(call(router, path, body), loop).result(20)
        assert reply.status == 200 or 400 <= reply.status < 500, (body, reply)
        if reply.status != 200:
            assert set(reply.json["error"]) == {"message", "type", "param", "code"}
        replies.append(reply)

    await asyncio.to_thread(ask)
    assert {reply.status for reply in replies} >= {200, 400}
    await assert_serves(router)
