"""The two halves of a measured transfer, over the product's own sender and receiver. Times are CLOCK_MONOTONIC's, which
all processes of a host share."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.connector.base import (
    Expectation,
    Failed,
    GrantedRange,
    GrantPlan,
    Handover,
    Landed,
    Offer,
    Offered,
    Released,
    SessionLost,
    SessionUp,
    TokenRange,
    TransferEvent,
)
from kvrelay.connector.bench_blocks import BLOCK_SIZE
from kvrelay.connector.checksum import token_digest
from kvrelay.connector.receiver import Receiver
from kvrelay.connector.sender import Sender
from kvrelay.engine.errors import Internal
from kvrelay.engine.request import OutputToken, RequestKey

P_EPOCH, D_EPOCH = "bench-prefill", "bench-decode"
SECRET = "bench"
_DIGEST = token_digest([1])
_PATIENCE_S = 60.0
_LOOK_S = 0.0002  # between two looks for the grant, before the clock runs
FOREVER = float("inf")


class Woken:
    """Waits for a half's events."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set

    def until(
        self,
        events: Callable[[], list[TransferEvent]],
        take: Callable[[TransferEvent], bool],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Give `take` each event until it has what it wants. Raises: Internal if that takes too long."""
        deadline = time.monotonic() + patience_s
        while True:
            self._event.clear()
            is_done = False
            for event in events():
                is_done = take(event) or is_done
            if is_done:
                return
            if not self._event.wait(deadline - time.monotonic()):
                raise Internal(f"nothing came of a transfer in {patience_s:g} s")


@dataclass(frozen=True, slots=True)
class Sent:
    """What P knows of transfers: when it began to push each, and its CPU time from there to the last one's end."""

    begun_ns: list[int]
    cpu_s: float


class PrefillSide:
    """P, without an engine."""

    def __init__(self, sender: Sender, woken: Woken) -> None:
        self._sender = sender
        self._woken = woken

    def connect(self, address: str) -> None:
        self._sender.connect(D_EPOCH, address)
        self._woken.until(self._sender.events, _is_up)

    def send(self, names: Sequence[str], block_ids: Sequence[int]) -> Sent:
        """Transfers of all of these blocks, one after the other."""
        begun_ns, cpu_s = [], 0.0
        for name in names:
            key, num_tokens = RequestKey(name, 0), len(block_ids) * BLOCK_SIZE
            self._sender.offer(
                Offer(
                    key=key,
                    peer_epoch=D_EPOCH,
                    num_tokens=num_tokens,
                    token_digest=_DIGEST,
                    block_ids=tuple(block_ids),
                    deadline=FOREVER,
                )
            )
            self._wait_for_grant()
            cpu_before = time.process_time()
            begun_ns.append(time.monotonic_ns())
            self._sender.push(key, TokenRange(0, num_tokens))
            self._sender.commit(key, Handover(first_tokens=(OutputToken(choice=0, token_id=1),)))
            self._woken.until(self._sender.events, lambda event: isinstance(_sound(event), Released))
            cpu_s += time.process_time() - cpu_before
        return Sent(begun_ns, cpu_s)

    def _wait_for_grant(self) -> None:
        pause = threading.Event()
        deadline = time.monotonic() + _PATIENCE_S
        while "SENDING" not in self._sender.statistics().states:
            if time.monotonic() > deadline:
                raise Internal("no grant came")
            pause.wait(_LOOK_S)

    def close(self) -> None:
        self._sender.close()


@dataclass(frozen=True, slots=True)
class Received:
    """What D knows of transfers: when it heard that each has landed, and its CPU time meanwhile."""

    landed_ns: list[int]
    cpu_s: float


class DecodeSide:
    """D, without an engine."""

    def __init__(self, receiver: Receiver, woken: Woken) -> None:
        self._receiver = receiver
        self._woken = woken

    @property
    def address(self) -> str:
        return self._receiver.address()

    def wait_for_session(self) -> None:
        self._woken.until(self._receiver.events, _is_up)

    def receive(
        self,
        names: Sequence[str],
        num_tokens: int,
        block_ids: Sequence[int],
        digest: bytes = _DIGEST,
        patience_s: float = _PATIENCE_S,
    ) -> Received:
        """Take transfers of prompts of so many tokens into these blocks; no blocks: D has the prompt already."""
        keys = [RequestKey(name, 0) for name in names]
        ranges = (GrantedRange(0, num_tokens, tuple(block_ids)),) if block_ids else ()
        plan, landed_ns = GrantPlan(ranges), list[int]()

        def take(event: TransferEvent) -> bool:
            if isinstance(event, Offered):
                self._receiver.grant(event.key, plan)
            elif isinstance(_sound(event), Landed):
                landed_ns.append(time.monotonic_ns())
            return len(landed_ns) == len(keys)

        cpu_before = time.process_time()
        for key in keys:
            self._receiver.expect(
                Expectation(key=key, peer_epoch=P_EPOCH, num_tokens=num_tokens, token_digest=digest, deadline=FOREVER)
            )
        self._woken.until(self._receiver.events, take, patience_s)
        return Received(landed_ns, time.process_time() - cpu_before)

    def close(self) -> None:
        self._receiver.close()


def _is_up(event: TransferEvent) -> bool:
    if isinstance(event, SessionLost):
        raise Internal(f"no session: {event.reason}")
    return isinstance(event, SessionUp)


def _sound(event: TransferEvent) -> TransferEvent:
    """Raises: Internal for an end that a benchmark cannot go on from."""
    if isinstance(event, Failed | SessionLost):
        raise Internal(f"a transfer failed: {event.reason}")
    return event
