"""The table of strategies that a user can select. Importing it loads neither torch nor a planner: see `makers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ssd_profiles.errors import UserError
from ssd_runtime.planning.bounds import read_value
from ssd_runtime.planning.settings import (
    AutoSettings,
    ClaspSettings,
    DelSettings,
    ExitSettings,
    KnapsackSettings,
    LightSettings,
    LookupSettings,
    MtpSettings,
    NearestSettings,
    SwiftSettings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to plan, with its parameters and needs."""

    name: str
    settings: type[Any] | None = None
    """Class of the parameters for `--set`; None without any."""
    needs_bundle: bool = False
    needs_latency: bool = False
    needs_light: bool = False
    """Whether it drafts on light copies of the weights."""
    offered: bool = False
    """Whether a server offers it to requests without `--allow-strategies`."""
    uses_masks: bool = False
    """Whether it drafts with a bundle's masks, which may run on light copies too."""
    begins_with_guesses: bool = False
    """Whether it can draft by guesses alone until this device is measured."""


FIXED = "fixed:"
"""Prefix of the strategy that is followed by a domain's name."""
STRATEGIES = (
    Strategy(
        name="auto", settings=AutoSettings, needs_latency=True, offered=True, uses_masks=True, begins_with_guesses=True
    ),
    Strategy(name="plain", offered=True),
    Strategy(name="knn", settings=NearestSettings, needs_bundle=True, needs_latency=True, uses_masks=True),
    Strategy(name="knapsack", settings=KnapsackSettings, needs_latency=True, uses_masks=True),
    Strategy(name="clasp", settings=ClaspSettings),
    Strategy(name="swift", settings=SwiftSettings),
    Strategy(name="exit", settings=ExitSettings),
    Strategy(name="del", settings=DelSettings),
    Strategy(name="lookup", settings=LookupSettings, needs_latency=True, offered=True, begins_with_guesses=True),
    Strategy(name="light", settings=LightSettings, needs_light=True),
    Strategy(name="mtp", settings=MtpSettings),
    Strategy(name=f"{FIXED}NAME", needs_bundle=True, needs_latency=True, uses_masks=True),
)
NAMES = tuple(strategy.name for strategy in STRATEGIES)
WITHOUT_BUNDLE = tuple(strategy.name for strategy in STRATEGIES if not strategy.needs_bundle)
SETTINGS: Mapping[str, type[Any]] = {each.name: each.settings for each in STRATEGIES if each.settings is not None}
"""Classes of the parameters for `--set`, by strategy."""


def find_strategy(name: str, option: str = "--strategy") -> Strategy:
    """The strategy that a user calls `name`. Raises UserError, which names the `option`, if there is none."""
    key = f"{FIXED}NAME" if name.startswith(FIXED) else name
    for strategy in STRATEGIES:
        if strategy.name == key:
            return strategy
    raise UserError(f"{option}: {name[:40]!r} is unknown; give one of {', '.join(NAMES)}")


def check_strategy(name: str, has_bundle: bool, option: str = "--strategy") -> None:
    """Raise UserError when there is no such strategy, or when it needs a bundle and there is none."""
    if find_strategy(name, option).needs_bundle and not has_bundle:
        others = ", ".join(WITHOUT_BUNDLE)
        raise UserError(f"{option} {name}: needs a bundle; give one with --bundle, or use one of {others}")


def read_settings(strategy: str, assignments: list[str], base: Any = None) -> Any:
    """The strategy's parameters with `NAME=VALUE` assignments applied; None for strategies without any.

    Those that are not assigned are the strategy's `base`, its defaults where that is None. Raises UserError that names
    the parameters.
    """
    kind = SETTINGS.get(strategy)
    known = {each.name: each for each in fields(kind)} if kind else {}
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise UserError(f"--set {assignment}: expected NAME=VALUE, such as --set {name}=1")
        if name not in known:
            raise UserError(
                f"--set {assignment}: {strategy} has no such parameter; it has: {', '.join(known) or 'none'}"
            )
        values[name] = text
    try:
        assigned = {name: read_value(known[name], text) for name, text in values.items()}
        return kind and (kind(**assigned) if base is None else replace(base, **assigned))
    except UserError as error:
        raise UserError(f"--set {error}") from None
