"""The scoreboard: what each paper claims, what is measured here, and a verdict that follows from the outcomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.harness.outcomes import Outcome

HEADER = """## Scoreboard

*Reproduced*: all conditions of a row (`bench/papers/claims`) hold in the outcomes below, *partly*: some, *not*:
none. *Not tried*: there is no outcome that could decide. *Cannot be tried here*: this machine, a processor with two
cores, or what is reachable from it, does not allow it. *Command*: an option of `python -m bench.papers`. The papers'
figures are from GPUs and models of 1B to 70B parameters; ours from SmolLM2-135M, and from models into which skippable
layers were planted.

*Real* is SmolLM2-135M-Instruct. *Planted* is the same model with 30 inserted layers that do next to nothing,
*late-weak* has these at its end, and *diffuse* has sub-layers that are weak by degrees. *KNN*, *Fix* and *Mix* are the
masks of the nearest domain, of one domain, and of all domains together; *r* is the mix ratio of a stream's domains.
`swift+tree=0` is a strategy with a parameter that is not its default.

| paper | what it says | what we have | verdict | reason | command |
|---|---|---|---|---|---|
"""


class NotMeasuredError(Exception):
    """An outcome or a figure that a claim needs is missing."""


class Look:
    """Looks up figures in the latest outcome of each part, and notes whether any of these is stale."""

    def __init__(self, outcomes: Mapping[str, list[Outcome]], packages: str) -> None:
        self._outcomes = outcomes
        self._packages = packages
        self.stale = False

    def __call__(self, part: str, contender: str, figure: str = "speedup") -> float:
        """A contender's figure in the part's latest outcome. Raises NotMeasuredError."""
        figures = self._outcome(part).figures.get(contender, {})
        if figure not in figures:
            raise NotMeasuredError(f"no {contender} in {part} yet")
        return figures[figure]

    def ratio(self, part: str, first: str, second: str, figure: str = "speedup") -> float:
        """Speed of one contender ÷ another's, paired by prompt, or its `low` or `high`. Raises NotMeasuredError."""
        found = self._outcome(part).against(second, first) or {}
        if figure not in found:
            raise NotMeasuredError(f"no {first} beside {second} in {part} yet")
        return found[figure]

    def printed(self, part: str, pattern: str) -> float:
        """The number that a tool printed. Raises NotMeasuredError."""
        found = re.search(pattern, self._outcome(part).printed)
        if found is None:
            raise NotMeasuredError(f"no such figure in {part} yet")
        return float(found[1])

    def _outcome(self, part: str) -> Outcome:
        """The latest outcome of a part, or of the first of `one|other` that has any. Raises NotMeasuredError."""
        for name in part.split("|"):
            for outcome in self._outcomes.get(name, []):
                self.stale |= outcome.is_stale(self._packages)
                return outcome
        raise NotMeasuredError(f"{part.partition('|')[0]}: not measured yet")


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a paper."""

    paper: str
    says: str
    """The claim, with its place in the paper."""
    reason: str
    """Why the verdict is what it is, for readers."""
    part: str = ""
    """The parts of `bench.papers` that measure it, comma-separated."""
    ours: Callable[[Look], str] | str = "–"
    """Our own figures."""
    holds: tuple[Callable[[Look], bool], ...] = ()
    """Conditions of the verdict; none where it cannot be tried."""


def verdict(claim: Claim, look: Look) -> str:
    """Reproduced, partly, not, not tried or cannot be tried here, by the claim's conditions.

    A condition whose figures are missing does not hold; if they are missing for all, the claim was not tried.
    """
    if not claim.holds:
        return "cannot be tried here"
    held = [_held(condition, look) for condition in claim.holds]
    if all(each is None for each in held):
        return "not tried"
    return "**reproduced**" if all(held) else "partly" if any(held) else "not"


def _held(condition: Callable[[Look], bool], look: Look) -> bool | None:
    try:
        return condition(look)
    except NotMeasuredError:
        return None


def scoreboard(claims: Sequence[Claim], outcomes: Mapping[str, list[Outcome]], packages: str) -> str:
    """Render the table in Markdown."""
    lines = []
    for claim in claims:
        look = Look(outcomes, packages)
        try:
            ours = claim.ours if isinstance(claim.ours, str) else claim.ours(look)
        except NotMeasuredError as error:
            ours = str(error)
        found = verdict(claim, look)
        command = f"`--only {claim.part}`" if claim.part else "–"
        cells = [claim.paper, claim.says, ours + " \\*" * look.stale, found, claim.reason, command]
        lines.append(f"| {' | '.join(cells)} |")
    return HEADER + "\n".join(lines) + "\n"
