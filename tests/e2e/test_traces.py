"""OpenTelemetry's spans of a request over router, prefill and decode node, as processes."""

import json
import logging
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path

import grpc
import pytest
from support.collector import Collector, Span, collecting
from support.oracle import random_prompt
from support.roles import Client, Roles, wait_for

from kvrelay.cli.config import UpConfig
from kvrelay.cli.supervisor import node_arguments, router_arguments
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.legs import TraceContext
from kvrelay.engine.traces import Tracing, check_endpoint
from kvrelay.proto import inference_pb2 as pb

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", "float32", "--threads", "1", "--num-blocks", "64", "--max-num-batched-tokens", "32")
PARENT = "00f067aa0ba902b7"
_numbers = count(1)

# Each span, by (process, name) -> the one that it belongs to.
TREE = {
    ("kvrelay-router", "route"): ("kvrelay-router", "text_completion tiny"),
    ("kvrelay-prefill", "prefill"): ("kvrelay-router", "text_completion tiny"),
    ("kvrelay-prefill", "queue"): ("kvrelay-prefill", "prefill"),
    ("kvrelay-prefill", "compute"): ("kvrelay-prefill", "prefill"),
    ("kvrelay-decode", "decode"): ("kvrelay-router", "text_completion tiny"),
    ("kvrelay-decode", "grant"): ("kvrelay-decode", "decode"),
    ("kvrelay-decode", "transfer"): ("kvrelay-decode", "decode"),
    ("kvrelay-decode", "queue"): ("kvrelay-decode", "decode"),
    ("kvrelay-decode", "first step"): ("kvrelay-decode", "decode"),
    ("kvrelay-decode", "steps"): ("kvrelay-decode", "decode"),
}


class Traced:
    """A router and two nodes that all send their spans to one collector."""

    def __init__(self, client: Client, collector: Collector, http: str, logs: Path) -> None:
        self.client, self.collector, self.http, self.logs = client, collector, http, logs

    def complete(self, headers: dict[str, str]) -> int:
        """Over HTTP. Returns: the status."""
        body = json.dumps({"prompt": random_prompt(40, seed=next(_numbers)), "max_tokens": 2}).encode()
        asked = urllib.request.Request(f"http://{self.http}/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            status: int = answer.status
            return status

    def ask(self, *, flags: str = "01", **sampling: object) -> str:
        """Returns: the trace that the client began."""
        trace_id, trace = begun(flags)
        self.client.stream(message(trace=trace, **sampling))
        return trace_id


def begun(flags: str = "01") -> tuple[str, pb.TraceContext]:
    """A trace of a client's."""
    trace_id = f"{next(_numbers):032x}"
    return trace_id, pb.TraceContext(traceparent=f"00-{trace_id}-{PARENT}-{flags}", tracestate="shop=7")


def message(trace: pb.TraceContext | None = None, length: int = 70, **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=random_prompt(length, seed=next(_numbers))),
        sampling=pb.SamplingParams(**{"max_tokens": 5, "ignore_eos": True} | sampling),  # type: ignore[arg-type]
        trace=trace,
    )


