"""Results per prompt and over all prompts; their figures have vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ssd_profiles.intervals import speedup_interval
from ssd_profiles.prompts import Prompt
from ssd_runtime.engine.output.divergence import Divergence, Kind
from ssd_runtime.engine.output.generation import Generation

FEWEST = 3
"""Fewest prompts for which an interval is shown; with two it is absurdly wide."""
STEADY_SPEEDS = 2.0
"""Largest ratio of plain decoding's speeds on two prompts of a machine that has nothing else to do."""
STEADY_TOKENS = 16
"""Fewest tokens of an answer whose speed is compared so."""
KINDS = tuple(Kind)
"""Kinds of differences, the worst last."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One decoded turn of a prompt, with its plain decoding if that was asked for."""

    prompt: Prompt
    turn: int
    strategy: str
    generation: Generation
    text: str
    plain: Generation | None = None
    divergence: Divergence | None = None
    seed: int | None = None
    """Seed of the sampling; None for greedy decoding."""
    said: str | None = None
    """The text without what the model has thought, as the next turn has it; None for all of the text."""

    @property
    def message(self) -> tuple[str, str]:
        """The answer as a message of the conversation: its role and content."""
        return "assistant", self.text if self.said is None else self.said

    def to_json(self) -> dict[str, Any]:
        """The prompt's JSON object."""
        generation = self.generation
        return {
            "id": self.prompt.id,
            **({"turn": self.turn} if len(self.prompt.turns) > 1 else {}),
            "category": self.prompt.category,
            "domain": generation.domain,
            **({"prompt_domain": self.prompt.domain} if self.prompt.domain is not None else {}),
            "strategy": self.strategy,
            **({"seed": self.seed} if self.seed is not None else {}),
            "token_ids": generation.token_ids,
            "text": self.text,
            "finish_reason": generation.finish_reason,
            "prompt_tokens": generation.prompt_tokens,
            "num_cached_tokens": generation.num_cached_tokens,
            **Tally.of(self).figures(compare=self.plain is not None),
        }


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over prompts."""

    prompts: int = 0
    tokens: int = 0
    later_tokens: int = 0
    """Tokens after each answer's first one, which the prefill yields: those that `decode_seconds` brought."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    forwards: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    plain_tokens: int = 0
    plain_later_tokens: int = 0
    plain_seconds: float = 0.0
    compared: int = 0
    divergence: int = 0
    """Place of the worst difference in `Kind`."""

    @classmethod
    def of(cls, outcome: Outcome) -> Tally:
        """The tally of one prompt."""
        run = outcome.generation
        plain = outcome.plain
        divergence = outcome.divergence
        return cls(
            prompts=1,
            tokens=run.decoded,
            later_tokens=run.later_tokens,
            prefill_seconds=run.prefill_seconds,
            decode_seconds=run.decode_seconds,
            first_token_seconds=run.first_token_seconds,
            forwards=run.target_forwards,
            drafts=sum(cycle.drafted > 0 for cycle in run.cycles),
            draft_tokens=run.num_draft_tokens,
            accepted_tokens=run.num_accepted_tokens,
            plain_tokens=len(plain.token_ids) if plain is not None else 0,
            plain_later_tokens=plain.later_tokens if plain is not None else 0,
            plain_seconds=plain.decode_seconds if plain is not None else 0.0,
            compared=int(divergence is not None),
            divergence=KINDS.index(divergence.kind) if divergence is not None else 0,
        )

    def __add__(self, other: Tally) -> Tally:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(Tally)}
        return Tally(**{**sums, "divergence": max(self.divergence, other.divergence)})

    @property
    def closing_line(self) -> str:
        """One line with tokens, tokens per second, mean acceptance length and mean time to the first token."""
        rate, length = self._rate, self._mean_acceptance_length
        parts = [
            f"{self.prompts} prompts" if self.prompts > 1 else "",
            f"{self.tokens} token{'s' * (self.tokens != 1)}",
            f"{rate:.1f} tokens/s" if rate else "",
            f"mean acceptance length {length:.2f}" if length else "",
            f"first token after {self.first_token_seconds / self.prompts:.2f} s" if self.prompts else "",
        ]
        return ", ".join(part for part in parts if part)

    def figures(self, compare: bool) -> dict[str, Any]:
        """Figures by name. Rates are ratios of sums, such as all tokens after the first ÷ all decode seconds.

        A ratio whose denominator is zero is None. `compare` adds the figures of plain decoding.
        """
        rate = self._rate
        figures: dict[str, Any] = {
            "new_tokens": self.tokens,
            "prefill_seconds": round(self.prefill_seconds, 4),
            "decode_seconds": round(self.decode_seconds, 4),
            "tokens_per_second": rate,
            "mean_acceptance_length": self._mean_acceptance_length,
            "draft_acceptance_rate": _ratio(self.accepted_tokens, self.draft_tokens),
            "num_drafts": self.drafts,
            "num_draft_tokens": self.draft_tokens,
            "num_accepted_tokens": self.accepted_tokens,
            "target_forwards": self.forwards,
        }
        if compare:
            plain_rate = _ratio(self.plain_later_tokens, self.plain_seconds)
            figures["plain_tokens_per_second"] = plain_rate
            figures["speedup"] = _speedup(rate, plain_rate)
            figures["identical"] = self.divergence == 0 if self.compared else None
            figures["divergence"] = KINDS[self.divergence].value if self.compared else None
        return figures

    @property
    def _rate(self) -> float | None:
        return _ratio(self.later_tokens, self.decode_seconds)

    @property
    def _mean_acceptance_length(self) -> float | None:
        return _ratio(self.later_tokens, self.forwards)


