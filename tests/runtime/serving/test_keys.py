"""A server's API keys are read from options, files and the environment; bad ones are refused."""

from __future__ import annotations

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime.serving.http.keys import KEY_VARIABLE, ApiKeys, read_keys


def test_keys_of_the_environment_serve_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "first, second,")
    assert read_keys(None) == ("first", "second")
    assert read_keys(["given"]) == ("given",)
    keys = ApiKeys(read_keys(None))
    assert keys.stream_of("Bearer second") == "key 2"
    assert keys.stream_of("Bearer given") is None


@pytest.mark.parametrize("key", ["", "  ", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="--api-key: a key is text of ASCII characters that is not empty"):
        read_keys([key])
