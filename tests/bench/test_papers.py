"""The page of the papers, from what comparisons have written."""

from __future__ import annotations

from bench.ledger import Row
from bench.papers import CASES, page
from bench.standings import standings
from ssd_runtime.strategies import check_strategy, read_settings


def test_every_case_names_strategies_and_parameters_that_there_are() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        for contender in case.contenders:
            name, *assignments = contender.format(first=case.first).split("+")
            check_strategy(name, has_bundle=True)
            read_settings(name, assignments)


def test_the_page_states_speed_interval_and_wrong_outputs() -> None:
    cycles = {
        "forwards": 5,
        "drafts": 4,
        "drafted": 20,
        "accepted": 16,
        "draft_tokens": 20,
        "draft_seconds": 0.5,
        "verify_seconds": 0.4,
        "skipped_attention": 40,
        "skipped_mlp": 20,
        "plan_seconds": 0.01,
        "plain_steps": 1,
        "plain_seconds": 0.1,
    }
    plain = {**dict.fromkeys(cycles, 0), "plain_steps": 20, "plain_seconds": 2.0}
    rows = [
        Row(str(i), "a", name, 0, divergence, 21, 0.1, seconds, 20, found)
        for i in range(4)
        for name, divergence, seconds, found in (("plain", "none", 2.0, plain), ("swift", "error", 1.0, cycles))
    ]
    device = {"device": "A CPU", "threads": 2, "torch": "2.13", "dtype": "float32"}
    settings = {"device": device, "prompts": ["some.jsonl", 4], "max_new_tokens": 21}
    text = page({CASES[0]: {"settings": settings, "standings": standings(rows, ["plain"])}})
    assert CASES[0].make in text
    assert "| `swift` | **2.00** (2.00–2.00) | 5.00 | 0.80 | 0.25 | 1.00 |" in text
    assert "10 + 5" in text
    assert "4 WRONG" in text
