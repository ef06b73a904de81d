"""DEL: drafts by the first layers, as many as give most tokens a layer."""

from __future__ import annotations

from torch import Tensor

from ssd_profiles.formulas import tokens_per_layer
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import Head, Work
from ssd_runtime.planning.plan import BasePlanner, Cycle, Plan
from ssd_runtime.planning.settings import DelSettings

FIRST_TOKENS = 8
"""Plain steps that every exit is looked at behind before one is chosen."""


class DelPlanner(BasePlanner):
    """The exit layer and draft length of highest TPL (KnapSpec eq. 2), every token drafted leaving there.

    An exit's token agreement comes from shadow tokens: what it would have predicted where the full model has just
    verified. Looking costs a pass through the head for every exit, so it is done every so many cycles.
    """

    def __init__(self, heads: ExitHeads, num_layers: int, settings: DelSettings) -> None:
        self._heads, self._layers, self._settings = heads, num_layers, settings
        # Exits with fitted heads and exits without would not be compared fairly.
        every = min(settings.every, max(1, num_layers // 2))
        exits = heads.fitted or range(every, num_layers, every)
        self._seen = dict.fromkeys(exits, (0.0, 0.0))
        """Layer to (tokens looked at, tokens it had right), old ones counting less."""
        self._cycles = 0
        self._looked = 0
        self._states: list[Tensor] | None = None
        """What the exits are to be looked at on."""

    @property
    def wants_states(self) -> bool:
        """Every so many cycles, and until there is something to go by."""
        return self._looked < FIRST_TOKENS or self._cycles % self._settings.refresh == 0

    def searching(self, context: int) -> Work[None]:
        """Look at what the exits would have said, where it is time to."""
        if self._states is None:
            return
        keep, states = self._settings.memory, self._states
        self._states = None
        targets, _ = yield Head(self._heads.carried(self._layers, states[-1]), normed=True, best=True)
        for layer, (looked, right) in self._seen.items():
            tokens, _ = yield Head(self._heads.carried(layer, states[2 * layer]), normed=True, best=True)
            self._seen[layer] = keep * looked + len(targets), keep * right + int((tokens == targets).sum())

    def plan(self, context: int, pending: int) -> Plan:
        """Draft from the best exit; a plain step until there is something to go by."""
        if not self._seen:
            return Plan("plain: the model has no layer to leave behind")
        if self._looked < FIRST_TOKENS:
            return Plan("plain: looking at every exit")
        rate, layer, length = max(
            (tokens_per_layer(right / max(looked, 1e-9), length, layer, self._layers), layer, length)
            for layer, (looked, right) in self._seen.items()
            for length in range(1, self._settings.max_draft + 1)
        )
        reason = f"exit behind layer {layer} of {self._layers}: {rate * self._layers:.2f}x in layers"
        return Plan(reason, EarlyExit(self._heads, (layer,), self._settings.confidence), length)

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Keep the states that the exits are to be looked at on."""
        self._cycles += 1
        self._looked += len(cycle.tokens) if states is not None else 0
        self._states = states
