"""Makes the planners of streams: the requests of one stream share what their strategy learns."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache, cached_property
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_profiles.latency import LatencyTable
from ssd_runtime.engine.latency_tables import LatencyTables
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.registry import check_strategy, find_strategy, read_settings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs

MAX_STREAMS = 64
"""Number of streams whose statistics are kept; beyond it, the least recently used stream is dropped."""


class StreamPlanners:
    """Makers of planners for one decoder, with or without a bundle.

    One bundle's exit heads are shared by all streams.
    """

    def __init__(self, decoder: Decoder, bundle: Bundle | None, tables: LatencyTables) -> None:
        self._decoder = decoder
        self._bundle = bundle
        self._tables = tables
        self._known: OrderedDict[tuple[str, str, Any], MakePlanner] = OrderedDict()
        """Makers by (stream, strategy, parameters), the least recently used first."""

    def of_stream(self, stream: str, strategy: str, parameters: Any) -> MakePlanner:
        """The maker that all requests of a stream with these settings share. Raises UserError as `new` does."""
        key = stream, strategy, parameters
        if key not in self._known:
            self._known[key] = self.new(strategy, parameters)
            while len(self._known) > MAX_STREAMS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def new(self, strategy: str, parameters: Any) -> MakePlanner:
        """A maker for a stream of its own; `parameters` are by default the strategy's defaults.

        Makes light copies of the weights and measures this device, where the strategy needs that. If this device is to
        be measured later, the maker begins with guesses alone and changes once it has been. Raises UserError if the
        strategy is unknown or needs a bundle.
        """
        check_strategy(strategy, self._bundle is not None)
        needs = find_strategy(strategy)
        parameters = read_settings(strategy, []) if parameters is None else parameters
        if not (needs.begins_with_guesses and self._tables.is_later):
            return self._measured(strategy, parameters)
        light = getattr(parameters, "light", None) if needs.uses_masks else False
        begin = self._made(strategy, parameters, self._tables.provisional_for(light), guesses_alone=True)

        @cache
        def later() -> MakePlanner:
            return self._measured(strategy, parameters)

        return lambda: (begin if self._tables.is_later else later())()

    def _measured(self, strategy: str, parameters: Any) -> MakePlanner:
        """A maker that plans with this device's own table."""
        needs = find_strategy(strategy)
        light = getattr(parameters, "light", None)
        if needs.needs_light or (light and not needs.uses_masks):
            self._tables.lighten()
        latency = None
        if needs.uses_masks:
            latency = self._tables.table_for_masks(light)
        elif needs.needs_latency:
            latency = self._tables.dense_table()
        return self._made(strategy, parameters, latency)

    def _made(
        self, strategy: str, parameters: Any, latency: LatencyTable | None, guesses_alone: bool = False
    ) -> MakePlanner:
        return make_strategy(
            StrategyInputs(
                name=strategy,
                settings=parameters,
                decoder=self._decoder,
                bundle=self._bundle,
                latency=latency,
                heads=self._exit_heads,
                guesses_alone=guesses_alone,
            )
        )

    def use_bundle(self, bundle: Bundle) -> None:
        """Use another bundle for new streams, and forget the streams that there are."""
        self._bundle = bundle
        self.__dict__.pop("_exit_heads", None)
        self._known.clear()

    @cached_property
    def _exit_heads(self) -> ExitHeads:
        """The bundle's exit heads on the decoder's device."""
        return ExitHeads(self._decoder, self._bundle.exits if self._bundle is not None else None)
