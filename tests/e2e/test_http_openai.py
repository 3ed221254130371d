"""OpenAI's API as its own client, another public client and a bare socket see it."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import huggingface_hub
import openai
import pytest
from huggingface_hub import InferenceClient
from support.http_router import answering_router, call, text_of
from support.router_harness import Harness
from support.tiny_tokenizers import byte_level

MESSAGES: list[Any] = [{"role": "user", "content": "Where is Rome?"}]


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with answering_router(tmp_path) as harness:
        yield harness


@pytest.fixture
async def client(router: Harness) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ids(text: str) -> list[int]:
    return byte_level().encode(text).ids


# --- OpenAI's client


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 40])
async def test_streamed_or_not_over_http_or_grpc_the_text_is_one(
    router: Harness, client: openai.AsyncOpenAI, max_tokens: int
) -> None:
    """D08, A13, A14: also where the text comes with the end."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Where?", "max_tokens": max_tokens}
    whole = await client.completions.create(**asked)
    stream = await client.completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    over_grpc = await router.generate("Where?", sampling={"max_tokens": max_tokens})
    assert whole.choices[0].text == text_of(max_tokens)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(max_tokens) == over_grpc.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert whole.usage
    assert whole.usage.completion_tokens == max_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.system_fingerprint
    assert whole.system_fingerprint.startswith("kvrelay-")


async def test_a_chat_says_its_role_first_and_its_usage_last(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        n=2,
    )
    chunks = [chunk async for chunk in stream]
    *said, last = chunks
    for choice in range(2):
        mine = [c.choices[0] for c in said if c.choices[0].index == choice]
        assert [part.delta.role for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(part.delta.content or "" for part in mine) == text_of(6, choice)
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in said)
    assert last.choices == []
    assert last.usage
    assert last.usage.completion_tokens == 12
    assert last.usage.total_tokens == 12 + last.usage.prompt_tokens


async def test_a_whole_chat_has_a_message_for_each_choice(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, n=3)
    assert [choice.message.content for choice in answer.choices] == [text_of(5, choice) for choice in range(3)]
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.object == "chat.completion"
    assert answer.usage
    assert answer.usage.prompt_tokens_details is not None


async def test_a_message_s_parts_are_joined_and_developer_is_a_system_role(client: openai.AsyncOpenAI) -> None:
    parts = [{"type": "text", "text": "Where "}, {"type": "text", "text": "is Rome?"}]
    counts = set()
    for messages in (
        [{"role": "system", "content": "S"}, {"role": "user", "content": "Where is Rome?"}],
        [{"role": "developer", "content": "S"}, {"role": "user", "content": parts}],
    ):
        answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)  # type: ignore[arg-type]
        assert answer.usage
        counts.add(answer.usage.prompt_tokens)
    assert len(counts) == 1


@pytest.mark.parametrize("as_dict", [False, True], ids=["object", "dict"])
async def test_an_answer_can_be_sent_back_as_the_client_holds_it(client: openai.AsyncOpenAI, as_dict: bool) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
    message = answer.choices[0].message
    turn: Any = message.model_dump() if as_dict else message  # the first has fields that are null, such as tool_calls
    plain: Any = {"role": "assistant", "content": message.content}
    counts = set()
    for said in (turn, plain):
        history = [*MESSAGES, said, {"role": "user", "content": "And then?"}]
        answer = await client.chat.completions.create(model="tiny", messages=history, max_tokens=1)
        assert answer.usage
        counts.add(answer.usage.prompt_tokens)
    assert len(counts) == 1


