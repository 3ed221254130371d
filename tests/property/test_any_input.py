"""Requests with anything in any field, over real gRPC to a router with a fake node: served, or the client's mistake."""

import asyncio
import contextlib
import math
from pathlib import Path
from typing import Any

import grpc
from hypothesis import given, settings, strategies as st
from support.fake_node import DECODE
from support.requests import GOOD_PROMPT, chat, request, resident_bytes
from support.router_harness import Answer, Harness, running_router
from support.tiny_tokenizers import byte_level, write_model_folder

from kvrelay.engine.errors import KvrelayError
from kvrelay.node.wire import read_start
from kvrelay.proto import inference_pb2 as pb, node_pb2

V, L = byte_level().get_vocab_size(), 128
NAN, INF = math.nan, math.inf

INTS = [-(2**63), -1, 0, 1, 2, 16, 17, 20, 21, V - 1, V, V + 1, L - 1, L, 2**31, 2**32, 2**63 - 1]
FLOATS = [-INF, -1e30, -100.0, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 100.0, float(V), 2.0**31, 2.0**63, 1e30, INF, NAN]
STRINGS = ["", "a", " ", "\0", "\x7f", "ä😀", "x" * 64, "x" * 65, "x" * 257, "x" * 10**5, "</s>", "tiny"]
TRACES = ["", "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "ff-" + "1" * 32 + "-" + "2" * 16 + "-01", "\0", "x" * 10**4]
ROLES = ["user", "assistant", "system", "", "wizard", "\0", "x" * 65]

ints, floats, strings = st.sampled_from(INTS), st.sampled_from(FLOATS), st.sampled_from(STRINGS)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "n"), ints),
    **dict.fromkeys(("temperature", "top_p", "min_p"), floats),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), floats),
    "seed": st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]),
    "stop": st.lists(strings, max_size=18),
    "bad_words": st.lists(strings, max_size=18),
    "stop_token_ids": st.lists(ints, max_size=66),
    "logit_bias": st.dictionaries(ints, floats, max_size=4),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"), st.booleans()),
}
OUTER: dict[str, st.SearchStrategy[Any]] = {
    "request_id": strings,
    "model": st.sampled_from(["", "tiny"]),
    "priority": ints,
    "timeout_s": floats,
    "cache_salt": strings,
    "stream": st.booleans(),
    "trace": st.builds(pb.TraceContext, traceparent=st.sampled_from(TRACES), tracestate=strings),
}
PROMPTS = st.one_of(
    strings,
    st.lists(ints, max_size=4),
    st.lists(st.just(V - 1), min_size=L - 2, max_size=L + 1),
    st.lists(st.tuples(st.sampled_from(ROLES), strings), max_size=3).map(lambda turns: chat(*turns)),
    st.none(),
)


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """A good request with up to four fields that may be anything."""
    names = draw(st.lists(st.sampled_from(["prompt", *FIELDS, *OUTER]), max_size=4, unique=True))
    return request(
        draw(PROMPTS) if "prompt" in names else GOOD_PROMPT,
        sampling={"max_tokens": 2} | {name: draw(FIELDS[name]) for name in names if name in FIELDS},
        **{name: draw(OUTER[name]) for name in names if name in OUTER},
    )


def test_any_value_of_any_field_is_served_or_the_clients_mistake(tmp_path: Path) -> None:
    """D03, D04, D05, E03, E05: never an internal error; and what the router lets through, a node takes."""
    refused_by_node: list[KvrelayError] = []

    def output_of(start: node_pb2.Start, choice: int) -> list[int]:
        try:
            read_start(start, now=0.0, vocab_size=V)
        except KvrelayError as error:
            refused_by_node.append(error)
        return [70] * min(2, start.sampling.max_tokens)

    async def ask(router: Harness, message: pb.GenerateRequest) -> grpc.StatusCode:
        call = router.stub.Generate(message, timeout=10)
        try:
            answer = Answer([response async for response in call])
        except grpc.aio.AioRpcError as error:
            return error.code()
        assert set(answer.finish_reasons) == set(range(message.sampling.n or 1))
        return grpc.StatusCode.OK

    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        model = write_model_folder(tmp_path, max_model_len=L)
        router = runner.run(stack.enter_async_context(running_router(model)))
        decode = runner.run(router.node(DECODE, "D"))
        serving = runner.get_loop().create_task(decode.serve(output_of))
        codes: list[grpc.StatusCode] = []

        @settings(max_examples=400, deadline=None, database=None)
        @given(requests())
        def check(message: pb.GenerateRequest) -> None:
            codes.append(runner.run(ask(router, message)))
            assert codes[-1] in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
            assert not refused_by_node

        check()
        before = resident_bytes()
        check()
        assert resident_bytes() - before < 50e6
        assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} == set(codes)
        serving.cancel()
        runner.run(stack.aclose())
