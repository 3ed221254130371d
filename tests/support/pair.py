"""A prefill node and a decode node in this process: engine threads, connector and model are real, a test is the router.

It starts both legs, takes what the nodes say, and merges it as a router does. `run` waits for the end; `settle` waits
until neither node holds anything, and then every block must be free or cached.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from support.fake_transport import FakeNetwork, FakeReader, FakeWriter
from support.oracle import engine_config, matcher_of

from kvrelay.connector.base import CancelOutcome, GrantPlan, KVReceiver, KVSender, Landed, Offer, Released
from kvrelay.connector.factory import make_receiver, make_sender
from kvrelay.connector.receiver import Receiver
from kvrelay.connector.sender import Sender
from kvrelay.connector.session import Identity
from kvrelay.decode_node.node import DecodeNode
from kvrelay.decode_node.scheduler import DecodeScheduler
from kvrelay.engine.block_hash import short_name
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.engine import Engine
from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.legs import CacheChange, Delta, Leg, LegReport, Peer
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.request import FinishReason, Logprobs, Request, RequestKey
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.secret import new_epoch
from kvrelay.engine.structured_output import FormCompiler
from kvrelay.node.core import NodeCore
from kvrelay.node.engine_thread import EngineThread
from kvrelay.node.found_blocks import FoundBlocks
from kvrelay.node.report import Snapshot, Start
from kvrelay.prefill_node.admission import PrefillAdmission
from kvrelay.prefill_node.node import PrefillNode

WAIT_S = 60.0
BLOCK, CHUNK = 16, 32  # of `make_pair`


class Node:
    """One node: its engine thread, and what it has said."""

    def __init__(self, name: str, said: Callable[[str, tuple[Delta, ...]], None]) -> None:
        self.name = name
        self.epoch = new_epoch()
        self.deaths: list[BaseException] = []
        self._said = said
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._found_blocks = FoundBlocks()
        self.thread = EngineThread(self.deaths.append)

    def on_report(self, deltas: tuple[Delta, ...], snapshot: Snapshot, change: CacheChange | None) -> None:
        with self._changed:
            self._snapshot = snapshot
            if change is not None:
                self._found_blocks.apply(change)
            self._changed.notify_all()
        self._said(self.name, deltas)

    def run(self, core: NodeCore, pool: BlockPool) -> None:
        self.core, self.pool = core, pool
        self.thread.start(core)

    def post(self, message: Callable[[], None]) -> None:
        self.thread.post(message)

    def wait(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """Until a snapshot is as wished."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._snapshot is not None and condition(self._snapshot), WAIT_S)
            assert found, f"{self.name}: {self._snapshot}, deaths {self.deaths}"
            assert self._snapshot is not None
            return self._snapshot

    def settle(self) -> None:
        self.wait(lambda s: s.num_live == 0)
        snapshot = self.wait(lambda s: s.blocks.owned == 0)
        assert snapshot.swap.num_swapped == 0
        assert snapshot.swap.num_free_host_blocks == snapshot.swap.num_host_blocks
        blocks = snapshot.blocks
        assert blocks.free + blocks.cached + blocks.quarantined == blocks.total
        assert blocks.quarantined == 0
        self.pool.check_integrity()
        assert self._found_blocks.whole().stored == set(map(short_name, self.pool.found_hashes()))


class Guard:
    """Sees that no block is allocated while a transfer that was told of it may still read or write it."""

    def __init__(self, pool: BlockPool, half: Any) -> None:
        self.violations: list[str] = []
        self._touched: dict[RequestKey, frozenset[int]] = {}
        self._allocate, self._events, self._cancel = pool.allocate, half.events, half.cancel
        pool.allocate = self._guarded_allocate  # type: ignore[method-assign]
        half.events, half.cancel = self._seen_events, self._seen_cancel

    def touch(self, key: RequestKey, block_ids: Iterable[int]) -> None:
        self._touched[key] = frozenset(block_ids)

    def _guarded_allocate(self, num_blocks: int) -> list[int]:
        block_ids = self._allocate(num_blocks)
        for key, touched in self._touched.items():
            if not touched.isdisjoint(block_ids):
                self.violations.append(f"{sorted(touched & set(block_ids))} allocated, but {key} may touch them")
        return block_ids

    def _seen_events(self) -> list[Any]:
        events: list[Any] = self._events()
        for event in events:
            if isinstance(event, Released | Landed):
                self._touched.pop(event.key, None)
        return events

    def _seen_cancel(self, key: RequestKey, *reason: Any) -> CancelOutcome:
        outcome: CancelOutcome = self._cancel(key, *reason)
        if outcome is CancelOutcome.FREED:
            self._touched.pop(key, None)
        return outcome


@dataclass
class ChoiceAnswer:
    """What both legs said of one choice."""

    tokens: list[int]
    num_resumed: int
    logprobs: list[Logprobs] = field(default_factory=list)  # of tokens from number `num_resumed` on
    finish_reason: FinishReason | None = None


