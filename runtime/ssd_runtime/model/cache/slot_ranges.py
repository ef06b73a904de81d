"""Contiguous ranges of numbered slots."""

from __future__ import annotations

from bisect import bisect_left


class SlotRanges:
    """The free ranges of slots 0, …, `size` - 1, allocated first fit; freed ranges merge with their neighbours."""

    def __init__(self, size: int = 0) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []
        """Ranges [begin, end), ascending and never adjacent."""
        self.grow(size)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return sum(end - begin for begin, end in self._free)

    @property
    def longest(self) -> int:
        """Length of the longest free range."""
        return max((end - begin for begin, end in self._free), default=0)

    def grow(self, size: int) -> None:
        """Add slots at the end until there are `size`."""
        if size > self.size:
            begin = self.size
            self.size = size
            self.give_back(begin, size)

    def take(self, count: int) -> int | None:
        """Allocate `count` consecutive slots; returns the first of them, or None if no free range is long enough."""
        for place, (begin, end) in enumerate(self._free):
            if end - begin >= count:
                self._free[place : place + 1] = [(begin + count, end)] if end - begin > count else []
                return begin
        return None

    def extend(self, end: int, count: int) -> bool:
        """Allocate the `count` slots from `end` on; returns whether they were free."""
        for place, (begin, last) in enumerate(self._free):
            if begin == end and last - begin >= count:
                self._free[place : place + 1] = [(begin + count, last)] if last - begin > count else []
                return True
        return False

    def give_back(self, begin: int, end: int) -> None:
        """Free the slots `begin`, …, `end` - 1."""
        if begin >= end:
            return
        place = bisect_left(self._free, (begin, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == begin:
            place -= 1
            begin = self._free.pop(place)[0]
        self._free.insert(place, (begin, end))
