"""How commands and tools end."""

from __future__ import annotations

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime.command import BAD_INPUT, INTERRUPTED, run_guarded

ENDS: dict[str, tuple[BaseException, int, str]] = {
    "a mistake": (UserError("here: nothing; put something there"), BAD_INPUT, "here: nothing; put something there"),
    "no file": (FileNotFoundError(2, "No such file or directory", "x"), BAD_INPUT, "x: No such file or directory"),
    "interrupted": (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_wrong_is_said_in_one_line(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, code, says = ENDS[end]

    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_guarded(main)
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert said.startswith(f"error: {says}")
    assert said.count("\n") == 1
