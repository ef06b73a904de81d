"""Standings computed from a comparison's rows: speed against baselines with intervals, and draft statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.harness.ledger import NOT_COMPARED, Row
from ssd_profiles.formulas import expected_speedup
from ssd_profiles.intervals import speedup, speedup_interval

FEWEST = 3
"""Fewest prompts for which an interval is given. With two, Student's t makes it absurdly wide."""
ROUNDING = 1e-9
"""Ratios that differ by less are equal: plain decoding is never slower than itself."""


def standings(rows: Sequence[Row], baselines: Sequence[str]) -> dict[str, Any]:
    """Compute the figures of every contender, overall and by category.

    They are `tokens_per_second`, `against` (from a baseline's name to ratio and 95% interval over prompts), and for
    contenders that draft, the measured speed beside the formulas'.
    """
    names = list(dict.fromkeys(row.contender for row in rows))
    categories = sorted({row.category for row in rows})
    return {
        name: {
            "overall": _figures(rows, name, baselines),
            "categories": {
                category: _figures([row for row in rows if row.category == category], name, baselines)
                for category in categories
            },
        }
        for name in names
    }


def _figures(rows: Sequence[Row], name: str, baselines: Sequence[str]) -> dict[str, Any]:
    mine = [row for row in rows if row.contender == name]
    tokens = sum(row.counted for row in mine)
    seconds = sum(row.seconds for row in mine)
    return {
        "prompts": len(mine),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else None,
        "first_seconds": sum(row.first_seconds for row in mine) / max(1, len(mine)),
        "compared": sum(row.divergence != NOT_COMPARED for row in mine),
        "identical": sum(row.divergence == "none" for row in mine),
        "near_tie": sum(row.divergence == "near_tie" for row in mine),
        "error": sum(row.divergence == "error" for row in mine),
        "against": {base: against(rows, base, name) for base in baselines},
        **_drafting(mine, [row for row in rows if row.contender == "plain"]),
    }


def against(rows: Sequence[Row], base: str, name: str) -> dict[str, float] | None:
    """Speed of `name` ÷ speed of `base`, as each prompt's time per token weighted by the base's tokens.

    The interval `low`, `high` is included from `FEWEST` prompts on. `minimum` is the slowest prompt's ratio, and
    `share_below_1` the share of prompts that became slower.
    """
    base_seconds = defaultdict[str, float](float)
    seconds = defaultdict[str, float](float)
    for one, other in paired(rows, base, name):
        # Repeats are summed per prompt, because the interval is over prompts.
        base_seconds[one.prompt] += one.seconds
        # Diverging outputs differ in length, so the time is scaled to the baseline's number of tokens.
        seconds[one.prompt] += other.seconds / other.counted * one.counted
    if not seconds:
        return None
    plain = list(base_seconds.values())
    ours = list(seconds.values())
    interval = speedup_interval(plain, ours) if len(plain) >= FEWEST else None
    ratios = [one / other for one, other in zip(plain, ours, strict=True)]
    return {
        "speedup": speedup(plain, ours),
        **(dict(zip(("low", "high"), interval, strict=True)) if interval else {}),
        "minimum": min(ratios),
        "share_below_1": sum(ratio < 1.0 - ROUNDING for ratio in ratios) / len(ratios),
    }


def paired(rows: Sequence[Row], base: str, name: str) -> list[tuple[Row, Row]]:
    """Pairs of rows of `base` and `name` for the same prompt and repeat, without rows that have no tokens."""
    bases = {(row.prompt, row.repeat): row for row in rows if row.contender == base and row.counted > 0}
    return [
        (bases[row.prompt, row.repeat], row)
        for row in rows
        if row.contender == name and row.counted > 0 and (row.prompt, row.repeat) in bases
    ]


def _drafting(rows: Sequence[Row], plain: Sequence[Row]) -> dict[str, Any]:
    """M, alpha, the measured costs c and v of drafting cycles, and the formulas' speed-up from these."""
    total = {key: sum(row.cycles.get(key, 0.0) for row in rows) for key in rows[0].cycles} if rows else {}
    steps = sum(row.cycles.get("plain_steps", 0.0) for row in plain)
    planning = total.get("plan_seconds", 0.0) / max(1e-9, sum(row.seconds for row in rows))
    if not total.get("accepted") or not steps:
        return {"share_planning": planning} if total else {}
    step = sum(row.cycles.get("plain_seconds", 0.0) for row in plain) / steps
    m = total["draft_tokens"] / total["drafts"]
    alpha = total["accepted"] / total["drafted"]
    c = total["draft_seconds"] / total["drafted"] / step
    v = total["verify_seconds"] / total["drafts"] / step
    # The formulas' alpha stands for draft steps per cycle, and M includes accepted siblings of trees.
    a = (m - 1.0) * total["drafts"] / total["drafted"]
    return {
        "mean_acceptance_length": m,
        "draft_acceptance_rate": alpha,
        "draft_cost": c,
        "verify_cost": v,
        "share_planning": planning,
        "skipped_attention": total["skipped_attention"] / total["drafts"],
        "skipped_mlp": total["skipped_mlp"] / total["drafts"],
        "share_of_tokens_drafted": total["draft_tokens"] / sum(row.tokens for row in rows),
        "expected_speedup": expected_speedup(m, a, c),
        "expected_speedup_with_verification": expected_speedup(m, a, c, v),
    }
