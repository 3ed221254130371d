"""Structured output through router, prefill and decode node, as clients ask for it; and what goes wrong on the way."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import openai
import pytest
from support.http_router import call
from support.oracle import random_prompt
from support.router_harness import Harness, running_router, wait_until
from support.served_nodes import Cluster, ServedNode, cluster

from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import ModelInfo, read_model_info
from kvrelay.engine.request import StructuredOutput
from kvrelay.proto import inference_pb2 as pb

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "e": {"enum": ["x", "yz"]}},
    "required": ["n", "e"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # random weights would write little else
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": SCHEMA}}


@pytest.fixture
def info(tiny_model: Path) -> ModelInfo:
    return read_model_info(tiny_model)


@pytest.fixture
async def router(info: ModelInfo) -> AsyncIterator[Harness]:
    async with running_router(info) as harness:
        yield harness


@pytest.fixture
async def nodes(router: Harness, tiny_model: Path, info: ModelInfo) -> AsyncIterator[Cluster]:
    async with cluster(router, tiny_model, info) as both:
        yield both


@pytest.fixture
async def client(nodes: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{nodes.router.http_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def check_pair(text: str) -> None:
    said = json.loads(text)
    assert list(said) == ["n", "e"]
    assert 0 <= said["n"] <= 99
    assert said["e"] in ("x", "yz")


# --- as clients ask


async def test_a_chat_has_its_schema_whole_and_streamed_and_ends_by_itself(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "messages": MESSAGES, "response_format": FORMAT, "seed": 5, "max_tokens": 90}
    whole = await client.chat.completions.create(**asked, n=3)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.content is not None
        check_pair(choice.message.content)
    assert len({choice.message.content for choice in whole.choices}) > 1
    stream = await client.chat.completions.create(**asked, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["größer"]}}, "größer"),
        ({"guided_json": SCHEMA}, r"\{.*\}"),
        ({"guided_grammar": 'start: "a" | "(" start ")"'}, r"\(*a\)*"),
    ],
)
async def test_a_completion_has_what_vllms_fields_ask_for(
    client: openai.AsyncOpenAI, extra: dict[str, Any], expected: str
) -> None:
    answers = await asyncio.gather(
        *(
            client.completions.create(model="", prompt="the", seed=seed, max_tokens=80, extra_body=extra)
            for seed in range(6)
        )
    )
    for answer in answers:
        if answer.choices[0].finish_reason == "stop":
            assert re.fullmatch(expected, answer.choices[0].text, re.DOTALL)
    assert any(answer.choices[0].finish_reason == "stop" for answer in answers)


async def test_an_output_that_is_cut_off_by_max_tokens_is_a_beginning_of_its_form(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "prompt": "the", "max_tokens": 2, "extra_body": {"guided_regex": "[a-c]{40}"}}
    answer = await client.completions.create(**asked)
    assert answer.choices[0].finish_reason == "length"
    assert re.fullmatch("[a-c]+", answer.choices[0].text)


async def test_a_form_that_its_last_token_completes_has_stopped_not_run_out(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "prompt": "the", "extra_body": {"guided_choice": ["hello"]}}
    answer = await client.completions.create(**asked, max_tokens=80)
    assert answer.usage is not None
    exactly = await client.completions.create(**asked, max_tokens=answer.usage.completion_tokens)
    assert [choice.finish_reason for choice in (answer.choices[0], exactly.choices[0])] == ["stop", "stop"]
    assert answer.choices[0].text == exactly.choices[0].text == "hello"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nope"}}}}, ""),
        ({"guided_regex": "["}, "structured_output.regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_choice": []}, "structured_output.choice"),
        ({"guided_choice": ["a"], "min_tokens": 3}, "min_tokens"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_a_form_that_cannot_be_had_is_a_400_and_reaches_no_node(
    nodes: Cluster, body: dict[str, Any], param: str
) -> None:
    reply = await call(nodes.router, "/v1/completions", {"prompt": "the", "max_tokens": 4} | body)
    assert reply.status == 400
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert reply.json["error"]["param"] == (param or "structured_output.json_schema")
    assert [node.snapshot.num_starts for node in nodes.nodes] == [0, 0]


async def test_grpc_takes_the_same_forms(nodes: Cluster) -> None:
    forms = {
        "[ab]{4}": pb.StructuredOutput(regex="[ab]{4}"),
        "yes|no": pb.StructuredOutput(choice=pb.Choices(choices=["yes", "no"])),
        r"\{.*\}": pb.StructuredOutput(json_schema=json.dumps(SCHEMA)),
        "x+y": pb.StructuredOutput(grammar='start: "xy" | "x" start'),
    }
    for pattern, form in forms.items():
        answer = await nodes.router.generate(
            random_prompt(20), sampling={"max_tokens": 80, "seed": 2, "structured_output": form}
        )
        assert answer.last.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await nodes.router.generate(random_prompt(20), sampling={"structured_output": pb.StructuredOutput()})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "structured_output" in str(caught.value.details())


# --- on the way to the engine


def regex_call(nodes: Cluster, **more: Any) -> "asyncio.Task[Any]":
    sampling = {"max_tokens": 30, "structured_output": pb.StructuredOutput(regex="[ab]{4}")} | more
    return asyncio.create_task(nodes.router.generate(random_prompt(40), sampling=sampling))


async def compiling(node: ServedNode) -> None:
    await wait_until(lambda: node._process._intake.num_compiling == 1)


async def test_others_are_served_while_a_form_is_compiled(nodes: Cluster) -> None:
    for node in nodes.nodes:
        with node._process._intake._compiler._lock:  # as one that takes for ever would
            task = regex_call(nodes)
            await compiling(node)
            other = await nodes.router.generate(random_prompt(40), sampling={"max_tokens": 4})
            assert other.last.finish_reason == "length"
            assert not task.done()
        answer = await task
        assert re.fullmatch("[ab]{4}", answer.text)


async def test_a_client_that_leaves_while_its_form_is_compiled_leaves_nothing(nodes: Cluster) -> None:
    prefill, decode = nodes.nodes
    started = [node.snapshot.num_starts for node in (prefill, decode)]
    with prefill._process._intake._compiler._lock, decode._process._intake._compiler._lock:
        task = regex_call(nodes)
        await compiling(prefill)
        await compiling(decode)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wait_until(lambda: not prefill._process._intake.num_compiling)
        await wait_until(lambda: not decode._process._intake.num_compiling)
    await nodes.quiet()
    assert [node.snapshot.num_starts for node in (prefill, decode)] == started


def refuse(form: StructuredOutput) -> NoReturn:
    raise ModelError("no such vocabulary")


async def test_a_form_that_one_node_alone_cannot_compile_is_that_request_s_error(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left on the other node, and the next request is served."""
    for node in nodes.nodes:
        with monkeypatch.context() as broken:
            broken.setattr(node._process._intake._compiler, "_matcher", refuse)
            with pytest.raises(grpc.aio.AioRpcError, match="no such vocabulary"):
                await regex_call(nodes)
            await nodes.quiet()
        answer = await regex_call(nodes)
        assert re.fullmatch("[ab]{4}", answer.text)


async def test_a_node_told_to_stop_serves_the_one_whose_form_it_compiles(
    router: Harness, tiny_model: Path, info: ModelInfo
) -> None:
    async with cluster(router, tiny_model, info) as nodes:
        decode = nodes.decodes[0]
        with decode._process._intake._compiler._lock:
            task = regex_call(nodes)
            await compiling(decode)
            decode._process.on_drain()
            await wait_until(lambda: nodes.seen(decode).draining)
        answer = await task
        assert re.fullmatch("[ab]{4}", answer.text)
