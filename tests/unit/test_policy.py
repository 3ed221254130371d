"""Placement, from node states written by hand."""

from dataclasses import replace

import pytest

from kvrelay.engine.errors import InvalidArgument, TooLarge, Unavailable
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import CacheChange, Load
from kvrelay.router.messages import NodeFacts, Role
from kvrelay.router.policy import RequestFacts, place
from kvrelay.router.prefix_index import PromptBlocks
from kvrelay.router.registry import Node, Registry

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
REQUEST = RequestFacts(num_prompt_tokens=40, max_tokens=8)
PROMPT = tuple(range(80))  # five blocks, no token more


def node(
    role: Role,
    epoch: str,
    *,
    max_model_len: int = 128,
    max_num_seqs: int = 64,
    draining: bool = False,
    block_size: int = 16,
    **load: object,
) -> Node:
    facts = NodeFacts(
        role=role,
        epoch=epoch,
        name=epoch,
        version="1",
        model_fingerprint="f",
        kv_layout=replace(LAYOUT, block_size=block_size),
        max_model_len=max_model_len,
        num_blocks=100,
        max_num_seqs=max_num_seqs,
        grpc_address="",
    )
    return Node(facts, Load(**{"num_free_blocks": 100} | load), draining=draining)  # type: ignore[arg-type]


def prefill(epoch: str, *sessions: str, **more: object) -> Node:
    return node(Role.PREFILL, epoch, sessions=frozenset(sessions), **more)  # type: ignore[arg-type]


def decode(epoch: str, **more: object) -> Node:
    return node(Role.DECODE, epoch, **more)  # type: ignore[arg-type]


def caching(node: Node, num_tokens: int, salt: str = "") -> Node:
    """The node, with the beginning of PROMPT in its prefix cache."""
    names = PromptBlocks(PROMPT[:num_tokens], salt).names(node.facts.kv_layout.block_size)
    node.prefixes.apply(CacheChange(stored=frozenset(names)))
    return node


def asking(salt: str = "", **more: object) -> RequestFacts:
    """A request for PROMPT."""
    blocks = PromptBlocks(PROMPT, salt)
    return RequestFacts(num_prompt_tokens=len(PROMPT), max_tokens=8, blocks=blocks, **more)  # type: ignore[arg-type]


def chosen(*nodes: Node, request: RequestFacts = REQUEST) -> tuple[str | None, str]:
    placement = place(nodes, request)
    return placement.prefill and placement.prefill.facts.epoch, placement.decode.facts.epoch


def test_without_a_prefill_node_the_decode_node_does_both() -> None:
    assert chosen(decode("d")) == (None, "d")


def test_without_a_session_the_decode_node_does_both() -> None:
    assert chosen(prefill("p"), prefill("q", "gone"), decode("d")) == (None, "d")


def test_a_pair_with_a_session_comes_before_a_better_decode_node_without_one() -> None:
    """B08: the pair is chosen together."""
    assert chosen(prefill("p", "d"), decode("d", num_running=9), decode("idle")) == ("p", "d")


def test_a_decode_node_with_room_comes_before_a_smaller_batch_without() -> None:
    assert chosen(decode("full", num_free_blocks=2), decode("d", num_running=9)) == (None, "d")
    assert chosen(decode("just", num_free_blocks=3), decode("d", num_running=9)) == (None, "just")


def test_room_is_for_every_choice_of_a_request() -> None:
    four = RequestFacts(num_prompt_tokens=40, max_tokens=8, num_choices=4)
    nodes = (decode("tight", num_free_blocks=5), decode("d", num_free_blocks=6, num_running=9))
    assert chosen(*nodes, request=four) == (None, "d")
    assert chosen(*nodes) == (None, "tight")


def test_room_that_others_wait_for_is_no_room() -> None:
    assert chosen(decode("awaited", num_wanted_blocks=98, num_waiting=1), decode("d", num_running=9)) == (None, "d")
    assert chosen(decode("awaited", num_wanted_blocks=97, num_waiting=1), decode("d", num_running=9)) == (
        None,
        "awaited",
    )


