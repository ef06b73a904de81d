"""What a comparison's rows say of each contender: speed against a baseline with its interval, and how it came about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.harness.ledger import NOT_COMPARED, Row
from ssd_profiles.formulas import expected_speedup
from ssd_profiles.intervals import speedup, speedup_interval

FEWEST = 3
"""Prompts that make an interval: of two it is as soon a thousand wide as one."""


def standings(rows: Sequence[Row], baselines: Sequence[str]) -> dict[str, Any]:
    """Figures of every contender, overall and by category.

    Each has `tokens_per_second`, `against` (a baseline's name to ratio and 95% interval over prompts), and, where
    drafts were made, how measured speed compares with the formulas.
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
    tokens, seconds = sum(row.counted for row in mine), sum(row.seconds for row in mine)
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
    """How many times as fast as `base`: each prompt's time per token, weighted by its tokens.

    With `low` and `high`, the interval, where there are as many prompts as `FEWEST`.
    """
    base_seconds, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    for one, other in paired(rows, base, name):
        # Repeats of a prompt are no further prompts: the interval is over prompts.
        base_seconds[one.prompt] += one.seconds
        # Outputs that differ differ in length: the time for as many tokens as the baseline's.
        seconds[one.prompt] += other.seconds / other.counted * one.counted
    if not seconds:
        return None
    plain, ours = list(base_seconds.values()), list(seconds.values())
    interval = speedup_interval(plain, ours) if len(plain) >= FEWEST else None
    return {"speedup": speedup(plain, ours)} | (dict(zip(("low", "high"), interval, strict=True)) if interval else {})


def paired(rows: Sequence[Row], base: str, name: str) -> list[tuple[Row, Row]]:
    """The rows of `base` and of `name` for the same prompt in the same repeat, of those that have any tokens."""
    bases = {(row.prompt, row.repeat): row for row in rows if row.contender == base and row.counted > 0}
    return [
        (bases[row.prompt, row.repeat], row)
        for row in rows
        if row.contender == name and row.counted > 0 and (row.prompt, row.repeat) in bases
    ]


def _drafting(rows: Sequence[Row], plain: Sequence[Row]) -> dict[str, Any]:
    """M, alpha, measured costs c and v of drafting cycles, and the speed-up that the formulas make of them."""
    total = {key: sum(row.cycles.get(key, 0.0) for row in rows) for key in rows[0].cycles} if rows else {}
    steps = sum(row.cycles.get("plain_steps", 0.0) for row in plain)
    planning = total.get("plan_seconds", 0.0) / max(1e-9, sum(row.seconds for row in rows))
    if not total.get("accepted") or not steps:
        return {"share_planning": planning} if total else {}
    step = sum(row.cycles.get("plain_seconds", 0.0) for row in plain) / steps
    m, alpha = total["draft_tokens"] / total["drafts"], total["accepted"] / total["drafted"]
    c, v = total["draft_seconds"] / total["drafted"] / step, total["verify_seconds"] / total["drafts"] / step
    # The formulas' alpha stands for draft steps a cycle; accepted siblings of a tree, which M counts, are in it.
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
