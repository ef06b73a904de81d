"""The progress of a compile."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ssd_compiler import progress
from ssd_compiler.progress import Reporter, duration


def test_the_time_left_is_that_of_the_domains_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    shown = io.StringIO()
    took = {"resumed": 0.1, "one": 100.0, "two": 200.0, "three": 5.0}
    names = []
    for name in Reporter(Console(file=shown, width=200)).domains(list(took)):
        names.append(name)
        now[0] += took[name]
    assert names == list(took)
    assert shown.getvalue().splitlines() == [
        "2 of 4 domains done, about 3 min left for the others",
        "3 of 4 domains done, about 2 min left for the others",
    ]


def test_a_stage_shows_the_time_left_on_a_terminal() -> None:
    shown = io.StringIO()
    with Reporter(Console(file=shown, force_terminal=True, width=120)).stage("search", 4) as tick:
        tick()
    assert "left" in shown.getvalue()
    shown = io.StringIO()
    with Reporter(Console(file=shown)).stage("search", 4) as tick:
        tick()
    assert shown.getvalue() == "search: 0 s\n"


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (89, "89 s"), (95, "2 min"), (630, "10 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
