"""Which nodes there are, and what was placed on them since they last reported."""

from dataclasses import replace

import pytest

from kvrelay.engine.errors import InvalidArgument, PreconditionFailed, ResourceExhausted
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import CacheChange, Load, Peer
from kvrelay.router.messages import NodeFacts, Role
from kvrelay.router.registry import Node, Registry

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


def facts(role: Role, epoch: str, name: str = "", max_model_len: int = 128) -> NodeFacts:
    return NodeFacts(
        role=role,
        epoch=epoch,
        name=name or epoch,
        version="1",
        model_fingerprint="f",
        kv_layout=LAYOUT,
        max_model_len=max_model_len,
        num_blocks=100,
        max_num_seqs=64,
        grpc_address="",
        connector_address=f"{epoch}:1",
    )


def test_nodes_of_another_quantization_stand_beside_none_but_replace_their_own() -> None:
    registry = Registry(max_nodes=3)
    registry.add(facts(Role.DECODE, "d", "D"))
    for role, name in ((Role.PREFILL, "P"), (Role.DECODE, "E"), (Role.PREFILL, "D")):
        with pytest.raises(PreconditionFailed, match="quantization differs: 'none' on decode node D, 'int8'"):
            registry.add(replace(facts(role, "other", name), quantization="int8"))
    assert only(registry).facts.epoch == "d"
    assert registry.add(replace(facts(Role.DECODE, "e", "D"), quantization="int8")) == "d"


def only(registry: Registry) -> Node:
    (node,) = registry
    return node


def test_a_node_that_comes_back_under_a_new_epoch_replaces_its_old_life() -> None:
    """B06."""
    registry = Registry(max_nodes=1)
    assert registry.add(facts(Role.DECODE, "old", "D")) is None
    assert registry.add(facts(Role.DECODE, "new", "D")) == "old"
    assert only(registry).facts.epoch == "new"
    registry.remove("old")  # its stream ends later
    registry.report("old", Load(num_running=9))
    registry.drain("old")
    assert only(registry).num_choices == 0
    assert registry.num_serving()


def test_the_same_life_on_a_new_stream_replaces_itself() -> None:
    registry = Registry(max_nodes=1)
    registry.add(facts(Role.DECODE, "e"))
    registry.drain("e")
    assert registry.add(facts(Role.DECODE, "e")) == "e"
    assert registry.num_serving()


def test_nodes_of_two_roles_may_share_a_name() -> None:
    registry = Registry(max_nodes=2)
    registry.add(facts(Role.DECODE, "d", "a"))
    assert registry.add(facts(Role.PREFILL, "p", "a")) is None
    with pytest.raises(ResourceExhausted, match="2 nodes"):
        registry.add(facts(Role.PREFILL, "q"))


def test_what_was_placed_counts_until_the_second_report_after_it() -> None:
    registry = Registry(max_nodes=1)
    registry.add(facts(Role.DECODE, "d"))
    node = only(registry)
    assert (node.num_choices, node.num_waiting_tokens, node.num_free_blocks) == (0, 0, 100)
    registry.note_placed(node, to_compute=40, num_prompt_tokens=40, num_choices=1)
    assert (node.num_choices, node.num_waiting_tokens, node.num_free_blocks) == (1, 40, 97)
    registry.report("d", Load(num_free_blocks=50, num_running=2, num_waiting=1, num_waiting_tokens=7))
    assert (node.num_choices, node.num_waiting_tokens, node.num_free_blocks) == (4, 47, 47)
    registry.report("d", Load(num_free_blocks=50, num_running=2, num_waiting=1, num_waiting_tokens=7))
    assert (node.num_choices, node.num_waiting_tokens, node.num_free_blocks) == (3, 7, 50)
    assert node.num_placed == 1


def test_blocks_that_those_who_wait_will_take_are_not_free_for_a_new_request() -> None:
    registry = Registry(max_nodes=1)
    registry.add(facts(Role.DECODE, "d"))
    registry.report("d", Load(num_free_blocks=50, num_wanted_blocks=60, num_waiting=20))
    registry.note_placed(only(registry), to_compute=0, num_prompt_tokens=16, num_choices=1)
    assert (only(registry).num_free_blocks, only(registry).num_choices) == (-12, 21)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_choices", "could_start"),
    [(0, 64, True), (0, 65, False), (36 * 16 + 15, 64, True), (37 * 16, 64, False), (99 * 16, 1, True)],
)
def test_an_empty_node_could_start_what_has_seats_and_blocks(
    num_prompt_tokens: int, num_choices: int, could_start: bool
) -> None:
    registry = Registry(max_nodes=1)
    registry.add(facts(Role.DECODE, "d"))
    registry.report("d", Load(num_free_blocks=0, num_running=64))  # how full it is now does not count
    assert only(registry).could_start(num_prompt_tokens, num_choices) is could_start


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_choices", "num_blocks"), [(1, 1, 1), (16, 1, 2), (31, 3, 4), (32, 3, 5)]
)
def test_choices_share_the_prompts_full_blocks_and_have_one_block_each(
    num_prompt_tokens: int, num_choices: int, num_blocks: int
) -> None:
    registry = Registry(max_nodes=1)
    registry.add(facts(Role.DECODE, "d"))
    node = only(registry)
    registry.note_placed(node, to_compute=0, num_prompt_tokens=num_prompt_tokens, num_choices=num_choices)
    assert (node.num_choices, node.num_waiting_tokens, node.num_free_blocks) == (num_choices, 0, 100 - num_blocks)
    assert node.num_placed == 1


def test_peers_are_all_decode_nodes_draining_ones_too() -> None:
    registry = Registry(max_nodes=3)
    for role, epoch in ((Role.DECODE, "d"), (Role.PREFILL, "p"), (Role.DECODE, "e")):
        registry.add(facts(role, epoch))
    registry.drain("d")
    assert registry.peers() == (Peer("d", "d:1"), Peer("e", "e:1"))


def test_only_decode_nodes_that_take_requests_count_for_what_can_be_served() -> None:
    registry = Registry(max_nodes=3)
    registry.add(facts(Role.PREFILL, "p", max_model_len=500))
    assert not registry.num_serving()
    assert registry.max_model_len() is None
    registry.add(facts(Role.DECODE, "d", max_model_len=200))
    registry.add(facts(Role.DECODE, "e", max_model_len=100))
    assert registry.max_model_len() == 200
    registry.drain("d")
    assert registry.max_model_len() == 100
    registry.remove("e")
    assert not registry.num_serving()


def test_a_node_that_registers_anew_has_nothing_cached_until_it_says_so() -> None:
    registry = Registry(max_nodes=1)
    registry.add(facts(Role.DECODE, "d"))
    registry.change_cache("d", CacheChange(stored=frozenset([1, 2])))
    assert only(registry).prefixes.names == {1, 2}
    registry.add(facts(Role.DECODE, "d"))
    assert only(registry).prefixes.names == frozenset()
    registry.change_cache("gone", CacheChange(stored=frozenset([1])))
    with pytest.raises(InvalidArgument, match="has 100"):
        registry.change_cache("d", CacheChange(stored=frozenset(range(101))))
