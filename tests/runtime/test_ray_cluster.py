"""Errors of commands for which Ray does not start."""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime.serving.ray_app.ray_cluster import ray_cluster


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("local", "--ray local: Ray did not start on this machine (TimeoutError)"),
        ("ray://host", "--ray ray://host: no cluster can be joined there (TimeoutError); see `ray status`"),
    ],
)
def test_a_cluster_that_fails_without_a_message_is_one_line(
    monkeypatch: pytest.MonkeyPatch, address: str, told: str
) -> None:
    def fail(**_: object) -> None:
        raise TimeoutError

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=fail, __spec__=ModuleSpec("ray", None)))
    with pytest.raises(UserError, match=f"^{re.escape(told)}$"), ray_cluster(address):
        pass
