"""Shows a command's user what is being waited for."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from ssd_runtime.commands.waiting import counting, waiting


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, force_terminal=terminal, width=100), shown


def test_a_terminal_shows_what_is_waited_for() -> None:
    screen, shown = console(terminal=True)
    with waiting("loading model [x]", console=screen):
        pass
    assert "loading model [x]" in shown.getvalue()
    screen, shown = console(terminal=True)
    with counting("prompts", 3, console=screen) as tick:
        tick()
        tick()
    assert "2/3" in shown.getvalue()
    assert "left" in shown.getvalue()


@pytest.mark.parametrize(("terminal", "wanted"), [(False, True), (True, False)])
def test_pipes_and_quiet_runs_show_nothing(terminal: bool, wanted: bool) -> None:
    screen, shown = console(terminal)
    with waiting("loading", wanted, screen), counting("prompts", 3, wanted, screen) as tick:
        tick()
    assert shown.getvalue() == ""


def test_answers_on_standard_output_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    screen, shown = console(terminal=True)
    with counting("prompts", 2, console=screen):
        sys.stdout.write("an answer\n")
    assert capsys.readouterr().out == "an answer\n"
    assert "an answer" not in shown.getvalue()
