"""The first line of another program's error, which our own errors quote."""

from __future__ import annotations

import pytest

from ssd_profiles.errors import MAX_LINE, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n one \ntwo"), "one"),
        (ValueError("x" * 999), "x" * MAX_LINE),
        (TimeoutError(), "TimeoutError"),
        (OSError(" \n"), "OSError"),
    ],
)
def test_an_error_without_a_message_is_named(error: Exception, line: str) -> None:
    assert first_line(error).strip() == line
