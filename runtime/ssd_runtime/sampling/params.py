"""The user's parameters for the choice of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssd_profiles.errors import UserError

if TYPE_CHECKING:
    from ssd_runtime.sampling.processors import RowProcessors
    from ssd_runtime.structure.grammars import Grammar

COLD = 1e-3
"""Lower temperatures are greedy: logits divided by them would leave the range of numbers."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters under the names of transformers' `generate`; a temperature below `COLD` is greedy.

    Raises UserError when one is out of its range, or would have no effect at temperature 0.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Number of most probable tokens to sample from; 0 for all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    """Penalty on seen tokens, in greedy decoding too; None for that of the model's generation config."""
    seed: int = 0
    """Seed of 64 bits; every bit of it counts."""
    rejection: bool = False
    """Draw drafts independently and test them by rejection, instead of drawing them with the target's random
    numbers."""
    processors: RowProcessors | None = None
    """Logits processors of one sequence. They replace the filters and the penalty above, and apply the temperature
    themselves, if it is not 0."""
    grammar: Grammar | None = None
    """The grammar that the answer is held to; it comes before all of the above."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens of the vocabulary that are never chosen, beside those of the model's generation config."""

    def __post_init__(self) -> None:
        penalty = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        ranges = {
            "temperature": (self.temperature, 0.0 <= self.temperature < math.inf, "0, which is greedy, or more"),
            "top_k": (self.top_k, self.top_k >= 0, "1 or more, or 0 for all tokens"),
            "top_p": (self.top_p, 0.0 <= self.top_p <= 1.0, "0 to 1"),
            "min_p": (self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1"),
            "repetition_penalty": (penalty, 0.0 < penalty < math.inf, "more than 0"),
        }
        for name, (value, is_valid, expected) in ranges.items():
            if not is_valid:
                raise UserError(f"sampling: {name}: expected {expected}, got {value}")
        shaping = {"top_k": self.top_k, "top_p": self.top_p < 1.0, "min_p": self.min_p, "rejection": self.rejection}
        given = [name for name, is_given in shaping.items() if is_given]
        if given and not self.temperature:
            raise UserError(f"sampling: {given[0]} has no effect at temperature 0; give a higher one, or omit it")

    @property
    def random(self) -> bool:
        """Whether tokens are sampled rather than chosen greedily."""
        return self.temperature >= COLD

    @property
    def tests_drafts(self) -> bool:
        """Whether drafts are tested by rejection, so that a seed's output depends on them."""
        return self.random and self.rejection


GREEDY = SamplingParams()
