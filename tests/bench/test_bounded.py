"""SpecBound's eq. 5 beside priced speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness.ledger import Row
from bench.papers.tools.bounded import formula_beside_price, token_agreement
from ssd_profiles.formulas import bounded_speedup, expected_tokens

EXIT = "exit+depth=0.5+width=8+threshold=0.55+annealing=0.2"


@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_the_agreement_is_that_of_which_so_many_tokens_are_accepted(agreement: float, length: int) -> None:
    assert token_agreement(length, expected_tokens(agreement, length) - 1.0) == pytest.approx(agreement, abs=1e-6)


def row(contender: str, seconds: float, **cycles: float) -> Row:
    counts = {"drafts": 0.0, "drafted": 0.0, "accepted": 0.0, **cycles}
    return Row(
        "a", "all", contender, 0, "none", tokens=21, first_seconds=0.0, seconds=seconds, counted=20, cycles=counts
    )


def test_a_line_has_the_formula_for_the_contenders_own_bounds_and_its_speed() -> None:
    rows = [
        row("plain", 2.0),
        row(EXIT, 1.6, drafts=4, drafted=20, accepted=16),
        row("exit", 1.0, drafts=4, drafted=20, accepted=16),
        row("clasp", 1.0, drafts=4, drafted=20, accepted=16),
    ]
    line = formula_beside_price(rows, EXIT, 60)
    assert line is not None
    promised = bounded_speedup(token_agreement(5, 4), 8, 30, 60)
    assert line.split() == ["0.50", "8", f"{token_agreement(5, 4):.2f}", f"{promised:.2f}", "1.25", EXIT]
    assert all(formula_beside_price(rows, name, 60) is None for name in ("plain", "exit", "clasp"))


def test_without_drafts_there_is_no_agreement() -> None:
    assert formula_beside_price([row("plain", 2.0), row(EXIT, 2.0)], EXIT, 60) is None
