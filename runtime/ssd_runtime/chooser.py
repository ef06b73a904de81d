"""Chooses the next token by its logits: the most probable one, or a random one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ssd_runtime.sampling import GREEDY, Sampling

Paths = Callable[[], list[list[int]]]
"""Gives, for each row, the tokens that it stands behind, from the pending one on."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A token to draft."""

    token: int
    scores: Tensor
    """[vocabulary]: the next best candidates are those of the next greatest scores."""
    surprise: float
    """Minus log of the greatest share in the scores' softmax; 0 where nobody asked."""
    probs: Tensor | None = None
    """draft_probs [vocabulary], where the token was drawn from them by itself."""


class Chooser:
    """Chooses the tokens of one sequence behind one prompt.

    A random choice is the arg max of processed logits plus Gumbel noise, which is a draw from their softmax. Each
    place of the output has noise of its own, taken in order from one generator, and a draft for a place is chosen with
    that place's noise (drafter-invariant coupling, Daliri et al. 2024). So the output for a seed is the same whatever
    was drafted, and a draft by a similar distribution is likely to meet it.

    Where `rejection` is asked for, drafts are drawn by themselves and tested (`judge`). That accepts more at high
    temperatures; for a seed the output then depends on what was drafted, while its distribution does not.
    """

    def __init__(self, sampling: Sampling = GREEDY, device: torch.device | str = "cpu") -> None:
        self._random = sampling.random
        self._tests = self._random and sampling.rejection
        self._by_context, self._by_row = _processors(sampling)
        self._seed, self._generator = sampling.seed, torch.Generator(device)
        self.restart(0)

    def restart(self, prompt_tokens: int) -> None:
        """Begin behind a prompt of so many tokens, with the seed's first random numbers."""
        self._generator.manual_seed(self._seed)
        self._noise: list[Tensor] = []
        self._first = prompt_tokens
        """The place that the kept noise begins at."""

    def choose(
        self, logits: Tensor, known: list[int], paths: Paths, drawn: Sequence[tuple[int, Tensor]] = ()
    ) -> Callable[[int], int]:
        """What gives the target's token behind a row of `logits` [n, vocabulary]; to be asked once a row, in order.

        Row i stands behind the tokens `known` and paths()[i]. drawn[i] is the token drafted behind row i with its
        draft_probs, as far as such were.
        """
        if not self._tests:
            return self._scores(logits, known, paths).argmax(-1).tolist().__getitem__
        target_probs = self._processed(logits, known, paths()).softmax(-1)

        def token(row: int) -> int:
            if row >= len(drawn):
                return self._draw(target_probs[row])
            drafted, draft_probs = drawn[row]
            asked = torch.tensor([drafted], device=target_probs.device)
            return int(judge(target_probs[row, None], draft_probs[None], asked, self._generator))

        return token

    def propose(
        self, logits: Tensor, known: list[int], path: Callable[[], list[int]], temperature: float | None = None
    ) -> Proposal:
        """A token to draft by a draft's `logits` [vocabulary]; its surprise at a temperature, where one is given."""

        def paths() -> list[list[int]]:
            return [path()]

        if self._tests:
            probs = self._processed(logits[None], known, paths())[0].softmax(-1)
            # Not the drawn token's probability: what a draft does next must not depend on which token was drawn.
            return Proposal(self._draw(probs), probs, -math.log(float(probs.max())), probs)
        scores = self._scores(logits[None], known, paths)[0]
        top, best = scores.max(-1)
        surprise = 0.0
        if temperature is not None:
            surprise = float((scores.float() / temperature).logsumexp(-1) - top.float() / temperature)
        return Proposal(int(best), scores, surprise)

    def lead(self, logits: Tensor, known: list[int], token: int) -> float:
        """How far the choice behind `known` lies before `token`, by `logits` [vocabulary]; 0 where it is `token`."""
        scores = self._scores(logits[None], known, lambda: [[]])[0].float()
        return float(scores.max() - scores[token])

    def _scores(self, logits: Tensor, known: list[int], paths: Paths) -> Tensor:
        """What the choice is the arg max of."""
        if not self._random and not self._by_context:
            return logits
        behind = paths()
        scores = self._processed(logits, known, behind)
        if self._random:
            scores = scores + torch.stack([self._noise_at(len(known), len(path), scores) for path in behind])
        return scores

    def _processed(self, logits: Tensor, known: list[int], paths: list[list[int]]) -> Tensor:
        """Logits as the processors leave them, fp32."""
        scores = logits.float()
        if self._by_context:
            device = scores.device
            rows = [torch.tensor([known + path], device=device) for path in paths]
            scores = torch.cat([self._by_context(ids, row[None]) for ids, row in zip(rows, scores, strict=True)])
        # These look at nothing but the scores.
        return self._by_row(torch.empty(0), scores) if self._by_row else scores

    def _noise_at(self, known: int, ahead: int, like: Tensor) -> Tensor:
        """Of the place `ahead` of the first `known`: the same whoever asks, and however often."""
        while self._first + len(self._noise) <= known + ahead:
            noise = torch.empty(like.shape[-1], device=like.device).exponential_(generator=self._generator)
            self._noise.append(noise.log_().neg_())
        del self._noise[: known - self._first]
        self._first = known
        return self._noise[ahead]

    def _draw(self, probs: Tensor) -> int:
        return int(torch.multinomial(probs, 1, generator=self._generator))


def judge(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens [n] that have the distributions `target_probs` [n, vocabulary] if `tokens` [n] have `draft_probs`.

    A token stands with probability min(1, target ÷ draft); else another is drawn from what the target has beyond the
    draft (Leviathan et al. 2023, algorithm 1).
    """
    asked = tokens[:, None]
    share = target_probs.gather(1, asked) / draft_probs.gather(1, asked)
    stands = torch.rand(share.shape, generator=generator, device=share.device) < share
    if bool(stands.all()):
        return tokens
    beyond = (target_probs - draft_probs).clamp(min=0.0)
    # Where rounding leaves nothing beyond, the distributions are equal.
    beyond = torch.where(beyond.sum(-1, keepdim=True) > 0.0, beyond, target_probs)
    return torch.where(stands, asked, torch.multinomial(beyond, 1, generator=generator))[:, 0]


def _processors(sampling: Sampling) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """Those that look at the tokens before, and those that do not; in the order in which `generate` has them."""
    by_context, by_row = LogitsProcessorList(), LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        by_context.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature not in (0.0, 1.0):
        by_row.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.random:
        if sampling.top_k > 0:
            by_row.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            by_row.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0.0:
            by_row.append(MinPLogitsWarper(sampling.min_p))
    return by_context, by_row
