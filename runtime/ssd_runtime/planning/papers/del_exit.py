"""DEL drafts by the first layers, as many as give the most tokens per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_profiles.formulas import tokens_per_layer
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import Head, Read, Work
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.planning.settings import DelSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs

FIRST_TOKENS = 8
"""Tokens of plain steps on which every exit is evaluated before one is chosen."""


class DelPlanner(Planner):
    """Plans the exit layer and draft length of the highest TPL (KnapSpec eq. 2); every drafted token exits there.

    An exit's token agreement comes from shadow tokens: its predictions for tokens that the full model has just
    verified. They cost a pass through the head per exit, so exits are evaluated only every `refresh` cycles.
    """

    def __init__(self, heads: ExitHeads, num_layers: int, settings: DelSettings) -> None:
        self._heads = heads
        self._layers = num_layers
        self._settings = settings
        # Exits with fitted heads and exits without cannot be compared fairly.
        every = min(settings.every, max(1, num_layers // 2))
        exits = heads.fitted or range(every, num_layers, every)
        self._seen = dict.fromkeys(exits, (0.0, 0.0))
        """Layer to (tokens evaluated, tokens predicted right), both decayed."""
        self._cycles = 0
        self._looked = 0
        """Tokens whose states were kept so far."""
        self._states: list[Tensor] | None = None
        """States [tokens, hidden] to evaluate the exits on next; None if that is not due."""

    @property
    def wants_states(self) -> bool:
        """Whether an evaluation of the exits is due; it always is until `FIRST_TOKENS` tokens are known."""
        return self._looked < FIRST_TOKENS or self._cycles % self._settings.refresh == 0

    def searching(self, context: int) -> Work[None]:
        """Evaluate the exits' predictions if states were kept for that."""
        if self._states is None or not self._seen:
            return
        keep = self._settings.memory
        states = self._states
        self._states = None
        targets, _ = yield Head(self._heads.carried(self._layers, states[-1]), normed=True, best=True)
        matches = list[Tensor]()
        for layer in self._seen:
            tokens, _ = yield Head(self._heads.carried(layer, states[2 * layer]), normed=True, best=True)
            matches.append((tokens == targets).sum())
        counts = yield Read(torch.stack(matches))
        for (layer, (looked, right)), count in zip(list(self._seen.items()), counts, strict=True):
            self._seen[layer] = keep * looked + len(targets), keep * right + count

    def plan(self, context: int) -> Plan:
        """Draft from the best exit; a plain step until `FIRST_TOKENS` tokens were evaluated."""
        if not self._seen:
            return Plan("plain: the model has no layer to leave behind")
        if self._looked < FIRST_TOKENS:
            return Plan("plain: looking at every exit")
        rate, layer, length = max(
            (self._rate(layer, length), layer, length)
            for layer in self._seen
            for length in range(1, self._settings.max_draft + 1)
        )
        reason = f"exit after layer {layer} of {self._layers}: {rate * self._layers:.2f}x in layers"
        return Plan(reason, EarlyExit(self._heads, (layer,), self._settings.confidence), length)

    def _rate(self, layer: int, length: int) -> float:
        """TPL of drafts of `length` tokens that exit after `layer`."""
        looked, right = self._seen[layer]
        return tokens_per_layer(
            token_agreement=right / max(looked, 1e-9),
            draft_length=length,
            exit_layer=layer,
            num_layers=self._layers,
        )

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Keep the states that the exits are evaluated on."""
        self._cycles += 1
        self._looked += len(cycle.tokens) if states is not None else 0
        self._states = states


def make_del(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of DEL planners."""
    heads = inputs.make_exit_heads()
    return lambda: DelPlanner(heads, inputs.num_layers, inputs.settings)
