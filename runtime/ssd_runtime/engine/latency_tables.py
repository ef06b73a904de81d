"""The latency tables of a device that planners calculate with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.files import cache_folder
from ssd_profiles.latency import LatencyTable
from ssd_runtime.devices.memory import guard_memory
from ssd_runtime.loading.draft_copies import make_copies
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.kernel_choice import outgrows_cache
from ssd_runtime.profiling.latency import (
    FIRST_QUERIES,
    BusyMachineError,
    bundled_latency,
    coarse_latency,
    keep_latency,
    known_latency,
    measure_latency,
)
from ssd_runtime.profiling.light import with_light
from ssd_runtime.profiling.other_work import is_swamped, others_during, others_text, working_threads
from ssd_runtime.weights.draft_bits import DraftBits

LOOK_SECONDS = 0.5
"""Seconds over which other processes' use of the processors is measured."""


class LatencyTables:
    """The latency tables of one decoder: a bundle's, else those that were measured here, now or on an earlier run.

    `model_key` names the model in the cache of measurements. `say` receives a sentence before this device is measured,
    before weights are copied for drafts, and where the device is too busy to be measured; this run then plans with a
    coarse table, which is not kept. With `later` this device is measured when `measure` is called, for strategies that
    can begin with the `provisional` table.
    """

    def __init__(
        self,
        decoder: Decoder,
        bundle: Bundle | None,
        model_key: str,
        draft_bits: DraftBits,
        say: Callable[[str], object] | None = None,
        later: bool = False,
    ) -> None:
        self._decoder = decoder
        self._bundle = bundle
        self._model_key = model_key
        self._draft_bits = draft_bits
        self._say = say or (lambda _: None)
        self._later = later
        self._light_later = False
        """Whether a strategy that began with the provisional table will use light copies."""
        self._between: Callable[[], object] | None = None
        self._copied = False
        """Whether light copies were made, as far as there can be any."""

    @cached_property
    def table(self) -> LatencyTable:
        """This device's table: known, or measured now. A bundle's is used only if its layer kinds are the model's."""
        if (known := self._known()) is not None:
            return known
        others, processors = others_during(LOOK_SECONDS), os.cpu_count() or 1
        with guard_memory("measuring this device", self._decoder.device):
            if is_swamped(others, working_threads(self._decoder.device), processors):
                self._say_busy(others_text(others, processors))
                return self.__dict__.get("provisional") or coarse_latency(self._decoder)
            self._say(
                "first run of this model with these settings: measuring this device for about half a minute; later "
                "runs read the result"
            )
            table = self._sound_or_coarse(lambda: measure_latency(self._decoder, between=self._between))
        if not keep_latency(self._decoder, self._model_key, table):
            self._say(
                f"{cache_folder()} cannot be written, so every run measures anew; set SSD_CACHE to a folder that can be"
            )
        return table

    @cached_property
    def _is_unknown(self) -> bool:
        return self._known() is None

    def _known(self) -> LatencyTable | None:
        tables = self._bundle.latency if self._bundle is not None else {}
        return known_latency(self._decoder, tables=tables, model_key=self._model_key)

    @cached_property
    def provisional(self) -> LatencyTable:
        """A coarse table of few rows, from a second or so. It prices guesses well enough, and is never kept."""
        with guard_memory("measuring this device", self._decoder.device):
            return coarse_latency(self._decoder, FIRST_QUERIES, budget_seconds=0.0)

    @property
    def is_later(self) -> bool:
        """Whether strategies begin with the provisional table, because this device is to be measured later."""
        return self._later and self._is_unknown

    @property
    def must_be_measured(self) -> bool:
        """Whether a strategy has begun with the provisional table and waits for `measure`."""
        return self._later and "provisional" in self.__dict__

    def provisional_for(self, light: bool | None) -> LatencyTable:
        """The table that a strategy begins with; `light` is as in `table_for_masks`."""
        self._light_later |= self._may_be_light(light)
        return self.provisional

    def measure(self, between: Callable[[], object] | None = None) -> None:
        """Measure this device, and light copies if a strategy wants them; both are kept once they are complete.

        `between` is called between two works, about ten times per second. It may decode, and raise an error that ends
        measuring with nothing kept of what was begun.
        """
        self._between = between
        try:
            _ = self.table
            if self._light_later:
                _ = self.light_table
            self._later = False
        finally:
            self._between = None

    @cached_property
    def light_table(self) -> LatencyTable | None:
        """The table with the costs of light copies, measured now or on an earlier run; None without copies.

        Models that fit a processor's cache get no copies, because reading weights is not what their steps wait for.
        """
        if not (self._decoder.light.kernels or outgrows_cache(self._decoder)) or not self.lighten():
            return None
        return self._sound_or_coarse(lambda: with_light(self.table, self._decoder, self._model_key, self._between))

    def _sound_or_coarse(self, measure: Callable[[], LatencyTable]) -> LatencyTable:
        """The measured table, or the coarse one of a machine that is too busy."""
        try:
            return measure()
        except BusyMachineError as error:
            self._say_busy(str(error))
            return error.coarse

    def _say_busy(self, seen: str) -> None:
        self._say(
            f"this device cannot be measured now ({seen}); its latencies are coarse until another run measures "
            "again; --threads leaves processors to other programs"
        )

    def lighten(self) -> bool:
        """Make light copies of the weights, unless they exist; returns whether there are any."""
        if not self._copied:
            self._copied = True
            make_copies(self._decoder, self._draft_bits, self._say)
        return bool(self._decoder.light.kernels)

    def dense_table(self) -> LatencyTable:
        """The table without light copies: without their costs no mask is expected to gain by light sub-layers."""
        return replace(self.table, light={})

    def table_for_masks(self, light: bool | None) -> LatencyTable:
        """The table of a strategy that drafts with masks, with the costs of light copies if its drafts may use them.

        `light` says whether they may; with None they may where the bundle has masks with light sub-layers.
        """
        # The device is measured before copies take memory.
        dense = self.dense_table()
        return (self.light_table if self._may_be_light(light) else None) or dense

    def _may_be_light(self, light: bool | None) -> bool:
        in_masks = self._bundle is not None and bool(self._bundle.light_masks)
        return in_masks if light is None else light

    def use_bundle(self, bundle: Bundle) -> None:
        """Use another bundle's tables from now on, where it has this device's."""
        known = self.__dict__.get("table")
        self._bundle = bundle
        self.__dict__.pop("light_table", None)
        if known is not None:
            self.use(bundled_latency(self._decoder, bundle.latency) or known)

    def use(self, table: LatencyTable) -> None:
        """Use a table in place of this device's; the costs of light copies follow from it anew."""
        self.table = table
        self._later = False
        self.__dict__.pop("light_table", None)