def test_a_request_goes_only_where_its_choices_have_seats() -> None:
    """A17."""
    four = RequestFacts(num_prompt_tokens=40, max_tokens=8, num_choices=4)
    assert chosen(decode("small", max_num_seqs=3), decode("d", num_running=9), request=four) == (None, "d")
    pair = prefill("p", "small"), decode("small", max_num_seqs=3), decode("d", max_num_seqs=4)
    assert chosen(*pair, request=four) == (None, "d")
    with pytest.raises(TooLarge, match="it takes 4 sequences and 6 KV blocks; a decode node runs 3 sequences at once"):
        place(pair[:2], four)


def test_among_decode_nodes_with_room_the_smaller_batch_then_the_more_room_counts() -> None:
    assert chosen(decode("a", num_running=3), decode("b", num_running=1, num_waiting=1)) == (None, "b")
    assert chosen(decode("a", num_free_blocks=50), decode("b", num_free_blocks=60)) == (None, "b")


def test_the_prefill_node_with_the_least_time_to_the_first_token_counts() -> None:
    slow = prefill("slow", "d", tokens_per_s=100.0)
    busy = prefill("busy", "d", tokens_per_s=1000.0, num_waiting_tokens=200)
    assert chosen(slow, busy, decode("d")) == ("busy", "d")  # 0.4 s, 0.24 s
    busier = prefill("busier", "d", tokens_per_s=1000.0, num_waiting_tokens=500)
    assert chosen(slow, busier, decode("d")) == ("slow", "d")  # 0.4 s, 0.54 s


def test_a_prefill_node_of_unknown_rate_is_tried() -> None:
    assert chosen(prefill("known", "d", tokens_per_s=10.0, num_waiting_tokens=1), prefill("new", "d"), decode("d")) == (
        "new",
        "d",
    )


def test_draining_nodes_get_nothing() -> None:
    assert chosen(prefill("p", "d", draining=True), decode("d")) == (None, "d")
    assert chosen(decode("a", draining=True), decode("b", num_running=9)) == (None, "b")
    for nodes in ((), (prefill("p"),), (decode("d", draining=True),)):
        with pytest.raises(Unavailable, match="no decode node"):
            place(nodes, REQUEST)


def test_a_request_goes_only_where_its_context_fits() -> None:
    """A17."""
    assert chosen(decode("small", max_model_len=47), decode("d", num_running=9)) == (None, "d")
    assert chosen(prefill("small", "d", max_model_len=47), decode("d")) == (None, "d")
    with pytest.raises(InvalidArgument, match=r"48 tokens.*at most 47"):
        place([decode("small", max_model_len=47), prefill("p", "small")], REQUEST)


def test_a_burst_between_two_reports_spreads_over_equal_nodes() -> None:
    nodes = [prefill("p", "a", "b"), prefill("q", "a", "b"), decode("a"), decode("b")]
    registry = Registry(max_nodes=4)
    placed = []
    for _ in range(20):
        placement = place(nodes, REQUEST)
        assert placement.prefill is not None
        registry.note_placed(placement.prefill, to_compute=40, num_prompt_tokens=40, num_choices=1)
        registry.note_placed(placement.decode, to_compute=0, num_prompt_tokens=40, num_choices=1)
        placed.append((placement.prefill.facts.epoch, placement.decode.facts.epoch))
    for i, names in enumerate(("pq", "ab")):
        assert [sum(pair[i] == name for pair in placed) for name in names] == [10, 10]


@pytest.mark.parametrize(("num_queued", "num_cached", "name"), [(32, 48, "warm"), (47, 48, "warm"), (49, 48, "cold")])
def test_a_cached_prefix_is_followed_until_its_node_is_busier_than_the_cache_saves(
    num_queued: int, num_cached: int, name: str
) -> None:
    warm = caching(prefill("warm", "d", tokens_per_s=100.0, num_waiting_tokens=num_queued), num_cached)
    assert chosen(prefill("cold", "d", tokens_per_s=100.0), warm, decode("d"), request=asking()) == (name, "d")


