"""From the states after the last sub-layer to logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ssd_profiles.mask import FULL
from ssd_runtime.devices.clock import WaitedLock
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.family.layer_kinds import setting
from ssd_runtime.model.head.draft_vocabulary import DraftVocabulary
from ssd_runtime.model.layer.norm import Norm
from ssd_runtime.weights.linear import Linear


class OutputHead:
    """The final norm and the projection to the vocabulary; calls of modules hold the decoder's lock.

    Results are on `device`. With `in_pairs`, a lone row runs as two equal ones (`alone_as_two`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        projection: Linear,
        device: torch.device,
        lock: WaitedLock,
        in_pairs: bool,
    ) -> None:
        config = model.config
        self._norm = Norm(model.model, family.final_norm, family.norm_offset)
        self._projection = projection
        self._hidden: int = config.hidden_size
        self._device = device
        self._lock = lock
        self._in_pairs = in_pairs
        self._cap = setting(config, family.logit_cap)  # no family has a divisor, too
        self._divisor = (setting(config, family.logit_divisor) or 1.0) / (
            setting(config, family.logit_multiplier) or 1.0
        )
        self.draft_vocabulary = DraftVocabulary(config.vocab_size)

    @property
    def scores_partly(self) -> bool:
        """Whether drafts score a part of the vocabulary at present."""
        return self.draft_vocabulary.serves(self._projection.natives)

    def norm(self, x: Tensor) -> Tensor:
        """States `x` [n, hidden] after the final norm, without the tokens that they may carry."""
        with self._lock:
            return alone_as_two(self._norm, x[:, : self._hidden], self._in_pairs).to(self._device)

    def __call__(self, normed: Tensor, bits: int = FULL, drafting: bool = False) -> Tensor:
        """Logits [n, vocabulary] of normed states, by a copy of the projection in `bits` if there is one.

        For `drafting` with the whole projection's weights, those of tokens outside of the `draft_vocabulary` may be
        minus infinity. A light copy takes too little time for the drafts that it would lose.
        """
        projection, cap = self._projection if bits == FULL else self._projection.light(bits), self._cap
        with self._lock:
            few = self.draft_vocabulary.head(self._projection.natives) if drafting and bits == FULL else None
            if few is None:
                logits = alone_as_two(lambda x: projection(x, cap=cap), normed, self._in_pairs).to(self._device)
            else:
                logits = few.fused(normed, None, None, cap)
        return logits if self._divisor == 1.0 else logits / self._divisor

    def saw(self, tokens: Sequence[int], answered: bool = True) -> None:
        """Let drafts score tokens that occur in an answer or a prompt, and their neighbours."""
        with self._lock:
            self.draft_vocabulary.update(tokens, answered)

    def refresh(self) -> bool:
        """Follow changes of the user's modules; returns whether there were any."""
        return any([self._norm.refresh(), self._projection.refresh()])


def alone_as_two(work: Callable[[Tensor], Tensor], x: Tensor, in_pairs: bool) -> Tensor:
    """Apply `work` to rows `x` [n, width]; with `in_pairs`, to a lone row and a copy of it, whose result is dropped.

    Kernels round one row differently from two, so bitwise mode runs no row alone.
    """
    return work(x.repeat(2, 1))[:1] if in_pairs and len(x) == 1 else work(x)
