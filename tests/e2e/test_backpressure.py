"""D full -> offers wait in order -> P's pool fills -> P takes no more prompts; and when it clears, nothing is lost.

Both nodes are real and in this process; a fake network holds D full, with one transfer whose bytes do not come, for as
long as a test wishes.
"""

import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Seq

import pytest
from support.connector import wait_until
from support.fake_transport import FakeNetwork
from support.oracle import Oracle, make_request, random_prompt
from support.pair import BLOCK, Answer, MakePair, Pair

from kvrelay.engine.engine import RowOutput, StepOutcome
from kvrelay.engine.planner import StepPlan
from kvrelay.engine.request import Request, RequestKey, Sequence
from kvrelay.node import core

NUM_BLOCKS = 4  # of each prompt below
LENGTH = NUM_BLOCKS * BLOCK - 3
ONE = {"num_blocks": NUM_BLOCKS + 1}  # room for one of them and no second
TWO = {"num_blocks": 2 * NUM_BLOCKS + 1}


def requests(count: int, *, deadline: float = float("inf"), max_tokens: int = 4) -> list[Request]:
    """All different, and named by their number."""
    return [
        make_request(
            random_prompt(LENGTH, seed=i), f"{i:04}", max_tokens=max_tokens, ignore_eos=True, deadline=deadline
        )
        for i in range(count)
    ]


def check(answers: Seq[Answer], asked: Seq[Request], oracle: Oracle) -> None:
    """Each is whole, each token once (the pair asserts that), and one engine's."""
    for answer, request in zip(answers, asked, strict=True):
        assert not answer.errors
        assert answer.tokens == oracle.generate(
            request.prompt_token_ids, max_tokens=request.sampling.max_tokens, ignore_eos=True
        )


class Jam:
    """One D full with the first request's transfer, the second's offer waiting for it, P full with both, and the others
    in P's queue."""

    def __init__(self, make_pair: MakePair, asked: Seq[Request]) -> None:
        self.network = FakeNetwork()
        self.network.hold()
        self.pair: Pair = make_pair(network=self.network, prefill=TWO, decode=ONE)
        self.keys = [self.start(request) for request in asked]
        self.wait(len(asked))

    def start(self, request: Request) -> RequestKey:
        """D hears of it first, so that nothing but its room decides."""
        self.pair.start(request, legs=["decode"])
        self.pair.decode.wait(lambda s: s.load.num_running + s.load.num_waiting > int(request.key.request_id))
        self.pair.join(request, "prefill")
        return request.key

    def wait(self, num_asked: int) -> None:
        pair = self.pair
        pair.prefill.wait(
            lambda s: (
                s.load.num_running == 0 and s.load.num_waiting == num_asked - 2 and s.blocks.owned == 2 * NUM_BLOCKS
            )
        )
        pair.decode.wait(lambda s: (s.load.num_running, s.load.num_waiting) == (1, num_asked - 1))
        on_d = {"COMMIT_SEEN": 1, "PENDING": 1, "WAITING": num_asked - 2}
        wait_until(lambda: pair.receiver.statistics().states == {name: count for name, count in on_d.items() if count})
        wait_until(lambda: pair.sender.statistics().states == {"COMMITTED": 1, "OFFERED": 1})

    def clear(self) -> None:
        with self.network.lock:
            self.network.is_held = False
            self.network.deliver()


MakeJam = Callable[[Seq[Request]], Jam]


@pytest.fixture
def make_jam(make_pair: MakePair) -> Iterator[MakeJam]:
    """Jams that have cleared before anybody looks for what is left."""
    jams: list[Jam] = []

    def make(asked: Seq[Request]) -> Jam:
        jams.append(Jam(make_pair, asked))
        return jams[-1]

    yield make
    for jam in jams:
        jam.clear()


