"""What one request owns: its cache and how much of it is committed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SkipMask
from ssd_runtime.decoder import Decoder

PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Prefill:
    """What the pass over a prompt leaves behind: states behind the final norm, each [hidden]."""

    last: Tensor
    """Of the prompt's last token: its logits choose the first new token, and it is the `last` feature."""
    mean: Tensor
    """Mean over the prompt's tokens: the `mean` feature."""
    tokens: int

    def feature(self, name: str) -> Tensor:
        """The routing feature, `last` or `mean`, in fp32 on the CPU."""
        return (self.last if name == "last" else self.mean).float().cpu()


class Session:
    """A sequence being decoded: `committed` slots of the cache hold full-model keys and values of its tokens.

    Forwards write at and past `committed`; only `commit` moves it, so that what a draft or a rejected token wrote
    is overwritten by the next forward.
    """

    def __init__(self, decoder: Decoder) -> None:
        decoder.refresh()
        self.decoder = decoder
        self.cache = decoder.new_cache()
        self.committed = 0

    @torch.inference_mode()
    def prefill(self, ids: list[int], behind: Prefill | None = None) -> Prefill:
        """Run the full model over a prompt from position 0, or over the rest of one `behind` its prefilled beginning.

        Raises UserError when the prompt is empty or leaves no room to decode.
        """
        self.committed = behind.tokens if behind is not None else 0
        total, limit = self.committed + len(ids), self.decoder.shape.max_context
        if not ids:
            raise UserError("prompt: it is empty; give at least one token")
        if total >= limit:
            raise UserError(
                f"prompt: {total} tokens, but this model's context holds {limit}, the answer included; "
                "shorten the prompt"
            )
        summed = behind.mean * behind.tokens if behind is not None else torch.zeros((), device=self.decoder.device)
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            normed = self.decoder.norm(self.forward(chunk))
            summed = summed + normed.sum(0, dtype=torch.float32)
            self.commit(len(chunk))
        return Prefill(normed[-1], summed / total, total)

    def fork(self) -> Session:
        """Another session that has the same tokens committed."""
        other = Session(self.decoder)
        other.cache.copy_from(self.cache, self.committed)
        other.commit(self.committed)
        return other

    @torch.inference_mode()
    def forward(
        self,
        ids: list[int],
        mask: SkipMask | None = None,
        ahead: int = 0,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """States [n, hidden] behind the last sub-layer for `ids` at `ahead` positions past the committed ones.

        With `states`, the state before the first and behind every sub-layer is appended to it.
        """
        start = self.committed + ahead
        self.cache.reserve(start + len(ids))
        x = self.decoder.embed(ids)
        if states is not None:
            states.append(x)
        return self.decoder.run(x, self.cache, self.decoder.span(start, len(ids)), mask, states=states)

    def rewind(self, prompt: Prefill) -> None:
        """Forget all tokens behind the prompt that was last prefilled."""
        self.committed = prompt.tokens

    def commit(self, tokens: int) -> None:
        """Count `tokens` more slots as committed."""
        self.committed += tokens
