"""The world around the hand-off's tables: everything that can happen to one transfer, for an exhaustive search.

Control messages travel in order on a session that can be lost, bytes on a connection of their own; writers and readers
are caught in mid-piece; the router calls and cancels; timers run out; nodes freeze and die.

Safety, in every reachable state: nothing writes into blocks that D has given back; nothing reads blocks that P has
given back; nothing is given back twice or kept after the end; a request starts on D only with every byte in; D's
request has at most one outcome (started, failed, cancelled) and a cancelled or failed one never starts.
Liveness: from every reachable state, without further faults, both sides end with their blocks back; and each side
alone, with its own timeouts but no help from the other, gives its request an outcome.

Not modelled: several transfers at once, room in the pools, retries as new attempts, starvation.
"""

from collections import deque
from typing import NamedTuple

PIECES = 2
P_END, D_END = {"CLOSED", "DEAD"}, {"CLOSED", "LANDED", "DEAD"}
D_LIVE = ("GRANTED", "COMMIT_SEEN")  # a piece that arrives now goes into the blocks; otherwise into scratch


class State(NamedTuple):
    """Both sides of one transfer, and what is between them."""

    p: str = "OFFERED"
    d: str = "NONE"
    pd: tuple[str, ...] = ("OFFER",)  # messages on their way
    dp: tuple[str, ...] = ()
    up: bool = True  # the session
    data_up: bool = True  # the data connection
    writer: str = "idle"
    sent: int = 0
    in_flight: int = 0
    reader: str = "idle"
    landed: int = 0
    p_owns: bool = True
    d_owns: bool = False
    p_out: str | None = None  # each side's outcome
    d_out: str | None = None
    called: bool = False
    cancelled: bool = False
    p_knows: bool = True  # of the session's loss, where there was one
    d_knows: bool = True
    p_frozen: bool = False


