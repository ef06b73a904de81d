"""Chooses tokens from logits, greedily or at random, for the target and for drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_profiles.errors import UserError
from ssd_runtime.devices.transfer import to_device
from ssd_runtime.sampling.argmax import argmax, with_nll
from ssd_runtime.sampling.filters import filters_of
from ssd_runtime.sampling.finite import NO_TOKEN, finite_argmax, not_finite, require_token
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sampling.seeds import seed_generator
from ssd_runtime.sampling.seen_tokens import SeenTokens

Paths = Callable[[], list[list[int]]]
"""A function returning, for each row, the tokens on its path, from the pending one on."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed draft token."""

    token: int
    scores: Tensor
    """Scores [vocabulary] of the choice, from which runner-up candidates are ranked."""
    nll: float
    """Negative log of the draft's (annealed) confidence in the token; 0 when no temperature was given. With tests by
    rejection it is the most probable token's."""
    probs: Tensor | None = None
    """draft_probs [vocabulary] when the token was drawn independently, else None."""


class Sampler:
    """Chooses the tokens of one sequence.

    A random choice is the argmax of the processed logits plus Gumbel noise, which is a draw from their softmax. Each
    position of the output has noise of its own, taken in order from one generator. A draft for a position is chosen
    with the same noise (drafter-invariant coupling, Daliri et al. 2024). So a seed's output does not depend on drafts,
    and a draft from a similar distribution is likely to agree.

    With `rejection`, drafts are drawn independently and tested by `rejection_sample`. More of them are accepted at high
    temperatures. A seed's output then depends on the drafts, but its distribution does not.
    """

    def __init__(self, sampling: SamplingParams = GREEDY, device: torch.device | str = "cpu") -> None:
        self._random = sampling.random
        self._unit = sampling.temperature if sampling.random else 1.0
        """The temperature: logits per unit of the scores."""
        self._tests = sampling.tests_drafts
        penalty = sampling.repetition_penalty
        self._seen = None if penalty in (None, 1.0) else SeenTokens(float(penalty), device)
        self._suppressed = to_device(list(sampling.suppress_tokens), device) if sampling.suppress_tokens else None
        self._filters = filters_of(sampling)
        self._processors = sampling.processors
        self.matcher = sampling.grammar.matcher() if sampling.grammar is not None else None
        self._leaves_out = bool(
            sampling.top_k or sampling.top_p < 1.0 or sampling.min_p or sampling.processors or self.matcher
        )
        self._seed = sampling.seed
        # `gumbel` computes in float64, which mps and some other devices lack.
        self._generator = torch.Generator(device if torch.device(device).type == "cuda" else "cpu")
        self.restart(0)

    @property
    def is_argmax(self) -> bool:
        """Whether every choice is the argmax of the logits as they are."""
        shaped = (self._seen, self._suppressed, self._processors, self.matcher)
        return not self._random and all(each is None for each in shaped)

    def restart(self, prompt_tokens: int, answered: int = 0) -> None:
        """Restart after a prompt of `prompt_tokens` tokens, with the first random numbers of the seed.

        The `answered` tokens after it are chosen already. With tests of drafts nobody knows how many random numbers
        they took, so the next ones are those of another seed.
        """
        seed_generator(self._generator, self._seed + (answered << 32) if self._tests else self._seed)
        if self.matcher is not None:
            self.matcher.restart(prompt_tokens)
        self._noise: list[Tensor] = []
        self._first = prompt_tokens
        """Position of the first kept noise vector."""

    def choose(
        self, logits: Tensor, known: list[int], paths: Paths, drawn: Sequence[tuple[int, Tensor]] = ()
    ) -> Callable[[int], int]:
        """Return a function from a row of `logits` [n, vocabulary] to the target's token after it.

        Row i follows the tokens `known` and paths()[i]. `drawn[i]` is the token drafted after row i with its
        draft_probs, for as many rows as have some. The function must be called at most once per row, in order. It
        raises NotFiniteError for a row whose logits are NaN or infinite, and, where transformers raises as well,
        UserError for one from whose processed scores nothing can be drawn.
        """
        logits = self._allowed(logits)
        if not self._random and self._processors is None and self.matcher is None:
            # All rows are done at once, so that the host waits for the device a single time.
            best = finite_argmax(self._penalised(logits, known, paths)).tolist()
            return lambda row: require_token(int(best[row]), logits.dtype)
        tails = paths()

        def token(row: int) -> int:
            # Rows are processed on demand, because most rows after a wrong draft are never needed.
            if (forced := self._forced(known, tails[row])) is not None:
                return forced
            _, scores = self._processed(logits[row], known, tails[row])
            if not self._random:
                return _largest(scores, logits[row])
            if not self._tests:
                noisy = scores + self._noise_at(len(known), len(tails[row]), scores)
                if (best := int(finite_argmax(noisy[None]))) == NO_TOKEN:
                    raise _undrawable(logits[row])
                return best
            target_probs = scores.softmax(-1)[None]
            if not target_probs[0, 0].isfinite():  # one number that is none makes them all so
                raise _undrawable(logits[row])
            if row >= len(drawn):
                return int(draw(target_probs, self._generator))
            drafted, draft_probs = drawn[row]
            asked = to_device([drafted], logits.device)
            return int(rejection_sample(target_probs, draft_probs[None], asked, self._generator))

        return token

    def propose(
        self, logits: Tensor, known: list[int], path: Callable[[], list[int]], annealed: float | None = None
    ) -> Proposal:
        """Propose a draft token from a draft's `logits` [vocabulary]; `annealed` is the temperature of its nll.

        The distance between target and draft logits depends neither on the sampling temperature nor on filters. The nll
        is therefore computed from the choice's lead in logits over every other token. Near temperature 0, or where a
        filter leaves one token, drafts end where greedy drafts do.
        """
        if self.is_argmax:
            chosen = argmax(logits[None])
            if annealed is None:
                return Proposal(int(chosen), logits, 0.0)
            token, nll = with_nll(logits, chosen, annealed)
            return Proposal(token, logits, nll)
        tail = path()
        if not self._tests and (forced := self._forced(known, tail)) is not None:
            return Proposal(forced, logits, 0.0)
        plain, scores = self._processed(self._allowed(logits), known, tail, drafting=True)
        if self._tests:
            probs = scores.softmax(-1)
            # The lead is the most probable token's: how a draft goes on must not depend on which token was drawn.
            nll = _nll(lambda: plain.max() - plain, annealed)
            return Proposal(token=int(draw(probs[None], self._generator)), scores=probs, nll=nll, probs=probs)
        noise = self._noise_at(len(known), len(tail), scores)
        best = int(argmax((scores + noise)[None]))
        return Proposal(best, scores + noise, _nll(lambda: self._leads(plain, scores, noise, best), annealed))

    def _leads(self, plain: Tensor, scores: Tensor, noise: Tensor, choice: int) -> Tensor:
        """Lead of the choice over every token, in logits; all arguments are [vocabulary].

        `plain` are the logits and `scores` the filtered ones ÷ temperature. A kept token's lead is choice - token, both
        with noise. A filtered-out token leads only once it reaches the lowest kept logit. Its lead is the larger of
        that distance and the smaller of two: its lead with noise, and the distance from the choice to the highest
        logit that is filtered out. This is exact for top-k and approximate for other filters.
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
        """Lead of the choice after `known` over `token`, in logits, and whether rounding may explain it.

        `logits` is [vocabulary]; the position's noise is included. Rounding explains it if `token` becomes the choice
        once it rises by `within`, the choice falls by `within`, or both. Either change may move a token across a
        filter's edge.
        """
        logits = self._allowed(logits)
        plain, scores = self._processed(logits, known, [], drafting=True)
        noise = self._noise_at(len(known), 0, scores)
        choice = int(argmax((scores + noise)[None]))
        noisy = plain + noise * self._unit

        def chooses(rise: float, fall: float) -> bool:
            moved = logits.float().clone()
            moved[token] += rise
            moved[choice] -= fall
            return int(argmax((self._processed(moved, known, [], drafting=True)[1] + noise)[None])) == token

        near = chooses(within, 0.0) or chooses(0.0, within) or chooses(within, within)
        return max(0.0, float(noisy[choice] - noisy[token])), near

    def _processed(
        self, logits: Tensor, known: list[int], tail: list[int], drafting: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logits [vocabulary] in fp32 after the grammar and the penalty, and scores after the filters as well.

        Choices look at logits that the grammar was applied to here, or are the one token that it allows. The user's
        processors may be called once per token of the output only, so that drafts have another call.
        """
        raw = logits
        if self.matcher is not None:
            logits = self.matcher.masked(logits, known, tail)
        if self._processors is not None:
            if drafting:
                scores = self._processors.draft(logits, known, tail)
            else:
                scores = self._processors.target(logits, known, tail, raw)
            return torch.where(scores == -math.inf, logits.float(), scores * self._unit), scores
        plain = self._penalised(logits[None], known, lambda: [tail]).float()
        return plain[0], (self._filters(torch.empty(0), plain) if self._filters else plain)[0]

    def _allowed(self, logits: Tensor) -> Tensor:
        """`logits` [..., vocabulary] with minus infinity for the suppressed tokens."""
        return logits if self._suppressed is None else logits.index_fill(-1, self._suppressed, -math.inf)

    def _forced(self, known: Sequence[int], path: Sequence[int]) -> int | None:
        """The one token that the grammar allows; None if there are several, or processors count their calls."""
        if self.matcher is None or self._processors is not None:
            return None
        return self.matcher.forced(known, path)

    def _penalised(self, logits: Tensor, known: list[int], paths: Paths) -> Tensor:
        """Apply the repetition penalty to `logits` [n, vocabulary], given the tokens before each row."""
        return logits if self._seen is None else self._seen.penalised(logits, known, paths())

    def _noise_at(self, known: int, ahead: int, like: Tensor) -> Tensor:
        """Noise of the position `ahead` of the first `known` ones, the same for every caller; zeros if greedy."""
        if not self._random:
            return torch.zeros_like(like)
        while self._first + len(self._noise) <= known + ahead:
            noise = to_device(gumbel(like.shape[-1:], self._generator), like.device)
            if self._first + len(self._noise) < known:
                self._first += 1
            else:
                self._noise.append(noise)
        del self._noise[: known - self._first]
        self._first = known
        return self._noise[ahead]


