"""Peers that a user might choose instead, run as documented by their authors on the same loaded weights.

Each entry of `PEERS` makes a decoder of a loaded model, or raises Unavailable with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch

from bench.harness.contenders import Decode, Stamps, Timed, Unavailable
from ssd_runtime.engine.sequence.output import Limits
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


def economize(make_config: Callable[[Any, int], Any], cycle: int) -> MakePeer:
    """Make a technique of `economize` a contender, without training, with `cycle` drafts per verification."""

    def make(loaded: LoadedModel) -> Decode:
        library: Any = _imported("economize")
        techniques = _imported("economize.techniques")
        config = make_config(techniques, loaded.model.config.num_hidden_layers)
        decoding = library.DecodeConfig(cycle_length=cycle)
        engine = library.apply(loaded.model, config, decoding=decoding)

        def decode(ids: list[int], limits: Limits) -> Timed:
            first: list[float] = []
            watch = engine.add_verify_observer(lambda _: first.append(perf_counter()))
            began = perf_counter()
            try:
                tokens = engine.decode(torch.tensor(ids), limits.max_new_tokens, stop=set(limits.eos_ids)).tokens
            finally:
                watch.remove()
            ended = perf_counter()
            # The first exact pass is the prefill, which yields one token.
            return Timed(
                token_ids=tokens.tolist(),
                first_seconds=first[0] - began,
                seconds=ended - first[0],
                counted=len(tokens) - 1,
            )

        return decode

    return make


def flashspec(loaded: LoadedModel) -> Decode:
    """Make `flashspec` with its n-gram drafter a contender."""
    library = _imported("flashspec")
    parts = _imported("flashspec.engine")
    device = loaded.model.device
    gamma = 4
    prefills: list[float] = []

    class Target(parts.TargetModel):  # type: ignore[name-defined]
        def begin(self, prompt: Any) -> Any:
            began = perf_counter()
            result = super().begin(prompt)
            prefills.append(perf_counter() - began)
            return result

    config = library.FlashSpecConfig(device=str(device), sampling=library.SamplingConfig(temperature=0.0, gamma=gamma))
    target = Target("loaded", device, loaded.model.dtype, model=loaded.model)
    engine = library.SpeculativeEngine(config, [parts.NgramDrafter()], target, arms=[parts.ArmSpec(0, gamma)])

    def decode(ids: list[int], limits: Limits) -> Timed:
        prefills.clear()
        began = perf_counter()
        out = engine.generate(torch.tensor([ids]), limits.max_new_tokens, eos_token_ids=sorted(limits.eos_ids))
        tokens = out.output_ids[0, : out.n_tokens_generated].tolist()
        # Its prefill yields no token; the first one comes with the first verification.
        return Timed(
            token_ids=tokens,
            first_seconds=prefills[0],
            seconds=perf_counter() - began - prefills[0],
            counted=len(tokens),
        )

    return decode


PEERS: Mapping[str, MakePeer] = {
    "transformers": transformers(),
    "transformers-lookup": transformers(prompt_lookup_num_tokens=10),
    "transformers-early-exit": transformers_early_exit,
    "economize-lookup": economize(lambda techniques, _: techniques.lookup.LookupConfig(), 6),
    "economize-layer-skip": economize(
        lambda techniques, layers: techniques.layer_skip.LayerSkipConfig(
            num_skip=round(0.4 * layers), search="uniform"
        ),
        4,
    ),
    "economize-early-exit": economize(
        lambda techniques, layers: techniques.early_exit.EarlyExitConfig(exit_layer=layers // 2, head="shared"), 4
    ),
    "flashspec-lookup": flashspec,
}


def _imported(name: str) -> Any:
    from importlib import import_module

    try:
        module = import_module(name)
        if name == "economize.techniques":
            for part in ("lookup", "layer_skip", "early_exit"):
                import_module(f"{name}.{part}")
    except ImportError as error:
        raise Unavailable(
            f"{name.partition('.')[0]} is not installed ({error}); pip install '.[bench]' in a clone"
        ) from None
    return module
