"""Random lives of many transfers at once, over pools whose blocks are used again as soon as they come back; over links
that keep their promises, and over links that lose, double, mix up, spoil and stall copies, and die.

What is checked: a block that came back is written by nobody (it is filled with a mark, and the mark is still there when
it is used again); what lands is what P had when it pushed (P scribbles over its blocks when they come back); each
transfer's blocks come back once; nothing is left at the end. The seed is printed, and KVRELAY_SEED repeats it.

Seen to catch: Released before the reader has left its piece (every run); COMMIT before the last byte (some runs); among
unlike nodes, staging given back before it is written (every run); with faults, digests that nobody checks.
"""

import os
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from support.connector import LAYOUT, NUM_BLOCKS, TRANSPORTS, Pair, wait_until
from support.faulty_link import Fault, Faults
from support.unlike import unlike_blocks

from kvrelay.connector import staging
from kvrelay.connector.base import (
    CancelOutcome,
    EndReason,
    Failed,
    GrantedRange,
    GrantPlan,
    Landed,
    Offered,
    RefuseReason,
    Released,
    SessionUp,
)
from kvrelay.connector.convert import from_float32
from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.request import RequestKey

pytestmark = pytest.mark.chaos
B = LAYOUT.block_size
MARK = 0xA5
NUM_LIVES = 300
LARGE = replace(LAYOUT, head_dim=1000)  # 96,000 bytes a block: time enough to be caught in one


class Pool:
    """Free blocks, each filled with a mark until it is used again."""

    def __init__(self, region):
        self.region = region
        self.free = list(range(NUM_BLOCKS))
        region[:] = MARK

    def take(self, rng, count):
        blocks = [self.free.pop(rng.randrange(len(self.free))) for _ in range(count)]
        for block in blocks:
            assert (self.region[block] == MARK).all(), f"block {block} was written after it came back"
        return blocks

    def give(self, blocks):
        for block in blocks:
            assert block not in self.free, f"block {block} came back twice"
            self.region[block] = MARK
        self.free += blocks


class Life:
    """One transfer, as both engines see it."""

    def __init__(self, num_tokens, p_blocks, contents):
        self.num_tokens = num_tokens
        self.p_blocks = p_blocks
        self.contents = contents
        self.num_pushed = 0
        self.committed = False
        self.d_blocks = []
        self.positions = []
        self.p_holds = True
        self.d_holds = False
        self.offered = False
        self.d_over = False


