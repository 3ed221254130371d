"""Placement, from node states written by hand."""

import pytest

from kvrelay.engine.errors import InvalidArgument, TooLarge, Unavailable
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import Load
from kvrelay.router.messages import NodeFacts, Role
from kvrelay.router.policy import RequestFacts, place
from kvrelay.router.registry import Node, Registry

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
REQUEST = RequestFacts(num_prompt_tokens=40, max_tokens=8)


def node(
    role: Role, epoch: str, *, max_model_len: int = 128, max_num_seqs: int = 64, draining: bool = False, **load: object
) -> Node:
    facts = NodeFacts(
        role=role,
        epoch=epoch,
        name=epoch,
        version="1",
        model_fingerprint="f",
        kv_layout=LAYOUT,
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
