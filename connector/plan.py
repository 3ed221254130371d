"""Where a grant's bytes lie, by absolute position: checks, and the copies that a push makes due. Pure.

Nothing here counts blocks from either end: a block is named by the tokens it holds, on both sides.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvrelay.connector.base import GrantPlan, Handover, TokenRange
from kvrelay.connector.transit import Transit
from kvrelay.connector.transport.base import Copy
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.kv_layout import KVLayout, blocks_for


def check_plan(plan: GrantPlan, num_tokens: int, block_size: int) -> None:
    """Raises: InvalidArgument unless the ranges lie in order within the prompt, on block boundaries, with a block of
    their own for each block of tokens."""
    position = 0
    for granted in plan.ranges:
        if granted.start % block_size or granted.start < position:
            raise InvalidArgument("range.start", granted.start, "must be on a block boundary, in order")
        if not granted.start < granted.end <= num_tokens:
            raise InvalidArgument("range.end", granted.end, f"must be in ({granted.start}, {num_tokens}]")
        if granted.end % block_size and granted.end != num_tokens:
            raise InvalidArgument("range.end", granted.end, "must be on a block boundary, or the prompt's end")
        if len(granted.block_ids) != blocks_for(granted.end - granted.start, block_size):
            raise InvalidArgument("block_ids", len(granted.block_ids), "must be one for each block of the range")
        position = granted.end
    block_ids = plan_block_ids(plan)
    if len(set(block_ids)) != len(block_ids):
        raise InvalidArgument("block_ids", block_ids, "must differ from each other")


def plan_block_ids(plan: GrantPlan) -> tuple[int, ...]:
    """D's blocks in the order of the grant's run of bytes."""
    return tuple(block_id for granted in plan.ranges for block_id in granted.block_ids)


def plan_positions(plan: GrantPlan, block_size: int) -> tuple[int, ...]:
    """For each block of the run: which block of the prompt it is."""
    return tuple(granted.start // block_size + i for granted in plan.ranges for i in range(len(granted.block_ids)))


@dataclass(frozen=True, slots=True)
class _Place:
    index: int  # among the grant's blocks
    target_block: int


class PushPlan:
    """What of one offered prompt may be read, what of it is wanted, and what is both and not yet written."""

    def __init__(self, block_ids: tuple[int, ...], num_tokens: int, layout: KVLayout) -> None:
        if len(block_ids) != blocks_for(num_tokens, layout.block_size):
            raise InvalidArgument("block_ids", len(block_ids), f"must hold {num_tokens} tokens exactly")
        self._block_ids = block_ids
        self._num_tokens = num_tokens
        self._layout = layout
        self._layer_bytes = layout.block_bytes // layout.num_layers
        self._due = [0] * len(block_ids)  # for each block a bit a layer: final, and not handed to the writer
        self._pushed = [0] * len(block_ids)
        self._changed: set[int] = set()  # blocks with something due
        self._places: dict[int, _Place] | None = None  # of the wanted blocks, by block of the prompt
        self.num_granted_bytes = 0

    def push(self, tokens: TokenRange, layers: range | None) -> None:
        """These tokens' KV in these layers is final. What was pushed before is not sent again."""
        block_size, num_layers = self._layout.block_size, self._layout.num_layers
        first, end = tokens.start // block_size, blocks_for(tokens.end, block_size)
        if tokens.start % block_size or (tokens.end % block_size and tokens.end != self._num_tokens):
            raise InvalidArgument("tokens", (tokens.start, tokens.end), "must lie on block boundaries")
        layers = range(num_layers) if layers is None else layers
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= num_layers:
            raise InvalidArgument("layers", layers, f"must lie in range({num_layers})")
        mask = (1 << layers.stop) - (1 << layers.start)
        for i in range(first, end):
            self._due[i] |= mask & ~self._pushed[i]
            self._pushed[i] |= mask
            self._changed.add(i)

    def with_digests(self, handover: Handover) -> Handover:
        """What COMMIT says: the engine's digests are of its own blocks, which are D's too."""
        return handover

    def is_final(self, tokens: TokenRange) -> bool:
        """Whether these tokens have been pushed in all layers."""
        blocks = range(tokens.start // self._layout.block_size, blocks_for(tokens.end, self._layout.block_size))
        return all(self._pushed[i] == (1 << self._layout.num_layers) - 1 for i in blocks)

    def grant(self, plan: GrantPlan) -> None:
        """Only these are wanted.

        Raises: InvalidArgument.
        """
        check_plan(plan, self._num_tokens, self._layout.block_size)
        targets = plan_block_ids(plan)
        positions = plan_positions(plan, self._layout.block_size)
        self._places = {positions[i]: _Place(i, target) for i, target in enumerate(targets)}
        self.num_granted_bytes = len(targets) * self._layout.block_bytes

    def take_due(self) -> list[Copy]:
        """The copies that have become possible since the last call."""
        if self._places is None:
            return []
        copies = []
        for i in sorted(self._changed & self._places.keys()):
            place = self._places[i]
            for start, end in _runs(self._due[i]):
                copies.append(
                    Copy(
                        self._block_ids[i],
                        place.target_block,
                        place.index,
                        start * self._layer_bytes,
                        (end - start) * self._layer_bytes,
                    )
                )
            self._due[i] = 0
        self._changed.clear()
        return copies


@dataclass(slots=True)
class Recast(Copy):
    """A copy whose source has to be made first, of `tokens` in P's blocks `sources`; until then it has none, -1."""

    sources: tuple[int, ...]
    tokens: TokenRange
    digests: list[bytes] | None = None  # whoever makes it puts the digest of what travels here, at `index`


class RecastPlan:
    """As PushPlan, where D's blocks have to be made of P's: one is due when its tokens are final in all layers."""

    def __init__(self, block_ids: tuple[int, ...], num_tokens: int, transit: Transit, *, digests: bool) -> None:
        if len(block_ids) != blocks_for(num_tokens, transit.source.block_size):
            raise InvalidArgument("block_ids", len(block_ids), f"must hold {num_tokens} tokens exactly")
        self._block_ids = block_ids
        self._num_tokens = num_tokens
        self._transit = transit
        self._pushed = PushPlan(block_ids, num_tokens, transit.source)
        self._missing: list[Recast] | None = None  # granted, and not handed to the writer; in order of position
        self._digests: list[bytes] | None = [] if digests else None  # of each granted block, once it has been made
        self.num_granted_bytes = 0

    def push(self, tokens: TokenRange, layers: range | None) -> None:
        """These tokens' KV in these layers is final. What was pushed before is not sent again."""
        self._pushed.push(tokens, layers)

    def grant(self, plan: GrantPlan) -> None:
        """Only these are wanted.

        Raises: InvalidArgument.
        """
        size = self._transit.target.block_size
        check_plan(plan, self._num_tokens, size)
        targets, positions = plan_block_ids(plan), plan_positions(plan, size)
        if self._digests is not None:
            self._digests += [b""] * len(targets)
        self._missing = [self._recast(i, targets[i], position) for i, position in enumerate(positions)]
        self.num_granted_bytes = len(targets) * self._transit.block_bytes

    def take_due(self) -> list[Recast]:
        """The copies that have become possible since the last call."""
        due: list[Recast] = []
        missing: list[Recast] = []
        for recast in self._missing or ():
            (due if self._pushed.is_final(recast.tokens) else missing).append(recast)
        if due:
            self._missing = missing
        return due

    def with_digests(self, handover: Handover) -> Handover:
        """What COMMIT says once all is written: digests of what travelled, in the grant's order."""
        return replace(handover, block_digests=tuple(self._digests or ()))

    def _recast(self, index: int, target_block: int, position: int) -> Recast:
        start = position * self._transit.target.block_size
        tokens = TokenRange(start, min(start + self._transit.target.block_size, self._num_tokens))
        size = self._transit.source.block_size
        sources = self._block_ids[tokens.start // size : blocks_for(tokens.end, size)]
        return Recast(-1, target_block, index, 0, self._transit.block_bytes, sources, tokens, self._digests)


def _runs(mask: int) -> Iterator[tuple[int, int]]:
    """The [start, end) of each run of set bits."""
    position = 0
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        position += skipped
        length = (~mask & (mask + 1)).bit_length() - 1
        yield position, position + length
        mask >>= length
        position += length