class Chaos:
    def __init__(self, transport, seed, layout=LARGE, d_layout=LARGE, transfer_dtype="auto", *, is_faulty=False):
        self.rng = random.Random(seed)
        self.np_rng = np.random.default_rng(seed)
        self.faults = Faults(rng=random.Random(seed + 1)) if is_faulty else None
        p = {"transfer_dtype": transfer_dtype}
        self.pair = Pair(transport, layout=layout, d_layout=d_layout, p=p, faults=self.faults)
        self.d_size = d_layout.block_size
        self.p_pool, self.d_pool = Pool(self.pair.p.region), Pool(self.pair.d.region)
        self.lives = {}
        self.num_landed = 0
        self.num_started = 0

    # --- what the engines do ---

    def act(self):
        actions = [self.start] * 4 + [self.push] * 8 + [self.grant] * 4 + [self.cancel_p, self.cancel_d, self.refuse]
        actions += [self.lose_session] if self.rng.random() < 0.02 else []
        actions += [self.play_network] * 2 if self.pair.network is not None else []
        actions += [self.play_faults] * 4 if self.faults is not None else []
        self.rng.choice(actions)()
        if self.rng.random() < 0.3:
            self.rng.choice((self.pair.p, self.pair.d)).woken.wait(0.001)
        self.serve()

    def pick(self, condition):
        found = [key for key, life in self.lives.items() if condition(life)]
        return self.rng.choice(found) if found else None

    def start(self):
        num_blocks = self.rng.randint(1, 6)
        if len(self.p_pool.free) < num_blocks:
            return
        num_tokens = num_blocks * B - self.rng.randrange(B)
        blocks = self.p_pool.take(self.rng, num_blocks)
        contents = self.new_contents(num_blocks)
        self.pair.p.region[blocks] = contents
        name = f"r{self.num_started}"
        self.num_started += 1
        life = self.lives[RequestKey(name, 0)] = Life(num_tokens, blocks, contents)
        called = self.rng.random()
        if called < 0.5:
            self.pair.expect(name, num_tokens)
        self.pair.offer(name, num_tokens, blocks)
        if 0.5 <= called < 0.95:
            self.pair.expect(name, num_tokens)
        life.d_over = called >= 0.95

    def push(self):
        key = self.pick(lambda life: life.p_holds and not life.committed)
        if key is None:
            return
        life = self.lives[key]
        if life.num_pushed < life.num_tokens:
            end = min(life.num_tokens, life.num_pushed + B * self.rng.randint(1, 3))
            self.pair.push(key, life.num_pushed, end)
            life.num_pushed = end
        elif self.rng.random() < 0.1:
            self.cancel_p(key, EndReason.FINISHED)
        else:
            life.committed = True
            has_digests = self.faults is not None or self.rng.random() < 0.3
            self.pair.commit(key, self.pair.digests(key) if has_digests else ())

    def grant(self):
        key = self.pick(lambda life: life.offered and not life.d_holds and not life.d_over)
        if key is None:
            return
        life = self.lives[key]
        wanted = [i for i in range(blocks_for(life.num_tokens, self.d_size)) if self.rng.random() < 0.7]
        if len(self.d_pool.free) < len(wanted):
            return
        life.d_blocks, life.positions = self.d_pool.take(self.rng, len(wanted)), wanted
        life.offered, life.d_holds = False, True
        ranges = tuple(
            GrantedRange(i * self.d_size, min((i + 1) * self.d_size, life.num_tokens), (block,))
            for i, block in zip(wanted, life.d_blocks, strict=True)
        )
        self.pair.granted[key] = tuple(life.d_blocks)
        self.pair.receiver.grant(key, GrantPlan(ranges))

    def refuse(self):
        key = self.pick(lambda life: life.offered and not life.d_holds and not life.d_over)
        if key is not None:
            self.lives[key].d_over = True
            self.pair.receiver.refuse(key, RefuseReason.NO_ROOM)

    def cancel_p(self, key=None, reason=EndReason.CANCELLED):
        key = key or self.pick(lambda life: life.p_holds)
        if key is not None and self.pair.cancel_p(key, reason) is CancelOutcome.FREED:
            self.released_p(key)

    def cancel_d(self):
        key = self.pick(lambda life: not life.d_over)
        if key is None:
            return
        outcome = self.pair.cancel_d(key)
        if outcome is CancelOutcome.FREED:
            self.released_d(key)
        self.lives[key].d_over = True

    def lose_session(self):
        session = next(iter(self.pair.receiver._peers.values()), None)
        if session is not None:
            self.pair.receiver._acceptor.close_session(session.session, "chaos")

    def play_network(self):
        """Hold pieces back, let some through, catch the reader in mid-piece and let it go."""
        network, rng = self.pair.network, self.rng
        if network.reader.inside is not None:
            network.leave_piece()
        network.is_held = rng.random() < 0.7
        network.stays_in_piece = network.is_held and rng.random() < 0.5
        network.deliver(1 if network.is_held else None)

    def play_faults(self):
        """From now on another fault, or none, and then what was stalled goes."""
        faults = self.faults
        if self.rng.random() < 0.5:
            faults.release()
            return
        with faults.lock:
            faults.fault = self.rng.choice([fault for fault in Fault if fault is not Fault.DIE])
            if self.rng.random() < 0.1:
                faults.fault = Fault.DIE
                faults.at_byte = max((link.num_bytes for link in faults.links), default=0) + self.rng.randrange(100_000)
            faults.wrong_block = self.rng.randrange(NUM_BLOCKS)

    def still_network(self):
        if self.faults is not None:
            self.faults.release()
        network = self.pair.network
        if network is not None:
            if network.reader.inside is not None:
                network.leave_piece()
            network.is_held = network.stays_in_piece = False
            network.deliver()

    # --- what the connector says ---

    def serve(self):
        for event in self.pair.p.collect():
            if isinstance(event, Released):
                self.released_p(event.key)
        for event in self.pair.d.collect():
            if isinstance(event, Offered):
                self.lives[event.key].offered = True
            elif isinstance(event, Landed):
                self.landed(event.key)
            elif isinstance(event, Failed):
                self.lives[event.key].offered = False
                self.lives[event.key].d_over = True
            elif isinstance(event, Released):
                self.released_d(event.key)

    def released_p(self, key):
        life = self.lives[key]
        assert life.p_holds
        life.p_holds = False
        self.p_pool.give(life.p_blocks)

    def released_d(self, key):
        life = self.lives[key]
        life.d_over = True
        if life.d_holds:
            life.d_holds = False
            self.d_pool.give(life.d_blocks)

    def new_contents(self, num_blocks):
        return self.np_rng.integers(0, 256, (num_blocks, self.pair.layout.block_bytes), dtype=np.uint8)

    def expected(self, life):
        """D's blocks, as bytes."""
        return life.contents

    def landed(self, key):
        life = self.lives[key]
        assert life.d_holds
        expected = self.expected(life)
        for position, block in zip(life.positions, life.d_blocks, strict=True):
            assert np.array_equal(self.pair.d.region[block], expected[position]), f"{key} landed with other bytes"
        self.num_landed += 1
        self.released_d(key)

    # --- the end ---

    def finish(self):
        """Cancel whatever still lives, and wait until all has come back."""
        self.still_network()
        for key, life in self.lives.items():
            if life.p_holds:
                self.cancel_p(key)
            if not life.d_over:
                if self.pair.cancel_d(key) is CancelOutcome.FREED:
                    self.released_d(key)
                life.d_over = True
        wait_until(lambda: self.serve() or self.is_over(), "the end of all transfers")
        self.pair.close()

    def is_over(self):
        return len(self.p_pool.free) == len(self.d_pool.free) == NUM_BLOCKS


