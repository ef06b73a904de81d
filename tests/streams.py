"""A stream of `auto` whose choices do not hang on how fast this machine is."""

from __future__ import annotations

from ssd_runtime.drafting.lookup import LookupStats
from ssd_runtime.planning.auto.stream import PlanningTime, Stream
from ssd_runtime.planning.auto.verify_stats import VerifyStats


class AsTheTable(VerifyStats):
    """Every step takes what the latency table says."""

    def update(self, rows: int, seconds: float, cost: float) -> None:
        """Take in the table's figure instead of the clock's."""
        VerifyStats.update(self, rows, 0.01 * cost, cost)


class Free(PlanningTime):
    """Planning takes no time."""

    def update(self, seconds: float) -> float:
        """Take in nothing."""
        return 0.0


def stream_by_the_table(lookup: LookupStats | None = None) -> Stream:
    """A new stream that uses a latency table alone."""
    return Stream(lookup or LookupStats(), planning=Free(), verify=AsTheTable())
