"""What a user asks of the choice of tokens."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ssd_profiles.errors import UserError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters as transformers' `generate` has them; greedy at temperature 0.

    Raises UserError where that would leave another parameter without effect.
    """

    temperature: float = 0.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    """Holds for a greedy choice, too; None for what the model's generation config says."""
    seed: int = 0
    rejection: bool = False
    """Draw drafts with random numbers of their own and test them by rejection, not with the target's numbers."""

    def __post_init__(self) -> None:
        if self.temperature < 0.0:
            raise UserError(
                f"sampling: a temperature of {self.temperature} is below 0, which is greedy; give that or more"
            )
        shaping = {"top_k": self.top_k, "top_p": self.top_p < 1.0, "min_p": self.min_p, "rejection": self.rejection}
        given = [name for name, is_given in shaping.items() if is_given]
        if given and not self.random:
            raise UserError(f"sampling: {given[0]} has no effect at temperature 0; give a higher one, or leave it out")

    @property
    def random(self) -> bool:
        """Whether tokens are drawn, not the most probable ones taken."""
        return self.temperature > 0.0

    @property
    def tests_drafts(self) -> bool:
        """Whether drafts are tested by rejection: for a seed the output then depends on them."""
        return self.random and self.rejection


GREEDY = SamplingParams()


def read_sampling(
    temperature: float | None,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float | None,
    seed: int | None,
    rejection: bool,
) -> SamplingParams:
    """The parameters of a command line, where None means that an option was not given.

    What shapes a distribution asks for sampling, at temperature 1 unless another is given. Without a seed one is
    drawn. Raises UserError as `SamplingParams` does.
    """
    if temperature is None:
        temperature = 1.0 if top_k or top_p < 1.0 or min_p or rejection else 0.0
    if seed is None:
        seed = secrets.randbelow(1 << 31) if temperature > 0.0 else 0
    return SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed, rejection)
