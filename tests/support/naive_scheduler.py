"""Scheduler and pool once more, too simple to be wrong: what the real ones must decide, and what they must then hold.

Nothing is kept that can be counted anew: what is free is every block that no table and no pin names. There are no
reference counts, no ledger, no hashes; a block's content is the text up to its end, its age the moment when it was
last let go of. It follows the words of docs/architecture.md, and shares no code with the engine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Name = tuple[int, int]  # which arrival, which choice
Content = tuple[str, tuple[int, ...]]  # salt, tokens from the first one on
Role = Literal["local", "decode", "prefill"]
Event = tuple[Literal["stored", "evicted"], Content]


@dataclass(eq=False)
class NaiveBlock:
    content: Content | None = None
    let_go: int = 0


@dataclass(eq=False)
class NaiveSequence:
    """One that has not ended."""

    name: Name
    arrival: float
    priority: int
    salt: str
    n: int
    tokens: list[int]
    state: Literal["expected", "waiting", "remote", "running", "swapped"]
    awaits_kv: bool
    num_first: int  # tokens that it arrived with
    table: list[NaiveBlock] = field(default_factory=list)
    computed: int = 0
    cached: int = 0  # tokens found when it first started
    preemptions: int = 0

    @property
    def num_choices(self) -> int:
        return self.n if len(self.tokens) == self.num_first else 1


@dataclass
class Decision:
    """One step. Starts: name to (cached blocks, new blocks); growth: name to new blocks; rows: name to [start, end)."""

    preempted: list[Name] = field(default_factory=list)  # youngest first
    swapped_out: set[Name] = field(default_factory=set)  # of these: what they have computed goes to host memory
    growth: dict[Name, int] = field(default_factory=dict)
    admitted: dict[Name, tuple[int, int]] = field(default_factory=dict)
    grants: dict[Name, tuple[int, int]] = field(default_factory=dict)
    rows: dict[Name, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The limits, and what differs between roles."""

    role: Role
    num_blocks: int
    block_size: int
    seats: int
    budget: int
    threshold: int
    ageing_s: float
    num_spare: int  # the watermark, in blocks
    host_blocks: int
    prefix_caching: bool