async def test_log_probabilities_of_a_chat(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    answer = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert "".join(entry.token for entry in logprobs.content) == text_of(4)
    for entry, token_id in zip(logprobs.content, ids(text_of(4)), strict=True):
        assert bytes(entry.bytes or []).decode() == entry.token
        assert entry.logprob == -token_id / 8
        assert [likely.logprob for likely in entry.top_logprobs] == [-token_id / 8 - 1 - i for i in range(2)]
    streamed = [
        entry
        async for chunk in await client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == logprobs.content
    none_asked = await client.chat.completions.create(**asked, logprobs=True)
    assert none_asked.choices[0].logprobs
    assert none_asked.choices[0].logprobs.content
    assert none_asked.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_of_a_completion_with_its_prompt_echoed(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    """A15, C12."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Where is Rome?", "max_tokens": 4, "logprobs": 2, "echo": True}
    if stream:
        choices = [c.choices[0] async for c in await client.completions.create(**asked, stream=True)]
    else:
        choices = (await client.completions.create(**asked)).choices
    text = "".join(choice.text for choice in choices)
    assert text == f"Where is Rome?{text_of(4)}"
    told = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for logprobs in told for token in logprobs.tokens or []]
    offsets = [offset for logprobs in told for offset in logprobs.text_offset or []]
    values = [value for logprobs in told for value in logprobs.token_logprobs or []]
    likeliest = [top for logprobs in told for top in logprobs.top_logprobs or []]
    assert "".join(tokens) == text
    assert all(text[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True))
    assert values[0] is None
    assert likeliest[0] is None
    every = [*ids("Where is Rome?"), *ids(text_of(4))]
    assert values[1:] == [-token_id / 8 for token_id in every[1:]]
    for token, value, top in zip(tokens[1:], values[1:], likeliest[1:], strict=True):
        assert token in top
        assert value in top.values()


async def test_echo_without_log_probabilities_and_of_ids(client: openai.AsyncOpenAI) -> None:
    for prompt in ("Where?", ids("Where?")):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=3, echo=True)
        assert answer.choices[0].text == f"Where?{text_of(3)}"
        assert answer.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [True, False])
async def test_several_prompts_of_either_kind_are_answered_in_one_call(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["Where?", "Why is that so?"], "max_tokens": 5, "n": 2}
    texts = dict.fromkeys(range(4), "")
    if stream:
        options = {"include_usage": True}
        chunks = [c async for c in await client.completions.create(**asked, stream=True, stream_options=options)]
        for chunk in chunks[:-1]:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        usage = chunks[-1].usage
    else:
        answer = await client.completions.create(**asked)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        texts, usage = {choice.index: choice.text for choice in answer.choices}, answer.usage
    assert texts == {index: text_of(5, index % 2) for index in range(4)}
    assert usage
    assert usage.completion_tokens == 20
    assert usage.prompt_tokens == len(ids("Where?")) + len(ids("Why is that so?"))
    as_ids = await client.completions.create(model="tiny", prompt=[ids("Where?"), [70]], max_tokens=2)
    assert len(as_ids.choices) == 2


async def test_stop_strings_as_one_or_as_a_list(client: openai.AsyncOpenAI) -> None:
    for stop in (" France", [" never", " France"]):
        answer = await client.completions.create(model="tiny", prompt="Where?", max_tokens=30, stop=stop)
        assert answer.choices[0].text == " the capital of"
        assert answer.choices[0].finish_reason == "stop"


async def test_fields_of_vllm_and_ours_reach_the_nodes_and_the_answer(client: openai.AsyncOpenAI) -> None:
    more = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2, "priority": -3}
    more |= {"stop_token_ids": [7], "skip_special_tokens": False, "bad_words": ["no"], "return_token_ids": True}
    more |= {"include_stop_str_in_output": True, "return_timings": True, "cache_salt": "s", "prompt_logprobs": 1}
    answer = await client.completions.create(
        model="tiny", prompt="Where?", max_tokens=4, logit_bias={"70": 1}, user="u", seed=3, extra_body=more
    )
    extra = answer.choices[0].model_extra
    assert extra
    assert extra["token_ids"] == ids(text_of(4))
    assert extra["prompt_logprobs"][0] is None
    own = str(ids("Where?")[1])
    assert extra["prompt_logprobs"][1][own]["decoded_token"] == byte_level().decode([int(own)])
    assert answer.model_extra
    assert answer.model_extra["kvrelay"][0]["timings"]["ttft_ms"] > 0


async def test_what_is_served_is_listed(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]


@pytest.mark.parametrize(
    ("more", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, None),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**9}, openai.BadRequestError, "max_tokens"),
        ({"logprobs": 10**6}, openai.BadRequestError, "logprobs"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"best_of": 2}, openai.BadRequestError, "best_of"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"extra_body": {"max_token": 3}}, openai.BadRequestError, None),
    ],
)
async def test_a_mistake_is_the_client_s_error_class_with_the_field(
    client: openai.AsyncOpenAI, more: dict[str, Any], kind: type[openai.APIStatusError], param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        await client.completions.create(**({"model": "tiny", "prompt": "Where?"} | more))
    assert caught.value.body
    assert caught.value.body["param"] == param  # type: ignore[index]


# --- other clients


async def test_another_public_client_chats(router: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # other tests' models are made, not fetched
    client = InferenceClient(base_url=f"{router.http_url}/v1", api_key="none")

    def chat() -> tuple[str | None, str]:
        whole = client.chat_completion(MESSAGES, model="tiny", max_tokens=7)
        stream = client.chat_completion(MESSAGES, model="tiny", max_tokens=7, stream=True)
        return whole.choices[0].message.content, "".join(part.choices[0].delta.content or "" for part in stream)

    assert await asyncio.to_thread(chat) == (text_of(7), text_of(7))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_reads_a_stream(router: Harness) -> None:
    body = '{"model":"tiny","prompt":"Where?","max_tokens":2,"stream":true}'
    process = await asyncio.create_subprocess_exec(
        "curl", "-sN", f"{router.http_url}/v1/completions", "-d", body, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert said.startswith(b'data: {"id":"cmpl-')
    assert said.endswith(b"\n\ndata: [DONE]\n\n")


# --- a bare socket


async def test_a_stream_is_server_sent_events_and_says_done_once(router: Harness) -> None:
    reply = await call(router, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stream": True})
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    events = reply.events
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in event for event in events[:-1])


async def test_tokens_and_back(router: Harness) -> None:
    tokens = (await call(router, "/tokenize", {"prompt": "Where is Rome?"})).json
    assert tokens == {"tokens": ids("Where is Rome?"), "count": len(ids("Where is Rome?")), "max_model_len": 128}
    assert (await call(router, "/detokenize", {"tokens": tokens["tokens"]})).json == {"prompt": "Where is Rome?"}
    chat = (await call(router, "/tokenize", {"messages": MESSAGES})).json
    assert chat["count"] > tokens["count"]
    assert (await call(router, "/tokenize", {})).status == 400
    assert (await call(router, "/tokenize", {"prompt": "a", "messages": MESSAGES})).status == 400


async def test_the_document_describes_every_route(router: Harness) -> None:
    document = (await call(router, "/openapi.json")).json
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health"}
    for path, methods in document["paths"].items():
        for method in methods:
            reply = await call(router, path, {} if method == "post" else None)
            assert reply.status != 404, path


async def test_without_a_decode_node_it_is_not_healthy(tmp_path: Path) -> None:
    from support.router_harness import running_router
    from support.tiny_tokenizers import write_model_folder

    async with running_router(write_model_folder(tmp_path)) as router:
        reply = await call(router, "/health")
        assert (reply.status, reply.json["error"]["code"]) == (503, "not_serving")
        reply = await call(router, "/v1/completions", {"prompt": "a"})
        assert (reply.status, reply.json["error"]["type"]) == (503, "server_error")
        await router.pair()
        assert (await call(router, "/health")).json == {"status": "ok"}