def test_the_longest_cached_prefix_counts_and_a_faster_node_without_it_may_be_better() -> None:
    short, long = (caching(prefill(str(n), "d", tokens_per_s=100.0), n) for n in (16, 64))
    assert chosen(short, long, decode("d"), request=asking()) == ("64", "d")
    fast = prefill("fast", "d", tokens_per_s=1000.0)  # 80 tokens in 0.08 s; the other 16 in 0.16 s
    assert chosen(short, long, fast, decode("d"), request=asking()) == ("fast", "d")


def test_a_prefix_under_another_salt_is_none() -> None:
    nodes = (caching(prefill("other", "d"), 64, "theirs"), caching(prefill("p", "d"), 16, "mine"), decode("d"))
    assert chosen(*nodes, request=asking("mine")) == ("p", "d")
    assert chosen(*nodes, request=asking("theirs")) == ("other", "d")


def test_a_prefill_node_always_computes_the_last_token() -> None:
    """Of a prompt that it has entirely, the last block: no better than a node that lacks only that."""
    every, all_but_one = caching(prefill("q", "d"), 80), caching(prefill("p", "d"), 64)
    placement = place([every, all_but_one, decode("d")], asking())
    assert placement.prefill is all_but_one
    assert placement.num_to_compute == 16


def test_who_wants_the_prompts_log_probabilities_gains_nothing_by_a_prefill_nodes_cache() -> None:
    """C13."""
    nodes = [caching(prefill("q", "d"), 80), prefill("p", "d"), decode("d")]
    placement = place(nodes, asking(needs_every_output=True))
    assert placement.prefill is nodes[1]
    assert placement.num_to_compute == 80


def test_what_is_to_be_computed_is_what_the_chosen_node_lacks() -> None:
    warm, cold = caching(prefill("p", "d"), 48), prefill("q", "d")
    assert place([warm, cold, decode("d")], asking()).num_to_compute == 32
    assert place([cold, prefill("r", "d"), decode("d")], asking()).num_to_compute == 80
    assert place([decode("d")], asking()).num_to_compute == 80


def test_among_decode_nodes_with_room_and_equal_batches_the_most_cached_counts_then_room() -> None:
    warm = caching(decode("warm", num_free_blocks=50), 32)
    assert chosen(decode("roomy"), warm, request=asking()) == (None, "warm")
    assert chosen(decode("roomy"), caching(decode("e"), 80), warm, request=asking()) == (None, "e")
    busy = caching(decode("busy", num_running=1), 80)
    assert chosen(decode("roomy"), busy, request=asking()) == (None, "roomy")
    full = caching(decode("full", num_free_blocks=2), 80)
    assert chosen(decode("roomy", num_running=5), full, request=asking()) == (None, "roomy")
    assert chosen(decode("roomy"), warm, request=asking("another")) == (None, "roomy")


def test_caches_are_not_looked_at_where_there_is_no_choice() -> None:
    request = asking()
    nodes = (caching(prefill("p", "d"), 48), caching(decode("d"), 48))
    assert chosen(*nodes, request=request) == ("p", "d")
    assert chosen(nodes[1], request=request) == (None, "d")
    assert request.blocks == PromptBlocks(PROMPT)  # no hash was computed
    chosen(nodes[1], decode("e"), request=request)
    assert request.blocks != PromptBlocks(PROMPT)


def test_nodes_of_several_block_sizes_are_compared_in_tokens() -> None:
    """What a cache holds of the prompt, and what is free, is counted in each node's own blocks."""
    small, large = decode("small", block_size=8), decode("large", block_size=32)
    assert chosen(caching(small, 40), caching(large, 40), request=asking())[1] == "small"  # 40 tokens, and 32
    small, large = decode("small", block_size=8), decode("large", block_size=32)
    assert chosen(caching(small, 24), caching(large, 64), request=asking())[1] == "large"  # 3 blocks, and 2
    few, many = decode("few", block_size=32, num_free_blocks=50), decode("many", block_size=8, num_free_blocks=100)
    assert chosen(few, many)[1] == "few"
    p, q = prefill("p", "d", block_size=8), prefill("q", "d", block_size=32)
    assert chosen(caching(p, 40), caching(q, 64), decode("d"), request=asking())[0] == "q"
