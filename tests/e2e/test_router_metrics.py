"""What a router counts, as Prometheus reads it, held against what its requests did."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_node import DECODE
from support.http_router import answering_router, call
from support.router_harness import Harness, running_router, wait_until
from support.tiny_tokenizers import write_model_folder

from kvrelay.proto import node_pb2

COMPLETIONS = "/v1/completions"
UNITS = ("_seconds", "_bytes", "_tokens", "_total", "_info", "_blocks", "_size", "_fds", "_per_second")
BARE = (  # counts of things that the name itself names
    "kvrelay_requests",
    "kvrelay_transfers",
    "kvrelay_sessions",
    "kvrelay_node_requests",
    "kvrelay_node_healthy",
    "kvrelay_node_draining",
    "kvrelay_node_awaited_kv",
    "kvrelay_node_expected",
    "kvrelay_node_swapped",
)


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with answering_router(tmp_path) as harness:
        yield harness


async def scrape(router: Harness) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, by name and labels but for the nodes' epochs."""
    reply = await call(router, "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(reply.body.decode())
    return {
        (
            sample.name,
            frozenset((name, value) for name, value in sample.labels.items() if name != "epoch"),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def of(samples: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


async def test_every_family_has_a_help_text_a_unit_and_a_form_that_linters_accept(router: Harness) -> None:
    await call(router, COMPLETIONS, {"prompt": "Where?", "max_tokens": 3})
    text = (await call(router, "/metrics")).body.decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation.endswith((".", ").")), family.name
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name.startswith("kvrelay_")
        assert name.endswith(UNITS) or name in BARE, name
        assert name.islower()
        assert not {"le", "quantile"} & {
            label for sample in family.samples for label in sample.labels if family.type != "histogram"
        }


async def test_the_numbers_are_those_of_the_requests(router: Harness) -> None:
    for max_tokens in (1, 3, 8):
        await call(router, COMPLETIONS, {"prompt": "Where is Rome?", "max_tokens": max_tokens, "n": 2})
    await router.assert_idle()
    samples = await scrape(router)
    assert of(samples, "kvrelay_requests_started_total") == 3
    assert of(samples, "kvrelay_requests_ended_total", outcome="length") == 3
    assert of(samples, "kvrelay_output_tokens_total") == 2 * (1 + 3 + 8)
    assert of(samples, "kvrelay_time_to_first_token_seconds_count") == 3
    assert of(samples, "kvrelay_request_output_tokens_count") == 6
    assert of(samples, "kvrelay_request_output_tokens_sum") == 24
    assert of(samples, "kvrelay_inter_token_latency_seconds_count") <= 2 * (2 + 7)
    assert of(samples, "kvrelay_time_per_output_token_seconds_count") == 4
    assert of(samples, "kvrelay_request_segment_seconds_count", segment="route") == 3
    assert of(samples, "kvrelay_request_segment_seconds_count", segment="exposed_transfer") == 2
    assert of(samples, "kvrelay_requests", state="running") == 0
    for state in ("waiting", "running"):
        assert ("kvrelay_node_requests", frozenset({"node": "D", "role": "decode", "state": state}.items())) in samples
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in samples.items()
        if name == "kvrelay_request_seconds_bucket"
    }
    assert buckets["+Inf"] == 3
    assert sorted(buckets.values()) == [value for _, value in sorted(buckets.items(), key=lambda item: float(item[0]))]


async def test_how_requests_end_is_told_apart(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path)) as router:
        decode = await router.node(DECODE, "D")
        slow = router.call(timeout=20)
        await decode.next_start()
        slow.cancel()
        await decode.next_cancel()
        failing = router.call(timeout=20)
        start = await decode.next_start()
        error = node_pb2.Error(code="INTERNAL", message="broke")
        await decode.say(node_pb2.Delta(request_id=start.request_id, error=error, ended=True))
        await failing.code()
        made_up = router.call(timeout=20)
        start = await decode.next_start()
        await decode.say(
            node_pb2.Delta(request_id=start.request_id, error=node_pb2.Error(code='A"\n{x}', message="b"), ended=True)
        )
        await made_up.code()
        samples = await scrape(router)
        assert of(samples, "kvrelay_requests_ended_total", outcome="left") == 1
        assert of(samples, "kvrelay_requests_ended_total", outcome="internal") == 1
        assert of(samples, "kvrelay_requests_ended_total", outcome="other") == 1
        assert of(samples, "kvrelay_requests_whole_total") == 3


def stats(**more: Any) -> node_pb2.NodeMessage:
    return node_pb2.NodeMessage(stats=node_pb2.NodeStats(load=node_pb2.Load(num_free_blocks=1000), **more))


async def test_what_a_node_says_of_itself_stands_under_its_name_until_it_leaves(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path)) as router:
        decode = await router.node(DECODE, 'a "quoted"\\ name')
        said = stats(
            blocks=node_pb2.BlockStats(total=10, free=4, cached=3, owned=2, quarantined=1),
            num_preemptions=5,
            swap=node_pb2.SwapStats(num_swapped_out=2),
            transfers=node_pb2.TransferStats(
                states={"GRANTED": 3, "made up": 2},
                transports={
                    "shm": node_pb2.TransportStats(num_landed=4, num_bytes=400),
                    "x": node_pb2.TransportStats(),
                },
                sessions={"e": "shm", "f": "zmq"},
            ),
        )
        await decode.write(said)
        (node,) = router.server.registry
        await wait_until(lambda: node.statistics is not None)
        samples = await scrape(router)
        mine = {"node": 'a "quoted"\\ name', "role": "decode"}
        blocks = {state: of(samples, "kvrelay_kv_blocks", **mine, state=state) for state in ("free", "cached", "held")}
        assert blocks == {"free": 4, "cached": 3, "held": 2}
        assert of(samples, "kvrelay_kv_blocks", **mine, state="quarantined") == 1
        assert of(samples, "kvrelay_preemptions_total", **mine, kind="swap") == 2
        assert of(samples, "kvrelay_preemptions_total", **mine, kind="recompute") == 3
        assert of(samples, "kvrelay_transfers", **mine, state="granted") == 3
        assert of(samples, "kvrelay_transfers", **mine, state="other") == 2
        assert of(samples, "kvrelay_transfer_bytes_total", **mine, transport="shm") == 400
        assert of(samples, "kvrelay_sessions", **mine, transport="zmq") == 1
        decode.die()
        await wait_until(lambda: not list(router.server.registry))
        assert not any("node" in dict(labels) for _, labels in await scrape(router))


@pytest.mark.parametrize(
    "said",
    [
        stats(transfers=node_pb2.TransferStats(states={str(i): 1 for i in range(65)})),
        stats(step_seconds=node_pb2.Histogram(counts=[1, 2, 3])),
        stats(step_seconds=node_pb2.Histogram(counts=[1] * 19, sum=float("nan"))),
        stats(process=node_pb2.ProcessStats(cpu_s=-1)),
    ],
    ids=["many states", "few buckets", "no number", "negative"],
)
async def test_a_node_that_says_what_none_says_loses_its_stream_alone(
    tmp_path: Path, said: node_pb2.NodeMessage
) -> None:
    async with running_router(write_model_folder(tmp_path)) as router:
        bad = await router.node(DECODE, "bad")
        good = await router.node(DECODE, "good")
        await bad.write(said)
        await wait_until(lambda: [node.facts.name for node in router.server.registry] == ["good"])
        await good.say_load()
        assert (await call(router, "/metrics")).status == 200
