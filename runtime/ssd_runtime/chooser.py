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

from ssd_runtime.highest import highest
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
    """How open the choice was: minus log of the share of its leads' softmax; 0 where nobody asked."""
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
        self._unit = sampling.temperature if sampling.random else 1.0
        """Logits a unit of the scores."""
        self._tests = sampling.tests_drafts
        self._by_context, self._by_row = _processors(sampling)
        self._by_logits = not self._random and not self._by_context
        """Whether the choice is the arg max of the logits as they are."""
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
        if self._by_logits:
            return highest(logits).tolist().__getitem__
        behind = paths()

        def token(row: int) -> int:
            # Row by row: most rows behind a wrong draft are never asked for.
            alone = logits[row, None]
            if not self._tests:
                return int(highest(self._scores(alone, known, lambda: [behind[row]])))
            target_probs = self._processed(alone, known, [behind[row]]).softmax(-1)
            if row >= len(drawn):
                return int(draw(target_probs, self._generator))
            drafted, draft_probs = drawn[row]
            asked = torch.tensor([drafted], device=logits.device)
            return int(judge(target_probs, draft_probs[None], asked, self._generator))

        return token

    def propose(
        self, logits: Tensor, known: list[int], path: Callable[[], list[int]], temperature: float | None = None
    ) -> Proposal:
        """A token to draft by a draft's `logits` [vocabulary]; its surprise at a temperature, where one is given.

        How far the target's logits may lie from the draft's depends neither on the temperature of sampling nor on a
        filter, so surprise is of how far the choice lies before every token, in logits. Near temperature 0, and where
        a filter leaves one token, drafts end where greedy ones do.
        """
        if self._by_logits:
            best = int(highest(logits[None]))
            return Proposal(best, logits, _surprise(lambda: logits[best] - logits, temperature))
        behind = path()
        plain = self._contextual(logits[None].float(), known, [behind])
        scores = self._filtered(plain)
        if self._tests:
            probs = scores.softmax(-1)
            # Not the drawn token's lead: what a draft does next must not depend on which token was drawn.
            surprise = _surprise(lambda: plain.max() - plain[0], temperature)
            return Proposal(int(draw(probs, self._generator)), probs[0], surprise, probs[0])
        noise = self._noise_at(len(known), len(behind), scores) if self._random else torch.zeros_like(scores[0])
        noisy = scores[0] + noise
        surprise = _surprise(lambda: self._leads(plain[0], scores[0], noise)[0], temperature)
        return Proposal(int(highest(noisy[None])), noisy, surprise)

    def lead(self, logits: Tensor, known: list[int], token: int) -> float:
        """How far logits have to move from `logits` [vocabulary] before `token` can be the choice behind `known`.

        That is how far the choice lies before it, or before the first that a filter leaves out, which may take its
        place; and a token that is left out has to reach the last that is kept.
        """
        plain = self._contextual(logits[None].float(), known, [[]])
        scores = self._filtered(plain)
        noise = self._noise_at(len(known), 0, scores) if self._random else torch.zeros_like(scores[0])
        before, place = self._leads(plain[0], scores[0], noise)
        left_out = float(scores[0, token]) == -math.inf
        return float(before[token]) if left_out else min(float(before[token]), place)

    def _leads(self, plain: Tensor, scores: Tensor, noise: Tensor) -> tuple[Tensor, float]:
        """How far the choice lies before every token [vocabulary], and before the first that filters leave out.

        By logits, what filters leave of them ÷ temperature and the noise of the place, all [vocabulary]; in logits.
        """
        noisy, left_out = plain + noise * self._unit, scores == -math.inf
        choice = int(highest(noisy.masked_fill(left_out, -math.inf)[None]))
        before = noisy[choice] - noisy
        if not bool(left_out.any()):
            return before, math.inf
        place = float(plain[choice] - plain[left_out].max())
        reach = plain[~left_out].min() - plain
        return torch.where(left_out, torch.maximum(reach, before.clamp(max=place)), before), place

    def _scores(self, logits: Tensor, known: list[int], paths: Paths) -> Tensor:
        """What the choice is the arg max of."""
        if self._by_logits:
            return logits
        behind = paths()
        scores = self._processed(logits, known, behind)
        if self._random:
            scores = scores + torch.stack([self._noise_at(len(known), len(path), scores) for path in behind])
        return scores

    def _processed(self, logits: Tensor, known: list[int], paths: list[list[int]]) -> Tensor:
        """Logits as the processors leave them, fp32."""
        return self._filtered(self._contextual(logits.float(), known, paths))

    def _filtered(self, scores: Tensor) -> Tensor:
        # These processors look at nothing but the scores.
        return self._by_row(torch.empty(0), scores) if self._by_row else scores

    def _contextual(self, scores: Tensor, known: list[int], paths: list[list[int]]) -> Tensor:
        if not self._by_context:
            return scores
        rows = [torch.tensor([known + path], device=scores.device) for path in paths]
        return torch.cat([self._by_context(ids, row[None]) for ids, row in zip(rows, scores, strict=True)])

    def _noise_at(self, known: int, ahead: int, like: Tensor) -> Tensor:
        """Of the place `ahead` of the first `known`: the same whoever asks, and however often."""
        while self._first + len(self._noise) <= known + ahead:
            noise = gumbel(like.shape[-1:], self._generator)
            if self._first + len(self._noise) < known:
                self._first += 1
            else:
                self._noise.append(noise)
        del self._noise[: known - self._first]
        self._first = known
        return self._noise[ahead]


def _surprise(leads: Callable[[], Tensor], temperature: float | None) -> float:
    """Minus log of the choice's share in a softmax of minus `leads` ÷ temperature; 0 where none is given."""
    return 0.0 if temperature is None else float((leads().float() / -temperature).logsumexp(-1))


def gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Noise that makes an arg max of log-probabilities a draw.

    From the middles of 2^24 equal parts of (0, 1): torch's own exponential draws may be 0 or nearly so, which would
    beat any logit.
    """
    uniform = torch.rand(tuple(shape), generator=generator, device=generator.device).double().add_(2.0**-25)
    return uniform.log_().neg_().log_().neg_().float()


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """A token [n] of each distribution of `probs` [n, vocabulary], which need not add up to 1."""
    return (probs.log() + gumbel(probs.shape, generator)).argmax(-1)


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
    return torch.where(stands[:, 0], tokens, draw(beyond, generator))


def _processors(sampling: Sampling) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """Those that look at the tokens before, and those that do not; in the order in which `generate` has them.

    They take no int for a float.
    """
    by_context, by_row = LogitsProcessorList(), LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        by_context.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature not in (0.0, 1.0):
        by_row.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.random:
        if sampling.top_k > 0:
            by_row.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            by_row.append(TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p > 0.0:
            by_row.append(MinPLogitsWarper(float(sampling.min_p)))
    return by_context, by_row