@dataclass
class Answer:
    """What both legs said of one request."""

    choices: dict[int, ChoiceAnswer]
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    errors: dict[str, KvrelayError] = field(default_factory=dict)
    reports: dict[str, LegReport] = field(default_factory=dict)
    open_legs: set[str] = field(default_factory=set)
    num_decode_deltas: int = 0

    @property
    def choice(self) -> ChoiceAnswer:
        """The only one."""
        (choice,) = self.choices.values()
        return choice

    @property
    def tokens(self) -> list[int]:
        return self.choice.tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choice.finish_reason


class Pair:
    """The two nodes and the merging of what they say."""

    def __init__(
        self,
        model: Path,
        *,
        runners: tuple[ModelRunner, ModelRunner] | None = None,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        kv_digests: bool = True,
        network: FakeNetwork | None = None,
        gguf: Path | None = None,
        transfer_dtype: str = "auto",
        shares_pool: bool = False,
    ) -> None:
        """`network`: bytes move over it as the test says, instead of over sockets; `shares_pool`: over shared memory.
        `gguf`: what the model was made of."""
        self._transfer_dtype, self._kv_digests = transfer_dtype, kv_digests
        self.info = read_model_info(model, gguf=gguf)
        self._compiler = FormCompiler(self.info)
        self._answers: dict[RequestKey, Answer] = {}
        self._changed = threading.Condition()
        prefill_config = engine_config(model, **(prefill or {}))
        decode_config = engine_config(model, **(decode or {}))
        self._own_runners = runners is None
        self.runners = runners or (
            ModelRunner.load(self.info, prefill_config),
            ModelRunner.load(self.info, decode_config, shares_pool=shares_pool),
        )
        clock = MonotonicClock()
        self.prefill, self.decode = Node("prefill", self._hear), Node("decode", self._hear)
        runner_p, runner_d = self.runners

        self.receiver, self.sender = self._connect(network)
        pool_d = BlockPool(runner_d.num_blocks, decode_config.block_size, prefix_caching=decode_config.prefix_caching)
        scheduler_d = DecodeScheduler(decode_config, pool_d, num_host_blocks=runner_d.num_host_blocks)
        engine_d = Engine(scheduler_d, runner_d, self.info.eos_token_ids, clock)
        core_d = DecodeNode(
            engine_d, scheduler_d, self.receiver, clock, self.decode.on_report, vocab_size=self.info.vocab_size
        )
        pool_p = BlockPool(runner_p.num_blocks, prefill_config.block_size, prefix_caching=prefill_config.prefix_caching)
        admission = PrefillAdmission(prefill_config.block_size, prefill_config.watermark)
        scheduler_p = Scheduler(prefill_config, pool_p, admission)
        engine_p = Engine(scheduler_p, runner_p, self.info.eos_token_ids, clock, hands_over=True)
        core_p = PrefillNode(engine_p, self.sender, clock, self.prefill.on_report, kv_digests=kv_digests)
        self.offers: dict[RequestKey, Offer] = {}
        self.grants: dict[RequestKey, GrantPlan] = {}
        self._guards = {"prefill": Guard(pool_p, self.sender), "decode": Guard(pool_d, self.receiver)}
        self._spy()
        self.decode.run(core_d, pool_d)
        self.prefill.run(core_p, pool_p)
        peer = Peer(self.decode.epoch, self.receiver.address())
        self.prefill.post(lambda: core_p.set_peers([peer]))
        self.prefill.wait(lambda s: self.decode.epoch in s.load.sessions)

    def _connect(self, network: FakeNetwork | None) -> tuple[KVReceiver, KVSender]:
        (runner_p, runner_d), clock = self.runners, MonotonicClock()
        nodes = (self.decode, runner_d), (self.prefill, runner_p)
        decode, prefill = (
            {"layout": runner.layout, "fingerprint": self.info.fingerprint, "epoch": node.epoch, "secret": "s3cret"}
            for node, runner in nodes
        )
        wake_d, wake_p = self.decode.thread.wake, self.prefill.thread.wake
        if network is None:
            receiver = make_receiver(region=runner_d.region, region_fd=runner_d.region_fd, wake_up=wake_d, **decode)
            sender = make_sender(
                region=runner_p.region,
                wake_up=wake_p,
                transfer_dtype=self._transfer_dtype,
                kv_digests=self._kv_digests,
                **prefill,
            )
            return receiver, sender
        reader = FakeReader(network, runner_d.region)
        receiver = Receiver(
            Identity(**decode), runner_d.region, [reader], clock, wake_d, bind="127.0.0.1", port=0, advertise=""
        )
        makers = {"fake": partial(FakeWriter, network)}
        return receiver, Sender(Identity(**prefill), runner_p.region, makers, clock, wake_p)

    def _spy(self) -> None:
        """Write down every offer and grant, and have the guards watch their blocks."""
        offer, grant = self.sender.offer, self.receiver.grant

        def spied_offer(made: Offer) -> None:
            self.offers[made.key] = made
            self._guards["prefill"].touch(made.key, made.block_ids)
            offer(made)

        def spied_grant(key: RequestKey, plan: GrantPlan) -> None:
            self.grants[key] = plan
            self._guards["decode"].touch(key, [b for granted in plan.ranges for b in granted.block_ids])
            grant(key, plan)

        self.sender.offer, self.receiver.grant = spied_offer, spied_grant  # type: ignore[method-assign]

    def start(
        self, request: Request, *, whole: bool = False, legs: Iterable[str] = ("prefill", "decode")
    ) -> RequestKey:
        """Call the nodes for a request; with `legs`, only some of them."""
        nodes = ["decode"] if whole else list(legs)
        with self._changed:
            choices = range(request.choice, request.choice + request.sampling.n)
            self._answers[request.key] = Answer(
                {c: ChoiceAnswer(list(request.output_token_ids), len(request.output_token_ids)) for c in choices},
                open_legs=set(nodes),
            )
        for name in nodes:
            self._call(request, name, Leg.WHOLE if whole else Leg(name))
        return request.key

    def join(self, request: Request, name: str) -> None:
        """Call one more node for a request that `start` has called others for."""
        with self._changed:
            self._answers[request.key].open_legs.add(name)
        self._call(request, name, Leg(name))

    def _call(self, request: Request, name: str, leg: Leg) -> None:
        node, other = (self.prefill, self.decode) if name == "prefill" else (self.decode, self.prefill)
        peer_epoch = "" if leg is Leg.WHOLE else other.epoch
        start = Start(leg, request, peer_epoch, matcher_of(self._compiler, request))
        node.post(lambda: node.core.start(start))

    def cancel(self, key: RequestKey, choice: int | None = None) -> None:
        for node in (self.prefill, self.decode):
            node.post(lambda node=node: node.core.cancel(key, choice))  # type: ignore[misc]

    def wait(self, key: RequestKey) -> Answer:
        """Until the answer is whole, or a leg has failed."""
        answer = self._answers[key]
        with self._changed:
            over = self._changed.wait_for(lambda: answer.errors or not answer.open_legs, WAIT_S)
        assert over, f"no end: {answer}, deaths {self.prefill.deaths + self.decode.deaths}"
        return answer

    def wait_until(self, key: RequestKey, condition: Callable[[Answer], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self._answers[key]), WAIT_S), self._answers[key]

    def run(self, request: Request, *, whole: bool = False) -> Answer:
        """Start, and wait for the end."""
        return self.wait(self.start(request, whole=whole))

    def run_all(self, requests: Seq[Request]) -> list[Answer]:
        keys = [self.start(request) for request in requests]
        return [self.wait(key) for key in keys]

    def settle(self) -> None:
        for node in (self.prefill, self.decode):
            node.settle()
        assert not [violation for guard in self._guards.values() for violation in guard.violations]

    def close(self) -> None:
        for node in (self.prefill, self.decode):
            node.thread.stop(WAIT_S)
        if self._own_runners:
            for runner in self.runners:
                runner.close()
        assert not self.prefill.deaths + self.decode.deaths

    def _hear(self, name: str, deltas: tuple[Delta, ...]) -> None:
        with self._changed:
            for delta in deltas:
                self._merge(name, delta)
            self._changed.notify_all()

    def _merge(self, name: str, delta: Delta) -> None:
        answer = self._answers[delta.key]
        if delta.prompt_logprobs:
            assert delta.first_prompt_index == len(answer.prompt_logprobs), f"out of order: {answer}"
            answer.prompt_logprobs += delta.prompt_logprobs
        if delta.token_ids:
            self._merge_tokens(answer.choices[delta.choice], delta)
        answer.num_decode_deltas += name == "decode" and bool(delta.token_ids)
        if delta.report is not None:
            answer.reports[name] = delta.report
        if delta.error is not None:
            answer.errors[name] = delta.error
        if delta.ended:
            answer.open_legs.discard(name)

    def _merge_tokens(self, choice: ChoiceAnswer, delta: Delta) -> None:
        first, known = delta.first_token_index, len(choice.tokens)
        assert first <= known, f"a gap before token {first}: {choice}"
        again = known - first
        assert list(delta.token_ids[:again]) == choice.tokens[first:][: len(delta.token_ids)]
        choice.tokens += delta.token_ids[again:]
        if delta.logprobs:
            assert len(delta.logprobs) == len(delta.token_ids)
            assert list(delta.logprobs[:again]) == choice.logprobs[first - choice.num_resumed :][: len(delta.logprobs)]
            choice.logprobs += delta.logprobs[again:]
        if delta.finish_reason is not None:
            assert choice.finish_reason in (None, delta.finish_reason)
            choice.finish_reason = delta.finish_reason


MakePair = Callable[..., Pair]


@contextlib.contextmanager
def making_pairs(model: Path) -> Iterator[MakePair]:
    """Pairs with small blocks and chunks, that are closed at the end, with every block back."""
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        chunked = {"max_num_batched_tokens": CHUNK, "block_size": BLOCK}
        options["prefill"] = chunked | options.get("prefill", {})
        options["decode"] = chunked | options.get("decode", {})
        pairs.append(Pair(model, **options))
        return pairs[-1]

    try:
        yield make
        for pair in pairs:
            pair.settle()
    finally:
        for pair in pairs:
            pair.close()
