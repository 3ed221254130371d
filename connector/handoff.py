"""The hand-off as data: what each side of one transfer does when something happens, and nothing else.

P's side is one table. D's side is RECEIVER and, by kind of transport, TWO_SIDED (D's own reader puts the bytes into the
granted blocks) or ONE_SIDED (P writes into D's memory; D learns only what P says). `step` is pure: states and events
in, states and actions out. The sender and the receiver carry the actions out, and what comes of them is the next event.

`python -m kvrelay.connector.handoff` prints the tables as Mermaid diagrams.
"""

import sys
from collections.abc import Mapping
from enum import StrEnum, auto
from typing import TypeVar


class S(StrEnum):
    """P's states of a transfer."""

    OFFERED = "OFFERED"
    SENDING = "SENDING"  # granted: the writer may read the blocks
    DRAINING = "DRAINING"  # ended, and the writer has not left the blocks yet
    COMMITTED = "COMMITTED"
    CLOSED = "CLOSED"


class R(StrEnum):
    """D's states of a transfer."""

    NONE = "NONE"
    EARLY = "EARLY"  # offered, not called for
    WAITING = "WAITING"  # called for, not offered
    PENDING = "PENDING"  # both: waits for room
    GRANTED = "GRANTED"
    COMMIT_SEEN = "COMMIT_SEEN"
    BYTES_IN = "BYTES_IN"
    STOPPING = "STOPPING"  # two-sided: ended, and the reader has not left the blocks yet
    REVOKED = "REVOKED"  # one-sided: P was told to stop and has not said that it has
    QUARANTINED = "QUARANTINED"  # one-sided: P may still write, and nobody can say
    LANDED = "LANDED"
    CLOSED = "CLOSED"


class E(StrEnum):
    """What can happen to a transfer: messages, calls, and what the transports and clocks say."""

    OFFER = "OFFER"
    GRANT = "GRANT"
    REFUSE = "REFUSE"
    COMMIT = "COMMIT"
    ACK = "ACK"
    REVOKE = "REVOKE"
    END = "END"
    CALL = "CALL"  # the router has called D
    ADMIT = "ADMIT"  # D has room
    CANCEL = "CANCEL"
    TIMEOUT = "TIMEOUT"
    PEER_LOST = "PEER_LOST"
    ALL_WRITTEN = "ALL_WRITTEN"
    WRITE_FAILED = "WRITE_FAILED"
    WRITER_IDLE = "WRITER_IDLE"
    ALL_IN = "ALL_IN"
    DATA_FAILED = "DATA_FAILED"
    READER_IDLE = "READER_IDLE"
    FENCED = "FENCED"  # P can write no more: its word in a later session, or the kernel's


class A(StrEnum):
    """What a side does on its way to the next state."""

    SAY_GRANT = auto()
    SAY_REFUSE = auto()
    SAY_COMMIT = auto()
    SAY_ACK = auto()
    SAY_REVOKE = auto()
    SAY_END = auto()
    START_WRITER = auto()
    STOP_WRITER = auto()
    RESERVE = auto()  # the granted blocks belong to the transfer, and bytes may go into them
    FREE = auto()  # they may go back to the pool
    START_REQUEST = auto()  # they are the request's
    REPORT_DELIVERED = auto()
    REPORT_FAILED = auto()
    REPORT_UNKNOWN = auto()  # only D knows


State = TypeVar("State", S, R)
SenderRows = dict[tuple[S, E], tuple[S, tuple[A, ...]]]
ReceiverRows = dict[tuple[R, E], tuple[R, tuple[A, ...]]]