@pytest.mark.parametrize(("prefill", "decode"), [(TWO, ONE), (ONE, TWO), (ONE, ONE)], ids=["D", "P", "both"])
def test_kv_for_little_more_than_one_request_serves_fifty(
    make_pair: MakePair, tiny_oracle: Oracle, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    """B01: who stands in line has nothing that another lacks."""
    asked = requests(50)
    pair = make_pair(prefill=prefill, decode=decode)
    check(pair.run_all(asked), asked, tiny_oracle)
    pair.settle()


def test_a_jam_holds_nothing_but_what_fits_and_clears_without_loss(make_jam: MakeJam, tiny_oracle: Oracle) -> None:
    """P's first tokens are out; no prompt is computed that has no room; nothing is granted out of turn."""
    asked = requests(30)
    jam = make_jam(asked)
    pair = jam.pair
    num_steps = pair.prefill.wait(lambda s: True).num_steps
    asked += requests(40)[30:]
    jam.keys += [jam.start(request) for request in asked[30:]]
    jam.wait(40)
    assert pair.prefill.wait(lambda s: True).num_steps == num_steps
    assert [key.request_id for key in pair.offers] == ["0000", "0001"]
    assert [key.request_id for key in pair.grants] == ["0000"]
    jam.clear()
    check([pair.wait(key) for key in jam.keys], asked, tiny_oracle)
    assert list(pair.offers) == list(pair.grants) == sorted(pair.offers)
    pair.settle()


def test_the_urgent_pass_the_queue_but_not_what_has_blocks(make_jam: MakeJam, tiny_oracle: Oracle) -> None:
    asked = requests(20)
    jam = make_jam(asked)
    prompt = random_prompt(LENGTH, seed=99)
    urgent = make_request(prompt, "0020", max_tokens=4, ignore_eos=True, priority=-1)
    jam.start(urgent)
    jam.wait(21)
    jam.clear()
    assert jam.pair.wait(urgent.key).tokens == tiny_oracle.generate(prompt, max_tokens=4, ignore_eos=True)
    check([jam.pair.wait(key) for key in jam.keys], asked, tiny_oracle)
    assert [key.request_id for key in jam.pair.offers][:4] == ["0000", "0001", "0020", "0002"]
    assert list(jam.pair.grants).index(urgent.key) <= 2


@pytest.mark.parametrize("number", [0, 1, 2, 9], ids=["in transfer", "on offer", "first in queue", "last in queue"])
def test_who_leaves_a_jam_makes_room_at_once_wherever_it_waits(
    make_jam: MakeJam, tiny_oracle: Oracle, number: int
) -> None:
    asked = requests(10)
    jam = make_jam(asked)
    jam.pair.cancel(jam.keys[number])
    jam.wait(9)  # the next has its place: D's room, P's, or the queue's
    jam.clear()
    others = [i for i in range(10) if i != number]
    check([jam.pair.wait(jam.keys[i]) for i in others], [asked[i] for i in others], tiny_oracle)
    jam.pair.settle()


@pytest.mark.parametrize("number", [0, 1, 2, 9], ids=["in transfer", "on offer", "first in queue", "last in queue"])
def test_who_is_out_of_time_in_a_jam_makes_room_at_once_wherever_it_waits(
    make_jam: MakeJam, tiny_oracle: Oracle, number: int
) -> None:
    asked = requests(10)
    asked[number] = requests(10, deadline=time.monotonic() + 2.0)[number]
    jam = make_jam(asked)
    late = jam.pair.wait(jam.keys[number])
    codes = {name: error.code for name, error in late.errors.items()}
    assert codes, "it ended without a word"
    assert set(codes.values()) <= {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
    jam.wait(9)
    jam.clear()
    others = [i for i in range(10) if i != number]
    check([jam.pair.wait(jam.keys[i]) for i in others], [asked[i] for i in others], tiny_oracle)
    jam.pair.settle()


def live_objects() -> Counter[str]:
    """How many objects of the nodes' own there are, by type."""
    gc.collect()
    names = (
        type(thing).__qualname__ for thing in gc.get_objects() if str(type(thing).__module__).startswith("kvrelay.")
    )
    return Counter(names)


def test_a_thousand_that_wait_cost_their_token_ids_and_leave_nothing(make_jam: MakeJam, tiny_oracle: Oracle) -> None:
    jam = make_jam(requests(2))
    pair, before = jam.pair, live_objects()
    tracemalloc.start()
    try:
        asked = requests(1002)
        keys = [pair.start(request) for request in asked[2:]]
        jam.wait(1002)
        pair.prefill.wait(lambda s: s.num_live == 1002)
        num_bytes = tracemalloc.get_traced_memory()[0]
        for _ in range(200):  # turns of a node that can do nothing keep nothing
            pair.prefill.post(lambda: None)
        pair.cancel(keys.pop())
        jam.wait(1001)
        assert tracemalloc.get_traced_memory()[0] < num_bytes + 200_000
    finally:
        tracemalloc.stop()
    assert num_bytes / 1000 < 10_000  # two nodes' and the test's own, of 61 token ids each
    during = live_objects()
    assert (during["PrefillLeg"], during["DecodeLeg"], during["Outgoing"]) == (1001, 1001, 2)
    for key in keys:
        pair.cancel(key)
    jam.wait(2)
    pair._answers = {key: pair._answers[key] for key in jam.keys}  # the test's own memory of them
    del asked, keys
    after = live_objects()
    assert {name: after[name] - before[name] for name in ("PrefillLeg", "DecodeLeg", "Sequence", "Incoming")} == {
        "PrefillLeg": 0,
        "DecodeLeg": 0,
        "Sequence": 0,
        "Incoming": 0,
    }
    jam.clear()
    check([pair.wait(key) for key in jam.keys], requests(2), tiny_oracle)


def test_a_node_takes_no_more_legs_than_it_has_memory_for(
    make_jam: MakeJam, tiny_oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(6)
    jam = make_jam(asked[:5])
    monkeypatch.setattr(core, "MAX_LEGS", 5)
    error = jam.pair.run(asked[5]).errors
    assert {said.code for said in error.values()} == {"RESOURCE_EXHAUSTED"}
    assert all(said.retryable and "5 requests wait or run" in said.message for said in error.values())
    jam.clear()
    check([jam.pair.wait(key) for key in jam.keys], asked[:5], tiny_oracle)
    check(
        [jam.pair.run(make_request(asked[5].prompt_token_ids, "again", max_tokens=4, ignore_eos=True))],
        asked[5:],
        tiny_oracle,
    )


# --- what the nodes say of it --------------------------------------------------------------------------------------


def test_a_node_s_load_counts_what_it_is_to_have_and_what_it_is_to_compute(make_jam: MakeJam) -> None:
    jam = make_jam(requests(10))
    choices = make_request(random_prompt(LENGTH, seed=77), "10", max_tokens=4, n=2, ignore_eos=True)
    jam.pair.start(choices, legs=["decode"])
    decode = jam.pair.decode.wait(lambda s: s.load.num_waiting == 9 + 2).load
    assert decode.num_running == 1  # in transfer
    assert decode.num_free_blocks == 1
    assert decode.num_wanted_blocks == 9 * NUM_BLOCKS + (NUM_BLOCKS - 1 + 2)
    assert decode.num_waiting_tokens == 0  # of other nodes' prompts it computes nothing
    prefill = jam.pair.prefill.wait(lambda s: True).load
    assert (prefill.num_running, prefill.num_waiting) == (0, 8)
    assert prefill.num_waiting_tokens == 8 * LENGTH
    assert prefill.num_wanted_blocks == 8 * NUM_BLOCKS
    assert prefill.tokens_per_s > 0
    jam.pair.cancel(choices.key)
    jam.clear()
    for key in jam.keys:
        jam.pair.wait(key)
    for node in (jam.pair.prefill, jam.pair.decode):
        load = node.wait(lambda s: s.num_live == 0).load
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.num_wanted_blocks) == (0, 0, 0, 0)


def step(num_tokens: int, duration_s: float) -> StepOutcome:
    """What it comes to when so many tokens took so long."""
    sequence = Sequence(make_request(random_prompt(LENGTH)))
    return StepOutcome(StepPlan(), (RowOutput(sequence, 0, num_tokens),) if num_tokens else (), duration_s)


def test_the_rate_is_of_tokens_over_time_in_steps_and_no_short_chunk_spoils_it(make_pair: MakePair) -> None:
    node = make_pair().prefill.core
    for outcome in [step(400, 0.1)] * 20 + [step(1, 0.01)] * 2:
        node._measure(outcome)
    assert 3000 < node.snapshot().load.tokens_per_s < 4000
    for outcome in [step(100, 0.1)] * 30 + [step(0, 0.0)]:  # at the end nothing to do: no sign of slowness
        node._measure(outcome)
    assert node.snapshot().load.tokens_per_s == pytest.approx(1000, rel=0.01)


# --- the scenarios of others' reports -------------------------------------------------------------------------------


def test_two_long_prompts_in_small_chunks_share_a_d_with_room_for_little_more_than_one(
    make_pair: MakePair, tiny_oracle: Oracle
) -> None:
    """B01: no chunk of one waits for what the other holds."""
    small = {"max_num_batched_tokens": BLOCK}
    pair = make_pair(prefill=small, decode=small | {"num_blocks": 8})
    for turn in range(5):
        asked = [
            make_request(random_prompt(105, seed=2 * turn + i), f"{turn}-{i}", max_tokens=8, ignore_eos=True)
            for i in range(2)
        ]
        check(pair.run_all(asked), asked, tiny_oracle)


def test_one_prefix_two_hundred_times_leaves_no_block_behind(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """B02: what D already has, pinned and not sent, is given back with the rest."""
    prefix = random_prompt(3 * BLOCK)
    pair = make_pair(prefill={"num_blocks": 12}, decode={"num_blocks": 12})
    for i in range(200):
        request = make_request(prefix + random_prompt(1 + i % BLOCK, seed=i), str(i), max_tokens=2, ignore_eos=True)
        answer = pair.run(request)
        check([answer], [request], tiny_oracle)
        handoff = answer.reports["decode"].handoff
        assert handoff is not None
        assert handoff.cached_blocks == (3 if i else 0)
        pair.settle()
    assert pair.receiver.statistics().num_failed == 0


def test_what_grows_beside_transfers_gives_way_a_few_times_and_comes_to_its_end(
    make_pair: MakePair, tiny_oracle: Oracle
) -> None:
    """B04, G02: D has room for 1.3 of six requests that grow by three quarters, and KV comes in all the while."""
    pair = make_pair(prefill={"num_blocks": 40}, decode={"num_blocks": 9})
    asked = requests(6, max_tokens=LENGTH - BLOCK)
    check(pair.run_all(asked), asked, tiny_oracle)
    num_preemptions = pair.decode.wait(lambda s: s.num_live == 0).num_preemptions
    assert 0 < num_preemptions < 5 * len(asked)


def test_what_arrives_late_of_a_cancelled_transfer_lands_in_nobody_s_block(
    make_pair: MakePair, tiny_oracle: Oracle
) -> None:
    """A06: cancelled in mid-push, and its blocks given to the next at once; two hundred times."""
    network = FakeNetwork()
    pair = make_pair(network=network, prefill=TWO, decode=ONE)
    prompts = [random_prompt(LENGTH, seed=i) for i in range(8)]
    expected = [tiny_oracle.generate(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
    for i in range(200):
        network.hold()
        victim = pair.start(make_request(random_prompt(LENGTH, seed=1000 + i), f"victim-{i}", ignore_eos=True))
        wait_until(lambda: len(network.in_flight) > 0)  # its first chunk's blocks are on the way
        pair.cancel(victim)
        after = pair.start(make_request(prompts[i % 8], f"after-{i}", max_tokens=4, ignore_eos=True))
        wait_until(lambda: pair.sender.statistics().states == {"COMMITTED": 1})
        with network.lock:
            num_late = sum(grant.key == victim for grant, _, _ in network.in_flight)
            assert num_late
            network.in_flight.rotate(-num_late)  # behind all that the next one's blocks get
            network.is_held = False
            network.deliver()
        answer = pair.wait(after)
        assert not answer.errors
        assert answer.tokens == expected[i % 8]
        pair.settle()


def test_a_pool_of_two_prompts_serves_twenty_over_a_slow_link(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """A07: no block of P is given to the next prompt while it is still to be read."""
    network = FakeNetwork()
    network.hold()
    pair = make_pair(network=network, prefill=TWO, decode=TWO)
    asked = requests(20)
    keys = [pair.start(request) for request in asked]
    for _ in range(20 * NUM_BLOCKS):
        wait_until(lambda: len(network.in_flight) > 0)
        network.deliver(1)
    check([pair.wait(key) for key in keys], asked, tiny_oracle)


def test_what_d_refuses_when_p_has_prefilled_gives_p_its_blocks_back(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """A17: a router that does not know D's limits yet."""
    pair = make_pair(prefill=TWO, decode=TWO | {"max_num_seqs": 2})
    prompt = random_prompt(LENGTH)
    refused = make_request(prompt, "refused", max_tokens=4, n=3, ignore_eos=True)
    pair.start(refused, legs=["prefill"])
    pair.wait_until(refused.key, lambda answer: all(choice.tokens for choice in answer.choices.values()))
    pair.prefill.wait(lambda s: s.blocks.owned == NUM_BLOCKS)
    pair.join(refused, "decode")
    error = pair.wait(refused.key).errors["decode"]
    assert (error.code, error.retryable) == ("INVALID_ARGUMENT", False)
    assert "runs 2 sequences" in error.message
    pair.settle()
    asked = make_request(prompt, "after", max_tokens=4, ignore_eos=True)
    check([pair.run(asked)], [asked], tiny_oracle)


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
@pytest.mark.parametrize("around", [-1, 0, 1])
def test_d_warm_with_a_token_more_or_less_than_whole_blocks(
    make_pair: MakePair, tiny_oracle: Oracle, num_blocks: int, around: int
) -> None:
    """A01: with the first output token in the prompt too, as where a request is resumed."""
    pair = make_pair()
    number = 0
    for length in (4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1):
        for num_done in (0, 1):
            number += 1
            prompt = random_prompt(length, seed=number)
            pair.run(make_request(prompt[: num_blocks * BLOCK + around], f"warm-{number}", max_tokens=1), whole=True)
            expected = tiny_oracle.generate(prompt, ignore_eos=True)
            output = expected[:num_done]
            answer = pair.run(make_request(prompt, f"request-{number}", output=output, ignore_eos=True))
            assert answer.tokens == expected
            handoff = answer.reports["decode"].handoff
            assert handoff is not None
            assert handoff.cached_blocks == min(num_blocks * BLOCK + around, length) // BLOCK