@pytest.fixture(scope="module")
def traced(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    logs = tmp_path_factory.mktemp("logs")
    with collecting() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        roles = Roles(tiny_model, logs)
        try:
            told = ("--otlp-endpoint", collector.url)
            router = roles.start("router", "--port", "0", *told)
            for role in ("prefill", "decode"):
                roles.start(role, "--router", router.grpc, *FLAGS, *told)
            client = Client(router.grpc)
            client.wait_until_paired()
            yield Traced(client, collector, router.http, logs)
            client.close()
        finally:
            roles.close()


def by_name(spans: Sequence[Span]) -> dict[tuple[str, str], Span]:
    found = {(span.service, span.name): span for span in spans}
    assert len(found) == len(spans), "each once"
    return found


def test_a_request_is_one_tree_under_its_client_s_span(traced: Traced) -> None:
    trace_id = traced.ask()
    found = by_name(traced.collector.wait(trace_id, {name for pair in (*TREE, *TREE.values()) for name in pair[1:]}))
    root = found["kvrelay-router", "text_completion tiny"]
    assert root.parent_id == PARENT
    assert found.keys() == TREE.keys() | {("kvrelay-router", "text_completion tiny")}
    for own, parent in TREE.items():
        assert found[own].parent_id == found[parent].span_id, own
        assert found[own].start <= found[own].end
    assert {span.state for span in found.values()} == {"shop=7"}
    assert not any(span.is_error for span in found.values())


def test_the_times_follow_one_another_and_lie_within_the_request(traced: Traced) -> None:
    trace_id = traced.ask()
    found = by_name(traced.collector.wait(trace_id, {"route", "steps", "compute", "text_completion tiny"}))
    root = found["kvrelay-router", "text_completion tiny"]
    slack = 20_000_000  # nanoseconds: each process compares its two clocks once
    for span in found.values():
        assert root.start - slack <= span.start <= span.end <= root.end + slack, span
    assert found["kvrelay-prefill", "queue"].end == found["kvrelay-prefill", "compute"].start
    segments = [found["kvrelay-decode", name] for name in ("grant", "transfer", "queue", "first step", "steps")]
    for first, second in pairwise(segments):
        assert first.end == second.start
    leg = found["kvrelay-decode", "decode"]
    assert leg.start <= segments[0].start
    assert segments[-1].end == leg.end


def test_attributes_say_what_and_where_and_nothing_of_the_text(traced: Traced) -> None:
    trace_id = traced.ask(max_tokens=6)
    found = by_name(traced.collector.wait(trace_id, {"text_completion tiny", "transfer", "prefill", "steps", "decode"}))
    root = found["kvrelay-router", "text_completion tiny"]
    said = root.attributes
    assert said["gen_ai.request.model"] == "tiny"
    assert said["gen_ai.usage.input_tokens"] == 70
    assert said["gen_ai.usage.output_tokens"] == 6
    assert said["kvrelay.outcome"] == "length"
    assert said["kvrelay.prefill_node"].startswith("prefill-")
    assert said["kvrelay.decode_node"].startswith("decode-")
    assert root.events == ["first_token", "second_token"]
    moved = found["kvrelay-decode", "transfer"].attributes
    assert moved["kvrelay.kv_blocks"] == 5
    assert moved["kvrelay.kv_bytes"] > 0
    assert moved["kvrelay.transport"]
    assert found["kvrelay-decode", "decode"].attributes["kvrelay.output_tokens"] == 6
    assert len({span.attributes.get("kvrelay.request_id") for span in found.values()} - {None}) == 1
    allowed = ("gen_ai.", "kvrelay.", "error.type")
    assert all(name.startswith(allowed) for span in found.values() for name in span.attributes)


def test_without_a_client_s_trace_each_request_begins_one(traced: Traced) -> None:
    traced.client.stream(message())
    with traced.collector.changed:
        seen = {span.trace_id for span in traced.collector.spans}
    for _ in range(2):
        traced.client.stream(message())

    def fresh() -> list[Span]:
        return [s for s in traced.collector.spans if s.trace_id not in seen and s.name == "text_completion tiny"]

    wait_for(lambda: len(fresh()) >= 2)
    assert len({span.trace_id for span in fresh()}) == len(fresh())
    assert {span.parent_id for span in fresh()} == {""}


def test_what_the_client_does_not_sample_leaves_no_span_anywhere(traced: Traced) -> None:
    unsampled = traced.ask(flags="00")
    sampled = traced.ask()
    traced.collector.wait(sampled, {"text_completion tiny", "prefill", "steps", "decode"})
    assert unsampled not in {span.trace_id for span in traced.collector.spans}


def test_a_request_that_is_left_ends_its_spans_without_an_error(traced: Traced) -> None:
    trace_id, trace = begun()
    call = traced.client._inference.Generate(message(trace=trace, length=20, max_tokens=100), timeout=60)
    next(call)
    call.cancel()
    found = by_name(traced.collector.wait(trace_id, {"text_completion tiny", "prefill", "decode"}))
    assert found["kvrelay-router", "text_completion tiny"].attributes["kvrelay.outcome"] == "LEFT"
    assert found["kvrelay-decode", "decode"].attributes["kvrelay.cancelled"] is True
    assert not any(span.is_error for span in found.values())


def test_a_request_that_fails_on_a_node_says_so_on_both(traced: Traced) -> None:
    """Bad words that leave nothing to choose."""
    trace_id, trace = begun()
    form = pb.StructuredOutput(choice=pb.Choices(choices=["x"]))
    with pytest.raises(grpc.RpcError) as caught:
        traced.client.stream(message(trace=trace, ignore_eos=False, structured_output=form, bad_words=["x"]))
    found = by_name(traced.collector.wait(trace_id, {"text_completion tiny", "prefill"}))
    root, leg = found["kvrelay-router", "text_completion tiny"], found["kvrelay-prefill", "prefill"]
    assert root.is_error
    assert leg.is_error or leg.attributes["kvrelay.cancelled"]  # D's word may be quicker than P's
    assert leg.attributes.get("error.type", "INTERNAL") == "INTERNAL"
    assert root.attributes["error.type"] == root.attributes["kvrelay.outcome"] == caught.value.code().name


def test_a_collector_that_fails_and_comes_back_costs_spans_and_one_line_of_log(traced: Traced) -> None:
    traced.collector.status = 400
    try:
        before = traced.collector.num_posts
        for _ in range(3):
            traced.ask()
            traced.collector.wait_for_posts(before + 3)
            before = traced.collector.num_posts
    finally:
        traced.collector.status = 200
    trace_id = traced.ask()
    traced.collector.wait(trace_id, {"text_completion tiny", "prefill", "steps"})
    for log in traced.logs.iterdir():
        assert log.read_text().count("traces_not_sent") <= 1
        assert "Traceback" not in log.read_text()


def test_a_client_s_trace_comes_by_grpc_s_metadata_and_by_http_s_header_too(traced: Traced) -> None:
    by_metadata, by_header = (f"{next(_numbers):032x}" for _ in range(2))
    metadata = (("traceparent", f"00-{by_metadata}-{PARENT}-01"), ("tracestate", "shop=7"))
    list(traced.client._inference.Generate(message(), timeout=60, metadata=metadata))
    assert traced.complete({"traceparent": f"00-{by_header}-{PARENT}-01"}) == 200
    for trace_id in (by_metadata, by_header):
        found = by_name(traced.collector.wait(trace_id, {"text_completion tiny", "prefill", "decode"}))
        assert found["kvrelay-router", "text_completion tiny"].parent_id == PARENT


def test_a_header_that_makes_no_sense_begins_a_new_trace_and_costs_no_request(traced: Traced) -> None:
    assert traced.complete({"traceparent": "junk", "tracestate": "a=1"}) == 200
    list(traced.client._inference.Generate(message(), timeout=60, metadata=(("traceparent", "00-1-2-3"),)))


# --- without a collector


def test_nobody_at_the_endpoint_costs_no_request_and_a_stop_takes_two_seconds_at_most(
    tiny_model: Path, tmp_path: Path
) -> None:
    roles = Roles(tiny_model, tmp_path)
    try:
        told = ("--otlp-endpoint", "http://127.0.0.1:9")
        router = roles.start("router", "--port", "0", *told)
        nodes = [roles.start(role, "--router", router.grpc, *FLAGS, *told) for role in ("prefill", "decode")]
        client = Client(router.grpc)
        client.wait_until_paired()
        for _ in range(5):
            responses = client.stream(message())
            assert responses[-1].finish_reason == "length"
        client.close()
        begin = time.monotonic()
        assert [process.terminate() for process in (*nodes, router)] == [0, 0, 0]
        assert time.monotonic() - begin < 20  # each has two seconds beside what it always takes
    finally:
        roles.close()


@pytest.mark.parametrize("wrong", ["localhost:4318", "ftp://x", "http://", "4318"])
def test_an_endpoint_that_is_no_url_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        check_endpoint(wrong)


def test_up_tells_its_roles_the_endpoint() -> None:
    config = UpConfig(otlp_endpoint="http://127.0.0.1:4318")
    commands = [router_arguments(config, 1, 2), *(told for _, told in node_arguments(config, "r:1", 2))]
    assert len(commands) == 3
    for command in commands:
        assert command[command.index("--otlp-endpoint") + 1] == "http://127.0.0.1:4318"


def test_a_context_that_makes_no_sense_begins_a_new_trace() -> None:
    with collecting() as collector:
        tracing = Tracing(collector.url, "test", "1", MonotonicClock())
        span = tracing.start("a", 0.0, tracing.read(TraceContext("00-zz-1-1", "a=b")))
        assert span.parent is None  # type: ignore[attr-defined]
        span.end()
        assert tracing.write(span).traceparent.startswith("00-")
        tracing.close()
    logging.getLogger("opentelemetry").handlers.clear()
