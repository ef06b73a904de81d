"""What the user is told of each prompt and of all of them, under the field's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssd_profiles.prompts import Prompt
from ssd_runtime.divergence import Divergence, Kind
from ssd_runtime.generate import Generation


@dataclass(frozen=True, slots=True)
class Outcome:
    """One decoded prompt, with plain decoding of the same when that was asked for."""

    prompt: Prompt
    turn: int
    strategy: str
    generation: Generation
    text: str
    plain: Generation | None = None
    divergence: Divergence | None = None
    seed: int | None = None
    """Of sampling."""

    def record(self) -> dict[str, Any]:
        """The prompt's JSON object."""
        generation = self.generation
        return {
            "id": self.prompt.id,
            **({"turn": self.turn} if len(self.prompt.turns) > 1 else {}),
            "category": self.prompt.category,
            "domain": generation.domain or self.prompt.domain,
            "strategy": self.strategy,
            **({"seed": self.seed} if self.seed is not None else {}),
            "token_ids": generation.token_ids,
            "text": self.text,
            "prompt_tokens": generation.prompt_tokens,
            **_figures([self]),
        }


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures over all prompts and for each category."""
    categories = sorted({outcome.prompt.category for outcome in outcomes if outcome.prompt.category})
    return {
        "prompts": len(outcomes),
        **_figures(outcomes),
        "categories": {
            name: _figures([outcome for outcome in outcomes if outcome.prompt.category == name]) for name in categories
        },
    }


def _figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Totals over totals: tokens ÷ decode seconds, accepted ÷ drafted tokens, tokens ÷ target forwards."""
    runs = [outcome.generation for outcome in outcomes]
    tokens, seconds = sum(len(run.token_ids) for run in runs), sum(run.decode_seconds for run in runs)
    forwards, drafted = sum(run.target_forwards for run in runs), sum(run.num_draft_tokens for run in runs)
    accepted = sum(run.num_accepted_tokens for run in runs)
    figures: dict[str, Any] = {
        "new_tokens": tokens,
        "prefill_seconds": round(sum(run.prefill_seconds for run in runs), 4),
        "decode_seconds": round(seconds, 4),
        "tokens_per_second": _ratio(tokens, seconds),
        # The first new token comes from the prefill, not from a target forward.
        "mean_acceptance_length": _ratio(tokens - len(runs), forwards),
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "num_drafts": sum(cycle.drafted > 0 for run in runs for cycle in run.cycles),
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "target_forwards": forwards,
    }
    plains = [outcome.plain for outcome in outcomes if outcome.plain is not None]
    if plains:
        plain_seconds = sum(run.decode_seconds for run in plains)
        plain_rate = _ratio(sum(len(run.token_ids) for run in plains), plain_seconds)
        rate = _ratio(tokens, seconds)
        figures["plain_tokens_per_second"] = plain_rate
        figures["speedup"] = round(rate / plain_rate, 4) if rate and plain_rate else None
        kinds = [outcome.divergence.kind for outcome in outcomes if outcome.divergence]
        figures["identical"] = all(kind is Kind.NONE for kind in kinds) if kinds else None
        figures["divergence"] = max(kinds, key=list(Kind).index).value if kinds else None
    return figures


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