class NaiveScheduler:
    """One node."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.blocks = [NaiveBlock() for _ in range(rules.num_blocks)]
        self.sequences: dict[Name, NaiveSequence] = {}
        self.pins: dict[Name, list[NaiveBlock]] = {}  # what transfers hold of sequences that may have ended
        self.events: list[Event] = []
        self._now = 0

    # --- what comes from outside

    def can_ever_fit(self, num_tokens: int, max_tokens: int, n: int) -> bool:
        rules = self.rules
        if rules.role == "prefill":
            return self._blocks_for(num_tokens) <= rules.num_blocks
        alone, together = self._blocks_for(num_tokens + max_tokens), num_tokens // rules.block_size + n
        return max(alone, together) <= rules.num_blocks and n <= rules.seats

    def arrive(self, sequence: NaiveSequence) -> None:
        self.sequences[sequence.name] = sequence

    def offer(self, name: Name) -> None:
        assert self.sequences[name].state == "expected"
        self.sequences[name].state = "waiting"

    def land(self, name: Name) -> None:
        sequence = self.sequences[name]
        assert sequence.state == "remote"
        sequence.state, sequence.awaits_kv = "running", False
        self._computed(sequence, sequence.cached, len(sequence.tokens))

    def fail(self, name: Name) -> None:
        self._let_go(self.sequences.pop(name).table)

    def cancel(self, name: Name) -> None:
        sequence = self.sequences.pop(name)
        if sequence.state == "remote":
            self.pins[name] = sequence.table
        else:
            self._let_go(sequence.table)

    def end(self, name: Name) -> None:
        self._let_go(self.sequences.pop(name).table)

    def pin(self, name: Name) -> None:
        self.pins[name] = list(self.sequences[name].table)

    def unpin(self, name: Name) -> None:
        self._let_go(self.pins.pop(name))

    def take(self, name: Name, tokens: Mapping[int, int]) -> None:
        """Go on with one token of each of these choices, all computed so far."""
        sequence = self.sequences.pop(name)
        shared, own = self._split(sequence)
        if sequence.num_choices == 1:
            ((choice, token),) = tokens.items()
            self.sequences[(name[0], choice)] = replace(sequence, tokens=[*sequence.tokens, token])
            return
        for (choice, token), block in zip(tokens.items(), own, strict=False):
            child = (name[0], choice)
            table = [*shared, block]
            self.sequences[child] = replace(sequence, name=child, tokens=[*sequence.tokens, token], table=table)
        self._let_go(own[len(tokens) :])

    # --- a step

    def decide(self) -> Decision:
        return _Draft(self).decide()

    def carry_out(self, decision: Decision) -> None:
        for name in decision.preempted:
            sequence = self.sequences[name]
            self._let_go(sequence.table)
            sequence.table, sequence.state = [], "swapped"
            if name not in decision.swapped_out:
                sequence.computed, sequence.state = 0, "waiting"
            sequence.preemptions += 1
        starts = decision.admitted | decision.grants
        back = [name for name in starts if self.sequences[name].state == "swapped"]
        for name, (num_cached, _) in starts.items():
            sequence = self.sequences[name]
            sequence.table = self.found(sequence, num_cached)
            assert len(sequence.table) == num_cached
            sequence.state = "running" if name in decision.admitted else "remote"
            if name not in back:
                sequence.computed = num_cached * self.rules.block_size
            if sequence.preemptions == 0:
                sequence.cached = sequence.computed
        for name, num_new in (decision.growth | {name: num_new for name, (_, num_new) in starts.items()}).items():
            for _ in range(num_new):
                self.sequences[name].table.append(self._take_block())
        for name in back:
            self._computed(self.sequences[name], 0, self.sequences[name].computed)

    def advance(self, decision: Decision) -> None:
        for name, (start, end) in decision.rows.items():
            self._computed(self.sequences[name], start, end)

    # --- what is there

    def host_blocks_left(self) -> int:
        return self.rules.host_blocks - sum(self._blocks_for(s.computed) for s in self.in_order("swapped"))

    def held(self) -> set[NaiveBlock]:
        tables = [*(sequence.table for sequence in self.sequences.values()), *self.pins.values()]
        return {block for table in tables for block in table}

    def cached(self) -> list[NaiveBlock]:
        """What can be found and is held by nobody, the next to be evicted first."""
        held = self.held()
        unheld = [block for block in self.blocks if block.content is not None and block not in held]
        return sorted(unheld, key=lambda block: block.let_go)

    def found(self, sequence: NaiveSequence, most: int) -> list[NaiveBlock]:
        """Blocks of the longest prefix that is here, of at most so many."""
        table: list[NaiveBlock] = []
        by_content = {block.content: block for block in self.blocks if block.content is not None}
        while len(table) < most:
            block = by_content.get(self._content(sequence, len(table)))
            if block is None:
                break
            table.append(block)
        return table

    def in_order(self, state: str) -> list[NaiveSequence]:
        return sorted((s for s in self.sequences.values() if s.state == state), key=self.rank)

    def queue(self) -> list[NaiveSequence]:
        """Who starts next: those in host memory, and before them whoever could have had them preempted."""
        queue, place = self.in_order("swapped"), 0
        for sequence in self.in_order("waiting"):
            while place < len(queue) and not self.may_displace(sequence, queue[place]):
                place += 1
            queue.insert(place, sequence)
            place += 1
        return queue

    def may_displace(self, sequence: NaiveSequence, other: NaiveSequence) -> bool:
        """Only one of lower priority that ranks below as well."""
        return other.priority > sequence.priority and self.rank(other) > self.rank(sequence)

    def rank(self, sequence: NaiveSequence) -> tuple[float, float, Name]:
        ageing_s = self.rules.ageing_s
        score = sequence.arrival + sequence.priority * ageing_s if ageing_s else sequence.priority
        return (score, sequence.priority, sequence.name)  # arrivals are named in their order

    def blocks_to_start(self, sequence: NaiveSequence) -> int:
        if self.rules.role == "prefill":
            return self._blocks_for(len(sequence.tokens))
        return len(sequence.tokens) // self.rules.block_size + sequence.num_choices

    def seats(self, sequence: NaiveSequence) -> int:
        return 1 if self.rules.role == "prefill" else sequence.num_choices

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.rules.block_size)

    def _content(self, sequence: NaiveSequence, index: int) -> Content:
        return (sequence.salt, tuple(sequence.tokens[: (index + 1) * self.rules.block_size]))

    def _split(self, sequence: NaiveSequence) -> tuple[list[NaiveBlock], list[NaiveBlock]]:
        """Full blocks, and those behind them."""
        num_full = len(sequence.tokens) // self.rules.block_size
        return sequence.table[:num_full], sequence.table[num_full:]

    def _computed(self, sequence: NaiveSequence, start: int, end: int) -> None:
        sequence.computed = end
        if not self.rules.prefix_caching:
            return
        for index in range(start // self.rules.block_size, end // self.rules.block_size):
            content = self._content(sequence, index)
            if all(block.content != content for block in self.blocks):
                sequence.table[index].content = content
                self.events.append(("stored", content))

    def _let_go(self, table: Iterable[NaiveBlock]) -> None:
        for block in reversed(list(table)):
            self._now += 1
            block.let_go = self._now

    def _take_block(self) -> NaiveBlock:
        held = self.held()
        for block in self.blocks:
            if block.content is None and block not in held:
                return block
        block = self.cached()[0]
        assert block.content is not None
        self.events.append(("evicted", block.content))
        block.content = None
        return block


class _Draft:
    """One decision in the making. Blocks that it gives are only counted: nobody holds them yet."""

    def __init__(self, node: NaiveScheduler) -> None:
        self.node = node
        self.rules = node.rules
        self.running, self.waiting = node.in_order("running"), node.queue()
        self.seated = [*self.running, *node.in_order("remote")]
        self.gone: list[NaiveSequence] = []
        self.growth: dict[NaiveSequence, int] = {}
        self.started: dict[NaiveSequence, tuple[list[NaiveBlock], int]] = {}
        self.kept: list[NaiveSequence] = []  # lack tokens alone: their place is theirs
        self.rows: dict[NaiveSequence, tuple[int, int]] = {}

    def decide(self) -> Decision:
        self._run()
        for sequence in self.waiting:
            if self.gone or not self._start(sequence):
                break
        starts = {s: (len(cached), num_new) for s, (cached, num_new) in self.started.items()}
        return Decision(
            preempted=[s.name for s in reversed(self.running) if s in self.gone],
            swapped_out=self._swapped_out(),
            growth={s.name: num_blocks for s, num_blocks in self.growth.items()},
            admitted={s.name: start for s, start in starts.items() if not s.awaits_kv},
            grants={s.name: start for s, start in starts.items() if s.awaits_kv},
            rows={s.name: row for s, row in self.rows.items()},
        )

    def _swapped_out(self) -> set[Name]:
        """The oldest that give way come first, each with all that it has computed or not at all."""
        left, names = self.node.host_blocks_left(), set()
        for sequence in self.running:
            num_blocks = -(-sequence.computed // self.rules.block_size)
            if sequence in self.gone and num_blocks <= left:
                left -= num_blocks
                names.add(sequence.name)
        return names

    # --- counted anew each time

    def tokens_left(self) -> int:
        return self.rules.budget - sum(end - start for start, end in self.rows.values())

    def seats_taken(self) -> int:
        there = [s for s in (*self.seated, *self.started, *self.kept) if s not in self.gone]
        return sum(map(self.node.seats, there))

    def blocks_left(self) -> int:
        held = {block for s in self.node.sequences.values() if s not in self.gone for block in s.table}
        held.update(block for pinned in self.node.pins.values() for block in pinned)
        held.update(block for cached, _ in self.started.values() for block in cached)
        promised = sum(num_new for s, num_new in self.growth.items() if s not in self.gone)
        promised += sum(num_new for _, num_new in self.started.values())
        promised += sum(map(self.node.blocks_to_start, self.kept))
        return len(self.node.blocks) - len(held) - promised

    # --- the rules

    def _run(self) -> None:
        for index, sequence in enumerate(self.running):
            if sequence in self.gone:
                continue
            if self.tokens_left() == 0:
                return
            behind = self.running[index + 1 :]
            # Who is behind is left a token, those too that have given way to somebody above.
            end = self._chunk_end(sequence, sequence.computed, max(1, self.tokens_left() - len(behind)))
            num_new = max(0, -(-end // self.rules.block_size) - len(sequence.table))
            if num_new and not self._make_room(behind, lambda num_new=num_new: self.blocks_left() >= num_new):
                continue
            if num_new:
                self.growth[sequence] = num_new
            self.rows[sequence] = (sequence.computed, end)

    def _start(self, sequence: NaiveSequence) -> bool:
        """Whether the next in the queue may be looked at."""
        node, rules = self.node, self.rules
        is_oldest = sequence is self.waiting[0] and all(node.rank(sequence) < node.rank(s) for s in self.seated)
        num_spare = 0 if is_oldest else rules.num_spare
        num_seats, num_blocks = node.seats(sequence), node.blocks_to_start(sequence)
        if not sequence.awaits_kv and self.tokens_left() == 0:
            self.kept.append(sequence)
            return self.blocks_left() >= num_spare and self.seats_taken() <= rules.seats
        if self.kept and self.seats_taken() + num_seats > rules.budget:
            return False
        most = len(sequence.tokens) if sequence.awaits_kv else len(sequence.tokens) - 1
        if sequence.state == "swapped":
            most = sequence.computed
        cached = node.found(sequence, most // rules.block_size)
        self.started[sequence] = (cached, num_blocks - len(cached))
        lower = [s for s in self.running if node.may_displace(sequence, s)]
        if not self._make_room(lower, lambda: self.blocks_left() >= num_spare and self.seats_taken() <= rules.seats):
            del self.started[sequence]
            return False
        if not sequence.awaits_kv:
            start = sequence.computed if sequence.state == "swapped" else len(cached) * rules.block_size
            self.rows[sequence] = (start, self._chunk_end(sequence, start, self.tokens_left()))
        return True

    def _chunk_end(self, sequence: NaiveSequence, start: int, limit: int) -> int:
        if self.rules.threshold:
            limit = min(limit, self.rules.threshold)
        return min(len(sequence.tokens), start + limit)

    def _make_room(self, candidates, is_enough) -> bool:
        """The lowest go until it is enough; of these, whoever turns out not to be needed stays, the highest first."""
        before, victims = list(self.gone), []
        for candidate in reversed(candidates):
            if is_enough():
                break
            if candidate not in self.gone and self._frees_something(candidate):
                self.gone.append(candidate)
                victims.append(candidate)
        if not is_enough():
            self.gone = before
            return False
        for victim in reversed(victims):
            self.gone.remove(victim)
            if not is_enough():
                self.gone.append(victim)
        for victim in self.gone:
            self.growth.pop(victim, None)
            self.rows.pop(victim, None)
        return True

    def _frees_something(self, candidate: NaiveSequence) -> bool:
        others = [s.table for s in self.node.sequences.values() if s is not candidate and s not in self.gone]
        others += [*self.node.pins.values(), *(cached for cached, _ in self.started.values())]
        return any(all(block not in table for table in others) for block in candidate.table)