class World:
    """The steps from a state, by two tables for one kind of transport; `broken` collects what is not safe."""

    def __init__(self, one_sided, sender, receiver):
        self.one_sided = one_sided
        self.tables = {"p": sender, "d": receiver}
        self.broken = []

    # --- a side takes an event ---

    def fire(self, c, side, event):
        row = self.tables[side].get((getattr(c, side), event))
        if row is None:
            return c  # late, doubled, or meant for another attempt: ignored
        state, actions = row
        c = c._replace(**{side: str(state)})
        for action in actions:
            c = self.act(c, side, str(action))
        return c

    def act(self, c, side, action):
        if action.startswith("say_"):
            out = "pd" if side == "p" else "dp"
            return c._replace(**{out: (*getattr(c, out), action[4:].upper())}) if c.up else c
        if action.startswith("report_"):
            return self.report(c, side, action[7:])
        if action == "free":
            return self.free(c, side)
        if action == "start_request":
            return self.start_request(c)
        if action == "start_writer":
            return c._replace(writer="run")
        if action == "stop_writer":
            return c._replace(writer="stopping") if c.writer == "run" else c
        assert action == "reserve"
        return c._replace(d_owns=True)

    def free(self, c, side):
        if not getattr(c, f"{side}_owns"):
            self.broken.append((c, f"{side} gives its blocks back twice"))
        return c._replace(**{f"{side}_owns": False})

    def report(self, c, side, outcome):
        if side == "d" and c.cancelled:
            return c
        if getattr(c, f"{side}_out"):
            self.broken.append((c, f"second outcome on {side}"))
        return c._replace(**{f"{side}_out": outcome})

    def start_request(self, c):
        if c.landed < PIECES:
            self.broken.append((c, "request starts before every byte is in"))
        if c.d_out:
            self.broken.append((c, f"request starts after it was {c.d_out}"))
        return c._replace(d_out="started")

    # --- what can happen next: (label, next state, kind) ---
    # kind is 'p', 'd' (a side's own doing), 'timeout_p', 'timeout_d', 'world' or 'fault'

    def steps(self, c):
        found = []
        if c.p != "DEAD" and not c.p_frozen:
            found += self.p_steps(c)
            found += self.writer_steps(c)
        if c.d != "DEAD":
            found += self.d_steps(c)
            found += self.router_steps(c)
            if not self.one_sided:
                found += self.reader_steps(c)
        found += self.node_faults(c)
        found += self.connection_faults(c)
        return [(label, after, kind) for label, after, kind in found if after != c]

    def p_steps(self, c):
        if c.dp:
            yield f"P gets {c.dp[0]}", self.fire(c._replace(dp=c.dp[1:]), "p", c.dp[0]), "p"
        if c.p not in P_END:
            cancelled = c._replace(p_out=c.p_out or "cancelled")
            yield "router cancels P", self.fire(cancelled, "p", "CANCEL"), "fault"
            yield "P times out", self.fire(c, "p", "TIMEOUT"), "timeout_p"
        if not c.up and not c.p_knows:
            yield "P learns that the session is lost", self.fire(c._replace(p_knows=True), "p", "PEER_LOST"), "p"

    def writer_steps(self, c):
        if c.writer == "run":
            if c.sent < PIECES and self.one_sided:
                yield "P writes a piece", c._replace(sent=c.sent + 1, landed=c.landed + 1), "p"
            elif c.sent < PIECES and c.data_up and not c.in_flight:  # one piece fills the pipe
                yield "P writes a piece", c._replace(sent=c.sent + 1, in_flight=1), "p"
            if c.sent == PIECES:
                yield "P has written all", self.fire(c._replace(writer="idle"), "p", "ALL_WRITTEN"), "p"
            if not c.data_up:
                yield "P's write fails", self.fire(c, "p", "WRITE_FAILED"), "p"
        if c.p == "DRAINING" and c.writer in ("stopping", "idle"):
            yield "P's writer is idle", self.fire(c._replace(writer="idle"), "p", "WRITER_IDLE"), "p"

    def d_steps(self, c):
        if c.pd:
            yield f"D gets {c.pd[0]}", self.fire(c._replace(pd=c.pd[1:]), "d", c.pd[0]), "d"
        if c.d == "PENDING":
            yield "D admits", self.fire(c, "d", "ADMIT"), "d"
        if c.d not in D_END:
            yield "D times out", self.fire(c, "d", "TIMEOUT"), "timeout_d"
        if not c.up and not c.d_knows:
            yield "D learns that the session is lost", self.fire(c._replace(d_knows=True), "d", "PEER_LOST"), "d"
        # A fence is P's exit, seen by the kernel, or P's word in a later session that its old writers are idle.
        word = not c.p_frozen and not c.up and c.p_knows and c.writer == "idle" and c.p == "CLOSED"
        if c.d == "QUARANTINED" and (c.p == "DEAD" or word):
            label = "fence: P is gone" if c.p == "DEAD" else "fence: P's word in a new session"
            yield label, self.fire(c, "d", "FENCED"), "d"

    def router_steps(self, c):
        if not c.called:
            # A call names P's session; if there is none, D learns that at once.
            yield "router calls D", self.fire(c._replace(called=True, d_knows=c.up), "d", "CALL"), "world"
        elif not c.d_out:
            cancelled = c._replace(d_out="cancelled", cancelled=True)
            yield "router cancels D", self.fire(cancelled, "d", "CANCEL"), "fault"

    def reader_steps(self, c):
        if c.in_flight and c.reader == "idle":
            read = c._replace(in_flight=c.in_flight - 1)
            if c.d in D_LIVE:
                yield "D starts to read a piece", read._replace(reader="in_piece"), "d"
            else:
                yield "D drops a piece", read, "d"
        if c.reader != "idle":
            ended = c._replace(landed=c.landed + 1, reader="idle")
            yield "D ends a piece", self.fire(ended, "d", "ALL_IN") if ended.landed == PIECES else ended, "d"
        if c.d == "STOPPING" and c.reader == "idle":
            yield "D's reader is idle", self.fire(c, "d", "READER_IDLE"), "d"
        if not c.data_up and not c.in_flight and c.reader == "idle" and c.landed < PIECES:
            yield "D sees the data connection fail", self.fire(c, "d", "DATA_FAILED"), "d"

    def node_faults(self, c):
        cut = self.cut(c)
        if c.p != "DEAD":
            dead = cut._replace(p="DEAD", writer="idle", p_owns=False, data_up=False, p_frozen=False)
            yield "P dies", dead, "fault"
            if c.p_frozen:
                yield "P thaws", c._replace(p_frozen=False), "world"
            else:
                yield "P freezes", c._replace(p_frozen=True), "fault"
        if c.d != "DEAD":
            yield "D dies", cut._replace(d="DEAD", d_owns=False, reader="idle", data_up=False), "fault"

    def connection_faults(self, c):
        yield "session lost", self.cut(c), "fault"
        if c.data_up and not self.one_sided:
            yield "data connection lost", c._replace(data_up=False), "fault"
            yield "data connection lost, with what was on its way", c._replace(data_up=False, in_flight=0), "fault"

    @staticmethod
    def cut(c):
        return c._replace(up=False, pd=(), dp=(), p_knows=False, d_knows=False) if c.up else c

    # --- safety ---

    def check(self, c):
        d_gave_back = c.d != "DEAD" and not c.d_owns
        unsafe = {
            "P can still write into blocks that D gave back": self.one_sided and c.writer != "idle" and d_gave_back,
            "D's reader writes into blocks that D gave back": c.reader != "idle" and d_gave_back,
            "P's writer reads blocks that P gave back": c.p != "DEAD" and c.writer != "idle" and not c.p_owns,
            "P is closed with blocks kept or without an outcome": c.p == "CLOSED" and (c.p_owns or not c.p_out),
            "D is closed with blocks kept or without an outcome": c.d == "CLOSED"
            and (c.d_owns or (c.called and not c.d_out)),
        }
        self.broken += [(c, why) for why, is_broken in unsafe.items() if is_broken]