SENDER: SenderRows = {
    (S.OFFERED, E.GRANT): (S.SENDING, (A.START_WRITER,)),
    (S.OFFERED, E.REFUSE): (S.CLOSED, (A.FREE, A.REPORT_FAILED)),
    (S.OFFERED, E.CANCEL): (S.CLOSED, (A.SAY_END, A.FREE)),
    (S.OFFERED, E.TIMEOUT): (S.CLOSED, (A.SAY_END, A.FREE, A.REPORT_FAILED)),
    (S.OFFERED, E.PEER_LOST): (S.CLOSED, (A.FREE, A.REPORT_FAILED)),
    (S.SENDING, E.ALL_WRITTEN): (S.COMMITTED, (A.SAY_COMMIT,)),
    (S.SENDING, E.WRITE_FAILED): (S.DRAINING, (A.STOP_WRITER, A.REPORT_FAILED)),
    (S.SENDING, E.REVOKE): (S.DRAINING, (A.STOP_WRITER, A.REPORT_FAILED)),
    (S.SENDING, E.CANCEL): (S.DRAINING, (A.STOP_WRITER,)),
    (S.SENDING, E.TIMEOUT): (S.DRAINING, (A.STOP_WRITER, A.REPORT_FAILED)),
    (S.SENDING, E.PEER_LOST): (S.DRAINING, (A.STOP_WRITER, A.REPORT_FAILED)),
    (S.DRAINING, E.WRITER_IDLE): (S.CLOSED, (A.SAY_END, A.FREE)),
    (S.COMMITTED, E.ACK): (S.CLOSED, (A.FREE, A.REPORT_DELIVERED)),
    # COMMIT was P's last word: nothing more is written, so no END. From here on only D knows how it ends.
    (S.COMMITTED, E.REVOKE): (S.CLOSED, (A.FREE, A.REPORT_FAILED)),
    (S.COMMITTED, E.CANCEL): (S.CLOSED, (A.FREE,)),
    (S.COMMITTED, E.TIMEOUT): (S.CLOSED, (A.FREE, A.REPORT_UNKNOWN)),
    (S.COMMITTED, E.PEER_LOST): (S.CLOSED, (A.FREE, A.REPORT_UNKNOWN)),
}

RECEIVER: ReceiverRows = {
    (R.NONE, E.CALL): (R.WAITING, ()),
    (R.NONE, E.OFFER): (R.EARLY, ()),
    (R.EARLY, E.CALL): (R.PENDING, ()),
    (R.EARLY, E.TIMEOUT): (R.CLOSED, (A.SAY_REFUSE,)),
    (R.EARLY, E.END): (R.CLOSED, ()),
    (R.EARLY, E.PEER_LOST): (R.CLOSED, ()),
    (R.WAITING, E.OFFER): (R.PENDING, ()),
    (R.WAITING, E.CANCEL): (R.CLOSED, ()),
    (R.WAITING, E.TIMEOUT): (R.CLOSED, (A.REPORT_FAILED,)),
    (R.WAITING, E.PEER_LOST): (R.CLOSED, (A.REPORT_FAILED,)),
    (R.PENDING, E.ADMIT): (R.GRANTED, (A.RESERVE, A.SAY_GRANT)),
    (R.PENDING, E.CANCEL): (R.CLOSED, (A.SAY_REFUSE,)),
    (R.PENDING, E.TIMEOUT): (R.CLOSED, (A.SAY_REFUSE, A.REPORT_FAILED)),
    (R.PENDING, E.END): (R.CLOSED, (A.REPORT_FAILED,)),
    (R.PENDING, E.PEER_LOST): (R.CLOSED, (A.REPORT_FAILED,)),
    (R.CLOSED, E.CALL): (R.CLOSED, (A.REPORT_FAILED,)),
    (R.CLOSED, E.OFFER): (R.CLOSED, (A.SAY_REFUSE,)),
}

