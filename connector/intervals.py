"""Which bytes of a run have come: half-open intervals, merged."""

from bisect import bisect_left, bisect_right


class Intervals:
    """A set of integers, kept as sorted, disjoint, not touching [start, end)."""

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> int:
        """Add [start, end); how many of them were not there before."""
        if start >= end:
            return 0
        first = bisect_left(self._ends, start)  # the first interval that touches or follows
        last = bisect_right(self._starts, end)
        merged_start, merged_end, covered = start, end, 0
        if first < last:
            merged_start = min(start, self._starts[first])
            merged_end = max(end, self._ends[last - 1])
            covered = sum(e - s for s, e in zip(self._starts[first:last], self._ends[first:last], strict=True))
        self._starts[first:last] = [merged_start]
        self._ends[first:last] = [merged_end]
        num_new = merged_end - merged_start - covered
        self.total += num_new
        return num_new
