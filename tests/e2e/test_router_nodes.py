"""The nodes' streams: who may register, who knows whom, leases, epochs, health."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_node import DECODE, PREFILL, FakeNode, delta
from support.router_harness import Harness, running_router, wait_until
from support.tiny_tokenizers import write_model_folder

from kvrelay.proto import node_pb2, node_pb2_grpc
from kvrelay.router.prefix_index import PromptBlocks


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path), cluster_secret="s3cret") as harness:
        yield harness


async def join(router: Harness, role: Any, name: str, **more: Any) -> FakeNode:
    return await router.node(role, name, **{"cluster_secret": "s3cret"} | more)


async def cluster(router: Harness) -> node_pb2.ClusterState:
    state: node_pb2.ClusterState = await node_pb2_grpc.ClusterStub(router.channel).GetCluster(
        node_pb2.GetClusterRequest()
    )
    return state


async def health(router: Harness, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(router.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    status: int = response.status
    return status


@pytest.mark.parametrize(
    ("difference", "code", "words"),
    [
        ({"cluster_secret": "guess"}, "UNAUTHENTICATED", "secret"),
        ({"cluster_secret": ""}, "UNAUTHENTICATED", "secret"),
        ({"version": "0.0.0"}, "FAILED_PRECONDITION", "version differs"),
        ({"model_fingerprint": "other"}, "FAILED_PRECONDITION", "model_fingerprint differs"),
        ({"max_model_len": 0}, "INVALID_ARGUMENT", "max_model_len"),
        ({"num_blocks": 0}, "INVALID_ARGUMENT", "num_blocks"),
        ({"max_num_seqs": 0}, "INVALID_ARGUMENT", "max_num_seqs"),
        ({"kv_layout": node_pb2.KVLayout()}, "INVALID_ARGUMENT", "block_size"),
        ({"epoch": "e" * 1000}, "INVALID_ARGUMENT", "epoch"),
    ],
)
async def test_a_node_that_does_not_belong_is_refused_by_the_field(
    router: Harness, difference: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await join(router, DECODE, "D", **difference)
    assert caught.value.code().name == code
    assert not (await cluster(router)).nodes


async def test_nodes_whose_weights_differ_are_not_mixed(router: Harness) -> None:
    await join(router, DECODE, "D")
    with pytest.raises(grpc.aio.AioRpcError, match="quantization differs: 'none' on decode node D, 'int4'") as caught:
        await join(router, PREFILL, "P", quantization="int4")
    assert caught.value.code().name == "FAILED_PRECONDITION"
    await join(router, DECODE, "D", quantization="int4")  # another life of D, the only one that there was
    await join(router, PREFILL, "P", quantization="int4")


async def test_without_a_role_a_node_is_refused(router: Harness) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="role"):
        await join(router, node_pb2.ROLE_UNSPECIFIED, "D")


async def test_prefill_nodes_know_every_decode_node_there_is(router: Harness) -> None:
    first = await join(router, PREFILL, "P")
    await first.wait_peers()
    decode = await join(router, DECODE, "D")
    await first.wait_peers(decode.epoch)
    second = await join(router, PREFILL, "Q")
    await second.wait_peers(decode.epoch)
    other = await join(router, DECODE, "E")
    for prefill in (first, second):
        await prefill.wait_peers(decode.epoch, other.epoch)
    decode.die()
    for prefill in (first, second):
        await prefill.wait_peers(other.epoch)


async def test_a_restarted_node_replaces_its_old_life_at_once(router: Harness) -> None:
    """B06: by its epoch, though the old stream is still open; what ran on the old life fails."""
    prefill = await join(router, PREFILL, "P")
    old = await join(router, DECODE, "D")
    call = asyncio.create_task(router.generate())
    start = await old.next_start()
    new = await join(router, DECODE, "D")
    with pytest.raises(grpc.aio.AioRpcError, match="registered anew") as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(old.ended.wait(), 10)
    await prefill.wait_peers(new.epoch)
    assert [node.epoch for node in (await cluster(router)).nodes if node.name == "D"] == [new.epoch]
    task = asyncio.create_task(router.generate())
    again = await new.next_start()
    assert again.request_id != start.request_id
    await new.say(delta(again, [70], finish="length", ended=True))
    assert (await task).token_ids == [70]


async def test_the_same_life_may_dial_again(router: Harness) -> None:
    old = await join(router, DECODE, "D")
    new = await join(router, DECODE, "D", epoch=old.epoch)
    await asyncio.wait_for(old.ended.wait(), 10)
    task = asyncio.create_task(router.generate())
    await new.say(delta(await new.next_start(), [70], finish="length", ended=True))
    assert (await task).token_ids == [70]


async def test_a_node_that_says_nothing_is_lost_though_its_stream_is_open(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path), node_lease_s=0.2) as router:
        silent = await router.node(DECODE, "D")  # its heartbeat comes every second
        call = asyncio.create_task(router.generate())
        await silent.next_start()
        with pytest.raises(grpc.aio.AioRpcError, match=r"said nothing for 0\.2 s") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(silent.ended.wait(), 10)
        assert not (await cluster(router)).nodes


async def test_a_stream_that_never_registers_is_ended(tmp_path: Path) -> None:
    """E02."""
    async with running_router(write_model_folder(tmp_path), node_lease_s=0.2) as router:
        stream = node_pb2_grpc.NodesStub(router.channel).Connect()
        assert (await stream.read()).WhichOneof("message") == "challenge"
        with pytest.raises(grpc.aio.AioRpcError, match="no Register") as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_proof_cannot_be_used_twice(router: Harness) -> None:
    """A stream that repeats what another node sent has another challenge to answer."""
    node = await join(router, DECODE, "D")
    stream = node_pb2_grpc.NodesStub(router.channel).Connect()
    await stream.read()
    await stream.write(node_pb2.NodeMessage(register=node.registered_with))
    with pytest.raises(grpc.aio.AioRpcError, match="secret") as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_node_that_does_not_read_is_lost_and_the_routers_memory_is_not(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path, max_model_len=100_000), max_node_backlog=4) as router:
        deaf = await router.node(DECODE, "D", reads=False)
        calls = [asyncio.create_task(router.generate([70] * 50_000)) for _ in range(40)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, grpc.aio.AioRpcError) for error in done)
        assert {error.code() for error in done} == {grpc.StatusCode.UNAVAILABLE}  # type: ignore[union-attr]
        await wait_until(lambda: not list(router.server.registry))
        assert deaf.starts.empty()


async def test_a_message_out_of_place_ends_the_stream(router: Harness) -> None:
    node = await join(router, DECODE, "D")
    await node.write(node_pb2.NodeMessage(register=node.registered_with))
    await asyncio.wait_for(node.ended.wait(), 10)
    await wait_until(lambda: not list(router.server.registry))


async def test_a_node_that_claims_more_cached_blocks_than_it_has_loses_its_stream(router: Harness) -> None:
    """The router's memory for a node's cache is bounded by what the node said of itself."""
    node = await join(router, DECODE, "D", num_blocks=2)
    for stored in ([1], [1, 2]):
        await node.write(node_pb2.NodeMessage(step=node_pb2.Step(cache=node_pb2.CacheChange(stored=stored))))
    await wait_until(lambda: [seen.prefixes.names for seen in router.server.registry] == [{1, 2}])
    await node.write(node_pb2.NodeMessage(step=node_pb2.Step(cache=node_pb2.CacheChange(stored=[3]))))
    await asyncio.wait_for(node.ended.wait(), 10)
    await wait_until(lambda: not list(router.server.registry))


async def test_bytes_that_are_no_message_end_a_stream_before_and_after_it_has_registered(router: Harness) -> None:
    """E02, D09: by a status that says so; what runs on the node fails, and the router goes on."""
    stranger = router.channel.stream_stream("/kvrelay.v1.Nodes/Connect")()
    await stranger.read()
    await stranger.write(b"\xff\xff")
    assert await stranger.code() is grpc.StatusCode.INVALID_ARGUMENT
    node = await join(router, DECODE, "D")
    task = asyncio.create_task(router.generate())
    await node.next_start()
    await node.write_bytes(b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError, match="cannot be read") as caught:
        await task
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(node.ended.wait(), 10)


async def test_a_draining_node_finishes_what_it_has_and_gets_nothing(router: Harness) -> None:
    busy = await join(router, DECODE, "E")
    await busy.say_load(num_running=9)
    await wait_until(lambda: any(node.load.num_running == 9 for node in router.server.registry))
    draining = await join(router, DECODE, "D")
    first = asyncio.create_task(router.generate())
    start = await draining.next_start()
    await draining.say_draining()
    await wait_until(lambda: any(node.draining for node in router.server.registry))
    second = asyncio.create_task(router.generate())
    await busy.say(delta(await busy.next_start(), [71], finish="length", ended=True))
    assert (await second).token_ids == [71]
    await draining.say(delta(start, [70], finish="length", ended=True))
    assert (await first).token_ids == [70]
    assert draining.starts.empty()


async def test_health_says_whether_requests_can_be_placed(router: Harness) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    service = "kvrelay.v1.Inference"
    assert (await health(router, ""), await health(router, service)) == (serving, not_serving)
    watch = health_pb2_grpc.HealthStub(router.channel).Watch(health_pb2.HealthCheckRequest(service=service))

    async def next_status() -> int:
        async with asyncio.timeout(10):
            status: int = (await watch.read()).status
            return status

    assert await next_status() == not_serving
    await join(router, PREFILL, "P")
    decode = await join(router, DECODE, "D")
    assert await next_status() == serving
    await decode.say_draining()
    assert await next_status() == not_serving
    other = await join(router, DECODE, "E")
    assert await next_status() == serving
    other.die()
    assert await next_status() == not_serving
    watch.cancel()


async def test_health_of_an_unknown_service_is_not_found(router: Harness) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(router, "kvrelay.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_cluster_is_shown_as_the_router_sees_it(router: Harness) -> None:
    decode = await join(router, DECODE, "D", grpc_address="127.0.0.1:9")
    prefill = await join(router, PREFILL, "P")
    await prefill.say_load(num_waiting=2, num_waiting_tokens=30, tokens_per_s=12.5, sessions=[decode.epoch])
    await wait_until(lambda: any(node.load.num_waiting for node in router.server.registry))
    state = await cluster(router)
    nodes = {node.name: node for node in state.nodes}
    assert (state.model, state.num_requests) == ("tiny", 0)
    assert (nodes["D"].role, nodes["D"].epoch, nodes["D"].grpc_address) == (DECODE, decode.epoch, "127.0.0.1:9")
    load = nodes["P"].load
    assert (load.num_waiting, load.num_waiting_tokens, load.tokens_per_s) == (2, 30, 12.5)
    assert list(load.sessions) == [decode.epoch]


async def test_more_nodes_than_allowed_are_refused(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path), max_nodes=1) as router:
        await router.node(DECODE, "D")
        refused = await router.node(DECODE, "E")
        await asyncio.wait_for(refused.ended.wait(), 10)
        assert [node.name for node in (await cluster(router)).nodes] == ["D"]


async def test_reflection_names_the_services(router: Harness) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    async for response in stub.ServerReflectionInfo(iter(requests)):
        names = {service.name for service in response.list_services_response.service}
    assert {"kvrelay.v1.Inference", "kvrelay.v1.Nodes", "kvrelay.v1.Cluster", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("more", "names", "num_to_compute"),
    [
        ({"cache_salt": "mine"}, "P", 18),
        ({"cache_salt": "theirs"}, "Q", 34),
        ({"cache_salt": "theirs", "sampling": {"max_tokens": 8, "prompt_logprobs": 0}}, "PQ", 50),
    ],
)
async def test_a_request_goes_where_the_blocks_of_its_own_salt_are(
    router: Harness, more: dict[str, Any], names: str, num_to_compute: int
) -> None:
    """And counts there, until the node itself reports, with what its cache does not spare."""
    prompt = list(range(50))
    decode = await join(router, DECODE, "D")
    prefills = [await join(router, PREFILL, name) for name in "PQ"]
    for node, salt, num_cached in zip(prefills, ("mine", "theirs"), (32, 16), strict=True):
        await node.wait_peers(decode.epoch)
        stored = list(PromptBlocks(prompt[:num_cached], salt).names(16))
        load = node_pb2.Load(num_free_blocks=1000, sessions=[decode.epoch])
        node.load = load
        await node.write(node_pb2.NodeMessage(step=node_pb2.Step(load=load, cache=node_pb2.CacheChange(stored=stored))))
    seen = {node.facts.name: node for node in router.server.registry}
    await wait_until(lambda: len(seen["P"].prefixes.names) == 2 and len(seen["Q"].prefixes.names) == 1)
    task = asyncio.create_task(router.generate(prompt, **more))
    await wait_until(lambda: seen["P"].num_placed + seen["Q"].num_placed == 1)
    (placed,) = (name for name in "PQ" if seen[name].num_placed)
    assert placed in names
    assert seen[placed].num_waiting_tokens == num_to_compute
    task.cancel()