def p_done(c):
    return c.p == "DEAD" or (c.p == "CLOSED" and not c.p_owns)


def d_done(c):
    return c.d in ("DEAD", "LANDED") or (c.d == "CLOSED" and not c.d_owns)


def is_lossless(c):
    return c.up and c.data_up and not c.p_frozen and "DEAD" not in (c.p, c.d)


# What every state must be able to reach by steps of the named kinds alone; the text says what it means if it cannot.
LIVENESS = [
    (
        "both sides cannot end without another fault",
        lambda c: p_done(c) and d_done(c),
        ("p", "d", "world", "timeout_p", "timeout_d"),
    ),
    (
        "they cannot end without a timeout, though nothing was lost or frozen",
        lambda c: (p_done(c) and d_done(c)) or not is_lossless(c),
        ("p", "d", "world"),
    ),
    (
        "they cannot end without a timeout, though both live and know what was lost",
        lambda c: (p_done(c) and d_done(c)) or c.p_frozen or not c.called or "DEAD" in (c.p, c.d),
        ("p", "d"),
    ),
    (
        "P cannot end alone without a timeout after it learned of the loss",
        lambda c: p_done(c) or c.p_frozen or c.up,
        ("p",),
    ),
    (
        "D cannot end alone, or know its blocks as quarantined, without a timeout after it learned of the loss",
        lambda c: d_done(c) or c.d in ("NONE", "QUARANTINED") or c.up,
        ("d",),
    ),
    (
        "D's request gets no outcome by D's own doing",
        lambda c: c.d == "DEAD" or not c.called or c.d_out,
        ("d", "timeout_d"),
    ),
    (
        "D keeps, uncounted, what nobody called for or a silent P may still write",
        lambda c: d_done(c) or c.d in ("NONE", "QUARANTINED"),
        ("d", "timeout_d"),
    ),
    (
        "P's transfer gets no outcome by P's own doing",
        lambda c: c.p == "DEAD" or c.p_frozen or c.p_out,
        ("p", "timeout_p"),
    ),
    ("P keeps its blocks for a silent D", lambda c: p_done(c) or c.p_frozen, ("p", "timeout_p")),
]


def explore(one_sided, sender, receiver, *, to_the_end=True):
    """All reachable states, each with how it was first reached; and what is broken, as (state, why).

    Not `to_the_end`: no further than the first state that is not safe.
    """
    world = World(one_sided, sender, receiver)
    seen, queue, graph = {State(): None}, deque([State()]), {}
    while queue:
        c = queue.popleft()
        world.check(c)
        if world.broken and not to_the_end:
            return seen, world.broken
        graph[c] = world.steps(c)
        for label, after, _kind in graph[c]:
            if after not in seen:
                seen[after] = (c, label)
                queue.append(after)
    for why, goal, kinds in LIVENESS:
        world.broken += [(c, why) for c in stuck(graph, goal, kinds)]
    return seen, world.broken


def stuck(graph, goal, kinds):
    """The states from which no steps of these kinds lead to the goal."""
    good, back = {c for c in graph if goal(c)}, {}
    for c, steps in graph.items():
        for _label, after, kind in steps:
            if kind in kinds:
                back.setdefault(after, []).append(c)
    queue = deque(good)
    while queue:
        for c in back.get(queue.popleft(), ()):
            if c not in good:
                good.add(c)
                queue.append(c)
    return [c for c in graph if c not in good]


def way(seen, state):
    """The shortest way to a state, in words."""
    labels = []
    while seen.get(state):
        state, label = seen[state]
        labels.append(label)
    return " -> ".join(reversed(labels))
