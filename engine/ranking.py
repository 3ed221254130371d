"""The order of service, and who gives way to whom. Pure.

    score = arrival + priority * ageing_s, lowest first      ageing_s = 60
        priority 0, arrived at 100   ->  100
        priority 1, arrived at  30   ->   90   has waited 70 s longer: before it
        priority 1, arrived at 100   ->  160   behind whatever of priority 0 arrives in the next minute

A rank never changes, so the queues stay sorted, and nobody waits for ever: what arrives late enough ranks behind
everything that is there, whatever its priority.
"""

from dataclasses import dataclass

from kvrelay.engine.request import RequestKey, Sequence

_NS_PER_S = 1_000_000_000

Rank = tuple[int, int, float, RequestKey, int]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ranks of one node's sequences."""

    ageing_s: float  # so much longer a wait makes up for a priority one lower; 0: no wait ever does

    def rank(self, sequence: Sequence) -> Rank:
        """Lowest first. Total: no two sequences share one.

        In whole nanoseconds: no priority is so large that an arrival is lost beside it, as it would be in a float.
        """
        request = sequence.request
        score = request.priority
        if self.ageing_s > 0:
            score = round(request.arrival * _NS_PER_S) + request.priority * round(self.ageing_s * _NS_PER_S)
        return (score, request.priority, request.arrival, request.key, sequence.choice)

    def may_displace(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether one that waits may have another preempted: only of lower priority, and below it in rank still.

        Equals never displace each other, so nobody is preempted by whom it had preempted.
        """
        return running.request.priority > waiting.request.priority and self.rank(running) > self.rank(waiting)
