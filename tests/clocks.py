"""Clocks that tests set the pace of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssd_compiler.settings import CompileSettings
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.embedding import Embedding
from ssd_runtime.model.sublayers.sublayers import SubLayers


def take_any_machine(patch: pytest.MonkeyPatch) -> None:
    """Let measurements be taken as they are in this process, whatever other processes do, and be short."""
    for module in ("latency", "light"):
        patch.setattr(f"ssd_runtime.profiling.{module}.MAX_ROUNDS", 3)
    for module in ("ssd_runtime.profiling.latency", "ssd_compiler.stages", "ssd_compiler.search.stage"):
        patch.setattr(f"{module}.broken_law", lambda _: None)
    patch.setattr("ssd_runtime.profiling.light.broken_light_law", lambda _: None)
    for module in ("ssd_compiler.patience", "ssd_runtime.engine.latency_tables"):
        patch.setattr(f"{module}.others_during", lambda _: 0.0)


def let_compiles_be_short(patch: pytest.MonkeyPatch) -> None:
    """Let the answers of compiles be short and timed seldom, which no option asks for."""
    own, fewer = CompileSettings.__init__, {"max_new_tokens": 24, "search_prompts": 4, "validation_prompts": 3}
    patch.setattr(CompileSettings, "__init__", lambda self, **given: own(self, **{**fewer, **given}))
    patch.setattr("ssd_compiler.validate.ROUNDS", 1)
    patch.setattr("ssd_compiler.load_validation.ROUNDS", 2)


def let_forwards_take_the_same(patch: pytest.MonkeyPatch) -> None:
    """Let every forward of a decoder take a millisecond, and all else none, by the stopwatches of decoding."""
    now, run = [0.0], Decoder.run

    def paced(*args: Any, **options: Any) -> torch.Tensor:
        now[0] += 1e-3
        return run(*args, **options)

    patch.setattr(Decoder, "run", paced)
    patch.setattr("ssd_runtime.devices.clock.perf_counter", lambda: now[0])


class StandInMachine:
    """Stands in for the time that a decoder takes on a machine where others work too: no pass is really made.

    A pass of n rows through an attention block, an MLP block, the head and the embeddings takes `ATTENTION`, `MLP`,
    `HEAD` and `EMBEDDING` seconds and a hundredth more for each row, times the `slowness` at that time.
    """

    ATTENTION, MLP, HEAD, EMBEDDING = 8e-4, 1.1e-3, 2e-3, 2e-4
    DRAFT_HEAD = 0.25
    """The head of a draft ÷ the whole one."""
    LIGHT_ATTENTION, LIGHT_MLP, LIGHT_HEAD = 0.6, 0.5, 0.7
    """Blocks on light copies of their weights ÷ in full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slowness: Callable[[float], float] = lambda _: 1.0) -> None:
        self.slowness = slowness
        self.time = 0.0
        monkeypatch.setattr(
            SubLayers,
            "_attention",
            lambda _, layer, x, batch, bits: self._spend(self.ATTENTION * (self.LIGHT_ATTENTION if bits else 1.0), x),
        )
        monkeypatch.setattr(
            SubLayers,
            "_mlp",
            lambda _, layer, x, bits, inputs: self._spend(self.MLP * (self.LIGHT_MLP if bits else 1.0), x),
        )

        def logits(_: Decoder, x: torch.Tensor, bits: int = 0, drafting: bool = False) -> torch.Tensor:
            share = (self.LIGHT_HEAD if bits else 1.0) * (self.DRAFT_HEAD if drafting else 1.0)
            return self._spend(self.HEAD * share, x)

        monkeypatch.setattr(Decoder, "logits", logits)
        embed = Embedding.__call__
        monkeypatch.setattr(Embedding, "__call__", lambda own, *ids: self._spend(self.EMBEDDING, embed(own, *ids)))
        monkeypatch.setattr("ssd_runtime.profiling.timer.seconds", self.seconds)

    def seconds(self, work: Callable[[], object], device: torch.device) -> float:
        """The seconds of a work."""
        began = self.time
        work()
        return self.time - began

    def step_seconds(self, rows: int, layers: int) -> float:
        """Seconds of a whole step on the quiet machine."""
        return (1 + rows / 100) * (layers * (self.ATTENTION + self.MLP) + self.HEAD + self.EMBEDDING)

    def _spend(self, seconds: float, x: torch.Tensor) -> torch.Tensor:
        self.time += (1 + len(x) / 100) * seconds * self.slowness(self.time)
        return x
