"""Peers that a user might choose instead, on the same loaded weights: transformers' own ways to decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.harness.contenders import Decode, Stamps, Timed
from ssd_runtime import Engine

MakePeer = Callable[[Engine], Decode]


def transformers(**options: Any) -> MakePeer:
    """Make greedy `model.generate(**options)` a contender."""

    def make(engine: Engine) -> Decode:
        from transformers.generation.streamers import BaseStreamer

        model: Any = engine.loaded.model

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

        def decode(ids: list[int], new: int) -> Timed:
            stamps = Stamps()
            prompt = torch.tensor([ids], device=model.device)
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=new,
                eos_token_id=sorted(engine.loaded.eos_ids),
                streamer=Arrivals(stamps),
                **options,
            )
            return stamps.timed(out[0, len(ids) :].tolist())

        return decode

    return make


def transformers_early_exit(engine: Engine) -> Decode:
    """Make assisted generation with early exit at half of the layers a contender."""
    return transformers(assistant_early_exit=engine.loaded.model.config.num_hidden_layers // 2)(engine)


PEERS: Mapping[str, MakePeer] = {
    "transformers": transformers(),
    "transformers-lookup": transformers(prompt_lookup_num_tokens=10),
    "transformers-early-exit": transformers_early_exit,
}