def _largest(scores: Tensor, logits: Tensor) -> int:
    """The argmax of `scores` [vocabulary]. Raises NotFiniteError if it is not finite because `logits` are not.

    A user's processor may force a token by an infinite score.
    """
    token = int(finite_argmax(scores[None]))
    if token != NO_TOKEN:
        return token
    _require_finite(logits)
    return int(argmax(scores[None]))


def _undrawable(logits: Tensor) -> UserError:
    """The error about scores from which nothing can be drawn; `logits` [vocabulary] are the model's."""
    _require_finite(logits)
    return UserError("sampling: logits processors leave NaN, an infinite score or no token; change them")


def _require_finite(logits: Tensor) -> None:
    """Raise NotFiniteError if the largest of `logits` [vocabulary] is NaN or infinite."""
    if not logits.max().isfinite():
        raise not_finite(logits.dtype)


def _nll(leads: Callable[[], Tensor], annealed: float | None) -> float:
    """Negative log of the choice's share in a softmax of -`leads` ÷ `annealed`; 0 without a temperature."""
    return 0.0 if annealed is None else float((leads() / -annealed).logsumexp(-1))


def gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Gumbel noise on the generator's device: the argmax of log-probabilities plus noise is a draw.

    Uniform numbers are the midpoints of 2^24 equal parts of (0, 1). torch's own exponential draws may be nearly 0,
    which would beat any logit.
    """
    uniform = torch.rand(tuple(shape), generator=generator, device=generator.device).double().add_(2.0**-25)
    return uniform.log_().neg_().log_().neg_().float()


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token per row [n] from `probs` [n, vocabulary], which need not be normalised."""
    return (probs.log() + to_device(gumbel(probs.shape, generator), probs.device)).argmax(-1)


def rejection_sample(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Turn `tokens` [n] drawn from `draft_probs` into tokens distributed as `target_probs`, both [n, vocabulary].

    A token is accepted with probability min(1, target ÷ draft), else another is drawn from the excess of the target
    over the draft (Leviathan et al. 2023, algorithm 1).
    """
    asked = tokens[:, None]
    share = target_probs.gather(1, asked) / draft_probs.gather(1, asked)
    uniform = torch.rand(share.shape, generator=generator, device=generator.device)
    stands = to_device(uniform, share.device) < share
    if bool(stands.all()):
        return tokens
    beyond = (target_probs - draft_probs).clamp(min=0.0)
    # Rounding may leave no excess; the distributions are then equal.
    beyond = torch.where(beyond.sum(-1, keepdim=True) > 0.0, beyond, target_probs)
    return torch.where(stands[:, 0], tokens, draw(beyond, generator))
