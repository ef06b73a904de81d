"""Every parameter of every strategy has bounds, which hold in Python, on the command line and over HTTP alike."""

from __future__ import annotations

import math
import re
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime.planning.bounds import range_text
from ssd_runtime.planning.registry import SETTINGS, read_settings
from ssd_runtime.serving.http.openai.errors import ApiError
from ssd_runtime.serving.http.openai.requests.generation_requests import _strategy
from ssd_runtime.serving.http.openai.requests.requests import CompletionRequest
from ssd_runtime.serving.http.settings import ServerSettings, ServiceOptions

PARAMETERS = [
    pytest.param(name, each, id=f"{name}.{each.name}") for name, kind in SETTINGS.items() for each in fields(kind)
]
PAGE = Path(__file__).parents[3] / "docs" / "strategies.md"
SERVER = ServerSettings(model_name="tiny", max_context=100, vocabulary=97, has_bundle=True)


def outside(parameter: Field[Any]) -> list[Any]:
    """Values just beyond the bounds, far beyond them, and of other types."""
    if "bounds" not in parameter.metadata:
        return ["", "Nearest", "x" * 1_000]
    least, most = parameter.metadata["bounds"]
    if isinstance(most, int):
        return [least - 2, most + 1, 10**30, -(10**4000), "x", f"{most}.0", ""]
    return [least - 0.01, math.nextafter(most, math.inf), math.inf, math.nan, "x", ""]


def over_http(strategy: str, name: str, value: Any) -> Any:
    body = {"prompt": "x", "ssd": {"strategy": strategy, "parameters": {name: value}}}
    allowed = replace(SERVER, options=ServiceOptions(allow_strategies=(strategy,)))
    return _strategy(CompletionRequest.model_validate(body), allowed)[1]


@pytest.mark.parametrize(("strategy", "parameter"), PARAMETERS)
def test_a_value_out_of_bounds_is_refused_in_one_line_wherever_it_comes_from(
    strategy: str, parameter: Field[Any]
) -> None:
    told = rf"{parameter.name}: expected .*{re.escape(range_text(parameter))}, got \S.{{0,45}}$"
    for value in outside(parameter):
        with pytest.raises(UserError, match=rf"^{told}"):
            SETTINGS[strategy](**{parameter.name: value})
        text = "1" * 1000 if value == -(10**4000) else str(value)
        with pytest.raises(UserError, match=rf"^--set {told}"):
            read_settings(strategy, [f"{parameter.name}={text}"])
        with pytest.raises(ApiError, match=rf"^ssd.parameters: {told}"):
            over_http(strategy, parameter.name, text)


@pytest.mark.parametrize(("strategy", "parameter"), PARAMETERS)
def test_the_bounds_themselves_and_the_default_are_taken(strategy: str, parameter: Field[Any]) -> None:
    for value in (parameter.default, *parameter.metadata.get("bounds", parameter.metadata.get("texts"))):
        wanted = SETTINGS[strategy](**{parameter.name: value})
        assert read_settings(strategy, [f"{parameter.name}={value}"]) == wanted
        assert over_http(strategy, parameter.name, value) == wanted


def test_the_page_of_strategies_lists_every_parameter_with_its_default_and_its_range() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\S+)` \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    expected = {
        (name, each.name): (
            f"{each.default:g}" if not isinstance(each.default, str) else each.default,
            range_text(each),
        )
        for name, kind in SETTINGS.items()
        for each in fields(kind)
    }
    assert {(strategy, name): (default, range_) for strategy, name, default, range_ in rows} == expected


def test_a_server_offers_what_its_operator_chose_and_what_cannot_do_harm() -> None:
    def ask(name: str, /, **options: Any) -> str:
        body = {"prompt": "x", "ssd": {"strategy": name}}
        return _strategy(CompletionRequest.model_validate(body), replace(SERVER, options=ServiceOptions(**options)))[0]

    studied = {*SETTINGS, "plain", "fixed:mix"} - {"auto", "plain", "lookup"}
    for name in ("auto", "plain", "lookup"):
        assert ask(name) == name
    for name in studied:
        with pytest.raises(ApiError, match=rf"^ssd.strategy: '{name}' is not offered.*--allow-strategies {name}$"):
            ask(name, allow_strategies=tuple(studied - {name}))
        assert ask(name, strategy=name) == ask(name, allow_strategies=(name,)) == name
    assert ask("fixed:mix", allow_strategies=("fixed:NAME",)) == "fixed:mix"


def test_a_request_makes_no_lighter_copies_of_the_weights() -> None:
    """Making them would stop all others for seconds."""
    settings = replace(SERVER, options=ServiceOptions(strategy="plain"), light=False)
    body: dict[str, Any] = {"prompt": "x", "ssd": {"strategy": "auto"}}
    assert _strategy(CompletionRequest.model_validate(body), settings)[1].light == 0
    body["ssd"]["parameters"] = {"light": 1}
    with pytest.raises(ApiError, match=r"^ssd.parameters: light: this server has no light copies"):
        _strategy(CompletionRequest.model_validate(body), settings)
