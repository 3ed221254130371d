"""`kvrelay generate` and the client below it, against a router that answers without nodes."""

import asyncio
import io
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from support.fake_router import FakeRouter, serving

from kvrelay.cli import generate
from kvrelay.cli.client import NodeView, RouterClient
from kvrelay.cli.config import GenerateConfig
from kvrelay.cli.main import ExitCode, main
from kvrelay.engine.errors import ConfigError, RemoteError, Unavailable
from kvrelay.proto import inference_pb2 as pb, node_pb2


def beside_a_router(test: Callable[[FakeRouter], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serving() as router:
            await test(router)

    asyncio.run(run())


def generated(*prompt: str, **options: object) -> tuple[int, FakeRouter]:
    """Run the command beside a router. Returns: its exit code, and the router."""
    outcome: list[tuple[int, FakeRouter]] = []

    async def ask(router: FakeRouter) -> None:
        config = GenerateConfig(prompt=prompt, router=router.address, **options)
        outcome.append((await asyncio.to_thread(generate.run, config), router))

    beside_a_router(ask)
    return outcome[0]


def test_a_prompt_is_a_user_s_message_and_what_is_not_given_is_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    code, router = generated("one two")
    assert code == ExitCode.OK
    assert capsys.readouterr().out == "one two end\n"
    (request,) = router.requests
    assert [(message.role, message.content) for message in request.chat.messages] == [("user", "one two")]
    assert [(field.name, value) for field, value in request.sampling.ListFields()] == [("temperature", 0.0)]
    assert not request.HasField("timeout_s")


def test_a_raw_prompt_goes_as_it_is() -> None:
    _, router = generated("one", raw=True)
    assert router.requests[0].WhichOneof("prompt") == "text"


def test_every_option_reaches_the_router() -> None:
    given = {"max_tokens": 0, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 0}
    given |= {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.5}
    given |= {"n": 2, "logprobs": 0, "prompt_logprobs": 3}
    lists = {"stop": ("a", "b"), "stop_token_ids": (5,), "bad_words": ("no", "never")}
    _, router = generated("x", model="m", priority=-1, timeout_s=9.0, ignore_eos=True, json=True, **given, **lists)
    (request,) = router.requests
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert {name: tuple(getattr(sampling, name)) for name in lists} == lists
    assert {field.name for field, _ in sampling.ListFields()} == {*given, *lists, "ignore_eos"}
    assert (request.model, request.priority, request.timeout_s) == ("m", -1, 9.0)


def test_several_answers_come_in_the_order_of_their_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"prompt {i}" for i in range(2 * generate.MAX_AT_ONCE)]
    code, router = generated(*prompts, json=True)
    assert code == ExitCode.OK
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["text"] for answer in answers] == [f"{prompt} end" for prompt in prompts]
    assert [answer["index"] for answer in answers] == list(range(len(prompts)))
    assert len(router.requests) == len(prompts)


def test_several_choices_come_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = generated("one two", n=3)
    assert code == ExitCode.OK
    assert capsys.readouterr().out == "one two end\n\none two end 1\n\none two end 2\n"
    generated("one two", n=2, json=True)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(answer["choice"], answer["text"]) for answer in answers] == [(0, "one two end"), (1, "one two end 1")]


def test_json_has_log_probabilities_where_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    generated("one", json=True, logprobs=1, prompt_logprobs=0)
    answer = json.loads(capsys.readouterr().out)
    assert answer["logprobs"] == [{"token_ids": [0, 9], "logprobs": [-1.5, -0.25]}]
    assert answer["prompt_logprobs"] == [{"token_ids": [], "logprobs": []}, {"token_ids": [3], "logprobs": [-0.5]}]
    with pytest.raises(ConfigError, match="logprobs: only --json"):
        GenerateConfig(prompt=("x",), logprobs=1)


def test_json_has_tokens_usage_timings_and_hand_off(capsys: pytest.CaptureFixture[str]) -> None:
    generated("one two three", json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == [0, 1, 2]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2}
    assert answer["timings"]["second_token_ms"] == 40
    assert answer["handoff"]["kv_bytes"] == 368640


def test_one_failed_prompt_fails_the_command_and_no_other_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = generated("a", "fail RESOURCE_EXHAUSTED", "b")
    assert code == ExitCode.UNAVAILABLE
    captured = capsys.readouterr()
    assert captured.out.split() == ["a", "end", "b", "end"]
    assert "prompt 2: as asked" in captured.err