class UnlikeChaos(Chaos):
    """P's blocks are half as long as D's, of bfloat16; bytes travel as int8, through a staging of few blocks."""

    def __init__(self, transport, seed):
        layout = replace(LARGE, dtype="bfloat16")
        super().__init__(transport, seed, layout, replace(layout, block_size=2 * B), "int8")

    def new_contents(self, num_blocks):
        size = (num_blocks, self.pair.layout.block_bytes // 2)
        values = self.np_rng.standard_normal(size).astype(np.float32)
        return from_float32(values, "bfloat16").view(np.uint8)

    def expected(self, life):
        return unlike_blocks(life.contents, self.pair.layout, self.pair.d_layout, life.num_tokens, "int8")


def faulty_chaos(transport, seed):
    return Chaos(transport, seed, is_faulty=True)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", [Chaos, UnlikeChaos, faulty_chaos])
def test_random_lives_end_with_every_block_back_and_no_byte_wrong(transport, kind, caplog, monkeypatch):
    """A01, A03, A06, A07, A09, B02."""
    monkeypatch.setattr(staging, "STAGING_BYTES", 16 * 2 * LARGE.block_bytes)
    seed = int(os.environ.get("KVRELAY_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    sys.stdout.write(f"KVRELAY_SEED={seed}\n")
    chaos = kind(transport, seed)
    while chaos.num_started < NUM_LIVES:
        chaos.act()
    chaos.pair.p.wait(SessionUp)
    chaos.finish()
    assert chaos.faults is None or chaos.faults.num_struck
    assert chaos.num_landed > 20
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"
