"""An answer's figures as lines for a person."""

from dataclasses import fields, replace

from kvrelay.cli.client import Handoff, Timings, Usage
from kvrelay.cli.report import describe

USAGE = Usage(prompt_tokens=36, completion_tokens=11, cached_tokens=16)
TIMINGS = replace(
    Timings(**{field.name: 0.0 for field in fields(Timings)}),
    ttft_ms=100.0,
    route_ms=1.5,
    prefill_ms=98.5,
    second_token_ms=130.0,
    exposed_transfer_ms=2.0,
    first_decode_step_ms=28.0,
    total_ms=600.0,
)
HANDOFF = Handoff(
    kv_bytes=1105920,
    kv_blocks=3,
    cached_blocks=1,
    grant_ms=0.5,
    transfer_ms=2.25,
    transport="zmq",
    prefill_node="prefill-0",
    decode_node="decode-0",
)


def test_every_segment_is_named_and_the_hand_off_is_counted() -> None:
    assert describe(USAGE, TIMINGS, HANDOFF) == [
        "time to first token      100.0 ms = route 1.5 + prefill queue 0.0 + prefill 98.5 + first token out 0.0",
        "time to second token     130.0 ms = first token + exposed transfer 2.0 + decode queue 0.0"
        " + first decode step 28.0",
        "whole answer             600.0 ms, 36 tokens in (16 cached), 11 out, 20.0 tokens/s after the first",
        "KV handed over        1,105,920 bytes in 3 blocks over zmq, prefill-0 -> decode-0;"
        " 1 block cached there already",
        "                      granted in 0.5 ms, landed 2.2 ms later",
    ]


def test_an_answer_of_one_token_has_no_second_and_no_rate() -> None:
    lines = describe(replace(USAGE, completion_tokens=1), replace(TIMINGS, second_token_ms=0.0, total_ms=100.0), None)
    assert len(lines) == 3
    assert lines[1] == "whole answer             100.0 ms, 36 tokens in (16 cached), 1 out"
    assert lines[2].startswith("KV handed over        none")


def test_a_router_that_says_nothing_is_described_by_nothing() -> None:
    assert describe(None, None, None) == []