def test_a_failed_prompt_is_a_json_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = generated("fail INVALID_ARGUMENT", json=True)
    assert code == ExitCode.USAGE
    error = {"code": "INVALID_ARGUMENT", "message": "as asked", "retryable": False}
    assert json.loads(capsys.readouterr().out)["error"] == error


def test_timings_are_shown_apart_from_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    generated("one two", timings=True)
    captured = capsys.readouterr()
    assert captured.out == "one two end\n"
    assert "time to first token       30.0 ms = route 1.0 + " in captured.err
    assert "368,640 bytes in 1 block over zmq" in captured.err


def test_a_prompt_comes_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    _, router = generated("-")
    assert router.requests[0].chat.messages[0].content == "from a pipe"


def test_without_a_router_the_command_is_one_line_and_exit_code_4(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert main(["generate", "hi", "--router", address]) == ExitCode.UNAVAILABLE
    assert f"nobody answers at {address}" in capsys.readouterr().err


def test_the_client_tells_the_router_s_errors_with_their_code() -> None:
    async def ask(router: FakeRouter) -> None:
        async with RouterClient(router.address) as client:
            for code, retryable in (("UNAVAILABLE", True), ("DEADLINE_EXCEEDED", False)):
                with pytest.raises(RemoteError, match="as asked") as caught:
                    await anext(client.generate(f"fail {code}"))
                assert (caught.value.code, caught.value.retryable) == (code, retryable)

    beside_a_router(ask)


def test_a_client_that_stops_reading_frees_its_call() -> None:
    async def ask(router: FakeRouter) -> None:
        async with RouterClient(router.address) as client:
            answer = client.generate("one two three")
            assert (await anext(answer)).text == "one "
            await answer.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(answer)

    beside_a_router(ask)


def test_the_client_reads_the_cluster() -> None:
    async def ask(router: FakeRouter) -> None:
        load = node_pb2.Load(sessions=["d"])
        router.nodes = [
            node_pb2.ClusterNode(role=node_pb2.ROLE_PREFILL, epoch="p", name="P", grpc_address="h:1", load=load)
        ]
        async with RouterClient(router.address) as client:
            assert await client.nodes(timeout_s=5) == (
                NodeView(role="prefill", epoch="p", name="P", address="h:1", sessions=("d",)),
            )

    beside_a_router(ask)


def test_a_role_s_health_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    async def ask(router: FakeRouter) -> None:
        assert await asyncio.to_thread(main, ["health", router.address]) == ExitCode.OK
        await router.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert await asyncio.to_thread(main, ["health", router.address]) == ExitCode.UNAVAILABLE

    beside_a_router(ask)
    captured = capsys.readouterr()
    assert captured.out == "serving\n"
    assert captured.err.endswith("does not serve: it drains\n")


def test_a_lost_router_is_unavailable_for_the_cluster_too() -> None:
    async def ask() -> None:
        async with RouterClient("127.0.0.1:1") as client:
            with pytest.raises(Unavailable, match=r"nobody answers at 127\.0\.0\.1:1"):
                await client.nodes(timeout_s=5)

    asyncio.run(ask())


def test_a_form_reaches_the_router_whichever_way_it_is_given(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    asked: dict[str, tuple[object, object]] = {
        "json_object": (True, pb.StructuredOutput(json_object=pb.JsonObject())),
        "json_schema": (f"@{schema}", pb.StructuredOutput(json_schema='{"type": "object"}')),
        "regex": ("a+", pb.StructuredOutput(regex="a+")),
        "choice": (("yes", "no"), pb.StructuredOutput(choice=pb.Choices(choices=["yes", "no"]))),
    }
    for name, (value, expected) in asked.items():
        _, router = generated("one", **{name: value})
        assert router.requests[0].sampling.structured_output == expected
    _, router = generated("one", json_schema='{"type": "array"}')
    assert router.requests[0].sampling.structured_output.json_schema == '{"type": "array"}'
    with pytest.raises(ConfigError, match="one form"):
        GenerateConfig(prompt=("x",), regex="a", json_object=True)
    with pytest.raises(ConfigError, match="json_schema = @"):
        GenerateConfig(prompt=("x",), json_schema=f"@{tmp_path}/missing").sampling()
