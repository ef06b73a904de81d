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
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sampling.seen_tokens import SeenTokens

Paths = Callable[[], list[list[int]]]
"""Gives, for each row, the tokens that it stands behind, from the pending one on."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A token to draft."""

    token: int
    scores: Tensor
    """[vocabulary]: the next best candidates are those of the next greatest scores."""
    nll: float
    """How open the choice was: minus log of its share in a softmax of minus its leads before all tokens, in logits;
    of the most probable token's choice where tokens are tested by rejection; 0 where nobody asked."""
    probs: Tensor | None = None
    """draft_probs [vocabulary], where the token was drawn from them by itself."""


class Sampler:
    """Chooses the tokens of one sequence behind one prompt.

    A random choice is the arg max of processed logits plus Gumbel noise, which is a draw from their softmax. Each
    place of the output has noise of its own, taken in order from one generator, and a draft for a place is chosen with
    that place's noise (drafter-invariant coupling, Daliri et al. 2024). So the output for a seed is the same whatever
    was drafted, and a draft by a similar distribution is likely to meet it.

    Where `rejection` is asked for, drafts are drawn by themselves and tested (`rejection_sample`). That accepts more at
    high temperatures; for a seed the output then depends on what was drafted, while its distribution does not.
    """

    def __init__(self, sampling: SamplingParams = GREEDY, device: torch.device | str = "cpu") -> None:
        self._random = sampling.random
        self._unit = sampling.temperature if sampling.random else 1.0
        """Logits a unit of the scores."""
        self._tests = sampling.tests_drafts
        penalty = sampling.repetition_penalty
        self._seen = None if penalty in (None, 1.0) else SeenTokens(float(penalty), device)
        self._filters = _filters(sampling)
        self._leaves_out = bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p)
        self._seed = sampling.seed
        # `gumbel` computes in float64, which mps and some other devices do not have.
        self._generator = torch.Generator(device if torch.device(device).type == "cuda" else "cpu")
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
        if not self._random:
            # All rows at once: the host waits for the device a single time.
            best = argmax(self._penalised(logits, known, paths)).tolist()
            return lambda row: int(best[row])
        behind = paths()

        def token(row: int) -> int:
            # Row by row: most rows behind a wrong draft are never asked for.
            _, scores = self._processed(logits[row], known, behind[row])
            if not self._tests:
                return int(argmax((scores + self._noise_at(len(known), len(behind[row]), scores))[None]))
            target_probs = scores.softmax(-1)[None]
            if row >= len(drawn):
                return int(draw(target_probs, self._generator))
            drafted, draft_probs = drawn[row]
            asked = torch.tensor([drafted], device=logits.device)
            return int(rejection_sample(target_probs, draft_probs[None], asked, self._generator))

        return token

    def propose(
        self, logits: Tensor, known: list[int], path: Callable[[], list[int]], annealed: float | None = None
    ) -> Proposal:
        """A token to draft by a draft's `logits` [vocabulary]; its surprise, where a temperature for that is given.

        How far the target's logits may lie from the draft's depends neither on the temperature of sampling nor on a
        filter, so surprise is of how far the choice lies before every token, in logits. Near temperature 0, and where
        a filter leaves one token, drafts end where greedy ones do.
        """
        if not self._random and self._seen is None:
            best = int(argmax(logits[None]))
            return Proposal(best, logits, _nll(lambda: logits[best].float() - logits.float(), annealed))
        behind = path()
        plain, scores = self._processed(logits, known, behind)
        if self._tests:
            probs = scores.softmax(-1)
            # Not the drawn token's lead: what a draft does next must not depend on which token was drawn.
            nll = _nll(lambda: plain.max() - plain, annealed)
            return Proposal(int(draw(probs[None], self._generator)), probs, nll, probs)
        noise = self._noise_at(len(known), len(behind), scores)
        best = int(argmax((scores + noise)[None]))
        return Proposal(best, scores + noise, _nll(lambda: self._leads(plain, scores, noise, best), annealed))

    def _leads(self, plain: Tensor, scores: Tensor, noise: Tensor, choice: int) -> Tensor:
        """How far the choice lies before every token, in logits; all [vocabulary].

        `plain` are logits, `scores` what filters leave of them ÷ temperature. A token that is left out has to reach
        the last one kept, and then either passes the choice or meets it pushed out itself: so it is with top-k, and
        about so with the other filters.
        """
        noisy = plain + noise * self._unit
        before = noisy[choice] - noisy
        if not self._leaves_out:
            return before
        left_out = scores == -math.inf
        reach = plain.masked_fill(left_out, math.inf).min() - plain
        place = plain[choice] - plain.masked_fill(~left_out, -math.inf).max()
        return torch.where(left_out, torch.maximum(reach, torch.minimum(before, place)), before)

    def gap(self, logits: Tensor, known: list[int], token: int, within: float) -> tuple[float, bool]:
        """How far the choice behind `known` lies before `token`, and whether that may be rounding.

        By `logits` [vocabulary] and in their units, the place's noise included. It may be where `token` is the choice
        once it rises by `within`, the choice falls by as much, or both, which may move either across a filter's edge.
        """
        plain, scores = self._processed(logits, known, [])
        noise = self._noise_at(len(known), 0, scores)
        choice, noisy = int(argmax((scores + noise)[None])), plain + noise * self._unit

        def chooses(rise: float, fall: float) -> bool:
            moved = logits.float().clone()
            moved[token] += rise
            moved[choice] -= fall
            return int(argmax((self._processed(moved, known, [])[1] + noise)[None])) == token

        near = chooses(within, 0.0) or chooses(0.0, within) or chooses(within, within)
        return max(0.0, float(noisy[choice] - noisy[token])), near

    def _processed(self, logits: Tensor, known: list[int], behind: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [vocabulary] after the penalty on tokens before, and after the filters too; both in fp32."""
        plain = self._penalised(logits[None], known, lambda: [behind]).float()
        return plain[0], (self._filters(torch.empty(0), plain) if self._filters else plain)[0]

    def _penalised(self, logits: Tensor, known: list[int], paths: Paths) -> Tensor:
        """`logits` [n, vocabulary] with the penalty on tokens that each row stands after; as they are without one."""
        return logits if self._seen is None else self._seen.penalised(logits, known, paths())

    def _noise_at(self, known: int, ahead: int, like: Tensor) -> Tensor:
        """Of the place `ahead` of the first `known`: the same whoever asks, and however often; none if greedy."""
        if not self._random:
            return torch.zeros_like(like)
        while self._first + len(self._noise) <= known + ahead:
            noise = gumbel(like.shape[-1:], self._generator).to(like.device)
            if self._first + len(self._noise) < known:
                self._first += 1
            else:
                self._noise.append(noise)
        del self._noise[: known - self._first]
        self._first = known
        return self._noise[ahead]


def _nll(leads: Callable[[], Tensor], annealed: float | None) -> float:
    """Minus log of the choice's share in a softmax of minus `leads` ÷ `annealed`; 0 where that is not given."""
    return 0.0 if annealed is None else float((leads() / -annealed).logsumexp(-1))


def gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Noise on the generator's device that makes an arg max of log-probabilities a draw.

    From the middles of 2^24 equal parts of (0, 1): torch's own exponential draws may be 0 or nearly so, which would
    beat any logit.
    """
    uniform = torch.rand(tuple(shape), generator=generator, device=generator.device).double().add_(2.0**-25)
    return uniform.log_().neg_().log_().neg_().float()


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """A token [n] of each distribution of `probs` [n, vocabulary], which need not add up to 1."""
    return (probs.log() + gumbel(probs.shape, generator).to(probs.device)).argmax(-1)


def rejection_sample(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens [n] that have the distributions `target_probs` [n, vocabulary] if `tokens` [n] have `draft_probs`.

    A token stands with probability min(1, target ÷ draft); else another is drawn from what the target has beyond the
    draft (Leviathan et al. 2023, algorithm 1).
    """
    asked = tokens[:, None]
    share = target_probs.gather(1, asked) / draft_probs.gather(1, asked)
    stands = torch.rand(share.shape, generator=generator, device=generator.device).to(share.device) < share
    if bool(stands.all()):
        return tokens
    beyond = (target_probs - draft_probs).clamp(min=0.0)
    # Where rounding leaves nothing beyond, the distributions are equal.
    beyond = torch.where(beyond.sum(-1, keepdim=True) > 0.0, beyond, target_probs)
    return torch.where(stands[:, 0], tokens, draw(beyond, generator))


def _filters(sampling: SamplingParams) -> LogitsProcessorList:
    """The processors that look at nothing but the scores, in the order in which `generate` has them.

    They take no int for a float.
    """
    filters = LogitsProcessorList()
    if sampling.temperature not in (0.0, 1.0):
        filters.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.random:
        if sampling.top_k > 0:
            filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            filters.append(TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p > 0.0:
            filters.append(MinPLogitsWarper(float(sampling.min_p)))
    return filters