@dataclass(slots=True)
class Summary:
    """Running sums over all prompts and over each category."""

    compare: bool = False
    """Whether prompts are decoded plainly too."""
    failed: int = 0
    """Prompts whose decoding ended in a UserError; the figures omit them."""
    concurrency: int = 1
    """Most prompts that were decoded at once."""
    seconds: float = 0.0
    """Wall seconds of decoding all prompts, several at once."""
    plain_seconds: float = 0.0
    """Wall seconds of decoding them plainly, several at once."""
    strategy: str = "auto"
    compared: list[Tally] = field(default_factory=list)
    """The prompts that were decoded plainly too."""
    total: Tally = field(default_factory=Tally)
    categories: dict[str, Tally] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Add a prompt."""
        tally = Tally.of(outcome)
        name = outcome.prompt.category
        if tally.plain_later_tokens and tally.later_tokens:
            self.compared.append(tally)
        self.total += tally
        if name:
            self.categories[name] = self.categories.get(name, Tally()) + tally

    @property
    def closing_line(self) -> str:
        """`Tally.closing_line` of all prompts; for concurrent ones with all new tokens ÷ wall seconds."""
        together = f", {self.total.tokens / self.seconds:.1f} tokens/s together with prefills" if self.seconds else ""
        failed = f", {self.failed} prompt{'s' * (self.failed > 1)} failed" if self.failed else ""
        return self.total.closing_line + together + failed

    @property
    def comparison(self) -> str:
        """A sentence that says how fast the strategy was, and whether its outputs are plain decoding's."""
        figures = {**self.total.figures(compare=True), **self._together()}
        if figures["speedup"] is None:
            return "No answer has a second token, so there is no speed to compare."
        count = self.total.prompts
        # The interval is over prompts decoded one by one.
        alone = self.compared if self.concurrency == 1 else []
        before = [tally.plain_seconds for tally in alone]
        # For as many tokens as plain decoding's.
        after = [tally.decode_seconds / tally.later_tokens * tally.plain_later_tokens for tally in alone]
        interval = speedup_interval(before, after) if count >= FEWEST else None
        shown = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval is not None else ""
        where = f"these {count} prompts" if count > 1 else "this prompt"
        same = {True: "every output is plain decoding's", False: "OUTPUTS DIFFER", None: "outputs were not compared"}
        equal = "outputs differ by rounding" if figures["divergence"] == "near_tie" else same[figures["identical"]]
        return (
            f"{self.strategy} is {figures['speedup']:.2f}{shown} times as fast as plain decoding on {where}; {equal}."
        )

    @property
    def disturbance(self) -> str | None:
        """`disturbance` of prompts that were compared one by one."""
        return disturbance(self.compared) if self.concurrency == 1 else None

    def to_json(self) -> dict[str, Any]:
        """The summary's JSON object."""
        return {
            "prompts": self.total.prompts,
            **({"failed": self.failed} if self.failed else {}),
            **self.total.figures(self.compare),
            **self._together(),
            "categories": {name: self.categories[name].figures(self.compare) for name in sorted(self.categories)},
        }

    def _together(self) -> dict[str, Any]:
        """For concurrent prompts, `throughput` (all new tokens ÷ wall seconds) and its ratio to plain decoding's."""
        if self.concurrency == 1:
            return {}
        rate = _ratio(self.total.tokens, self.seconds)
        figures: dict[str, Any] = {"concurrency": self.concurrency, "throughput": rate}
        if self.compare:
            plain_rate = _ratio(self.total.plain_tokens, self.plain_seconds)
            figures["plain_throughput"] = plain_rate
            figures["speedup"] = _speedup(rate, plain_rate)
        return figures


def disturbance(compared: Sequence[Tally]) -> str | None:
    """A warning if plain decoding was much faster on one prompt than on another; None if it was steady."""
    steady = [tally for tally in compared if tally.plain_later_tokens >= STEADY_TOKENS]
    rates = [tally.plain_later_tokens / tally.plain_seconds for tally in steady]
    if len(rates) < 2 or max(rates) <= STEADY_SPEEDS * min(rates):
        return None
    return (
        f"plain decoding was {max(rates) / min(rates):.1f} times as fast on one prompt as on another, so this machine "
        "is busy or the prompts differ much in length; measure again when it is quiet"
    )


def _speedup(rate: float | None, plain_rate: float | None) -> float | None:
    return round(rate / plain_rate, 4) if rate and plain_rate else None


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
