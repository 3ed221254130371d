"""What each transport has moved, as one half of the connector counts it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Since the start. Bytes whose transfer had ended when they were counted are in no transport's."""

    num_landed: int = 0  # transfers; delivered, on P
    num_bytes: int = 0


class TrafficCount:
    """Traffic by transport. Belongs to whoever holds its half's lock."""

    def __init__(self) -> None:
        self._traffic: dict[str, Traffic] = {}

    def add(self, transport: str, *, num_landed: int = 0, num_bytes: int = 0) -> None:
        old = self._traffic.get(transport, Traffic())
        self._traffic[transport] = Traffic(old.num_landed + num_landed, old.num_bytes + num_bytes)

    def snapshot(self) -> dict[str, Traffic]:
        return dict(self._traffic)
