"""Peers that a user might choose instead, on the same loaded weights: transformers' own ways to decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.harness.contenders import Decode, Stamps, Timed
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.models import LoadedModel

MakePeer = Callable[[LoadedModel], Decode]


def transformers(**options: Any) -> MakePeer:
    """Make greedy `model.generate(**options)` a contender."""

    def make(loaded: LoadedModel) -> Decode:
        from transformers.generation.streamers import BaseStreamer

        class Arrivals(BaseStreamer):
            def __init__(self, stamps: Stamps) -> None:
                self._stamps = stamps
                self._prompt = True

            def put(self, value: torch.Tensor) -> None:
                if not self._prompt:
                    self._stamps.add(value.numel())
                self._prompt = False

            def end(self) -> None:
                pass

        def decode(ids: list[int], limits: Limits) -> Timed:
            stamps = Stamps()
            prompt = torch.tensor([ids], device=loaded.model.device)
            out = loaded.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=limits.max_new_tokens,
                eos_token_id=sorted(limits.eos_ids),
                streamer=Arrivals(stamps),
                **options,
            )
            return stamps.timed(out[0, len(ids) :].tolist())

        return decode

    return make


def transformers_early_exit(loaded: LoadedModel) -> Decode:
    """Make assisted generation with early exit at half of the layers a contender."""
    return transformers(assistant_early_exit=loaded.model.config.num_hidden_layers // 2)(loaded)


PEERS: Mapping[str, MakePeer] = {
    "transformers": transformers(),
    "transformers-lookup": transformers(prompt_lookup_num_tokens=10),
    "transformers-early-exit": transformers_early_exit,
}