TWO_SIDED: ReceiverRows = {
    (R.GRANTED, E.COMMIT): (R.COMMIT_SEEN, ()),
    (R.GRANTED, E.ALL_IN): (R.BYTES_IN, ()),
    (R.BYTES_IN, E.COMMIT): (R.LANDED, (A.START_REQUEST, A.SAY_ACK)),
    (R.COMMIT_SEEN, E.ALL_IN): (R.LANDED, (A.START_REQUEST, A.SAY_ACK)),
    (R.GRANTED, E.END): (R.STOPPING, (A.REPORT_FAILED,)),
    (R.BYTES_IN, E.END): (R.STOPPING, (A.REPORT_FAILED,)),
    (R.GRANTED, E.DATA_FAILED): (R.STOPPING, (A.SAY_REVOKE, A.REPORT_FAILED)),
    (R.COMMIT_SEEN, E.DATA_FAILED): (R.STOPPING, (A.SAY_REVOKE, A.REPORT_FAILED)),
    (R.GRANTED, E.CANCEL): (R.STOPPING, (A.SAY_REVOKE,)),
    (R.COMMIT_SEEN, E.CANCEL): (R.STOPPING, (A.SAY_REVOKE,)),
    (R.BYTES_IN, E.CANCEL): (R.STOPPING, (A.SAY_REVOKE,)),
    (R.GRANTED, E.TIMEOUT): (R.STOPPING, (A.SAY_REVOKE, A.REPORT_FAILED)),
    (R.COMMIT_SEEN, E.TIMEOUT): (R.STOPPING, (A.SAY_REVOKE, A.REPORT_FAILED)),
    (R.BYTES_IN, E.TIMEOUT): (R.STOPPING, (A.SAY_REVOKE, A.REPORT_FAILED)),
    (R.GRANTED, E.PEER_LOST): (R.STOPPING, (A.REPORT_FAILED,)),
    (R.COMMIT_SEEN, E.PEER_LOST): (R.STOPPING, (A.REPORT_FAILED,)),
    (R.BYTES_IN, E.PEER_LOST): (R.STOPPING, (A.REPORT_FAILED,)),
    # New pieces go to scratch from here on; the blocks go back when the reader has left the piece it is in.
    (R.STOPPING, E.READER_IDLE): (R.CLOSED, (A.FREE,)),
}

ONE_SIDED: ReceiverRows = {
    (R.GRANTED, E.COMMIT): (R.LANDED, (A.START_REQUEST, A.SAY_ACK)),
    (R.GRANTED, E.END): (R.CLOSED, (A.FREE, A.REPORT_FAILED)),
    (R.GRANTED, E.CANCEL): (R.REVOKED, (A.SAY_REVOKE,)),
    (R.GRANTED, E.TIMEOUT): (R.REVOKED, (A.SAY_REVOKE, A.REPORT_FAILED)),
    (R.GRANTED, E.PEER_LOST): (R.QUARANTINED, (A.REPORT_FAILED,)),
    (R.REVOKED, E.END): (R.CLOSED, (A.FREE,)),
    (R.REVOKED, E.COMMIT): (R.CLOSED, (A.FREE,)),
    (R.REVOKED, E.TIMEOUT): (R.QUARANTINED, ()),  # P is silent: count it, show it, wait for its word or its end
    (R.REVOKED, E.PEER_LOST): (R.QUARANTINED, ()),
    (R.QUARANTINED, E.END): (R.CLOSED, (A.FREE,)),
    (R.QUARANTINED, E.COMMIT): (R.CLOSED, (A.FREE,)),
    (R.QUARANTINED, E.FENCED): (R.CLOSED, (A.FREE,)),
}


def receiver_table(one_sided: bool) -> ReceiverRows:
    """D's whole table for one kind of transport."""
    return RECEIVER | (ONE_SIDED if one_sided else TWO_SIDED)


def step(
    table: Mapping[tuple[State, E], tuple[State, tuple[A, ...]]], state: State, event: E
) -> tuple[State, tuple[A, ...]]:
    """The next state, and what to do. A pair that the table does not list is ignored: late, doubled, or not meant."""
    return table.get((state, event), (state, ()))


def render_mermaid() -> str:
    """The tables as Mermaid state diagrams, one for P and one for each kind of D."""
    sections = [
        _section("P, the sender", SENDER, S.OFFERED),
        _section("D, the receiver: two-sided transports (tcp, zmq, ucx)", receiver_table(one_sided=False), R.NONE),
        _section("D, the receiver: one-sided transports (shm, inproc)", receiver_table(one_sided=True), R.NONE),
    ]
    return "\n\n".join(sections)


def _section(title: str, table: Mapping[tuple[State, E], tuple[State, tuple[A, ...]]], start: State) -> str:
    lines: list[str] = [f"### {title}", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {start}"]
    for (state, event), (target, actions) in table.items():
        done = f" / {', '.join(action.value for action in actions)}" if actions else ""
        lines.append(f"    {state} --> {target}: {event}{done}")
    return "\n".join([*lines, "```"])


if __name__ == "__main__":
    sys.stdout.write(render_mermaid() + "\n")
