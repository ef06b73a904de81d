"""The compile stages that fit exit heads and tune how each domain uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd_artifacts.bundle import EXITS
from ssd_artifacts.domain_config import ExitChoice
from ssd_artifacts.exits import ExitSet
from ssd_compiler.calibrate import Sample, middle_context, reference_states
from ssd_compiler.exits.fitting import exit_layers, fit_exits, held_back
from ssd_compiler.exits.tuning import exit_traces, tune_exits
from ssd_compiler.progress import Reporter
from ssd_compiler.search.stage import measured_on
from ssd_compiler.workspace import Store
from ssd_profiles.latency import LatencyTable
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads


@dataclass(frozen=True, slots=True)
class ExitStage:
    """Fits and tunes exit heads, with results kept in the workspace."""

    decoder: Decoder
    work: Store
    reporter: Reporter

    def fit(self, domains: Mapping[str, Sequence[Sample]], count: int) -> ExitSet:
        """Fit exit heads after `count` layers on most samples of all domains."""
        shape = self.decoder.shape
        parts = [held_back(samples) for samples in domains.values()]
        samples = [sample for fitted, _ in parts for sample in fitted]
        held = [sample for _, kept in parts for sample in kept]

        def run() -> bytes:
            with self.reporter.stage("fit exits", len(samples) + len(held)) as tick:
                return fit_exits(self.decoder, samples, held, exit_layers(shape.num_layers, count), tick).to_bytes()

        return ExitSet.from_file(str(self.work.file(EXITS, run)), shape.num_layers, shape.hidden)

    def tune(self, name: str, samples: Sequence[Sample], latency: LatencyTable, exits: ExitSet) -> ExitChoice:
        """Tune exits, width, annealing and threshold of a domain on samples that the heads were not fitted on."""
        layers = exits.layers
        total = self.decoder.shape.num_layers
        _, held = held_back(samples)
        context = middle_context(samples)

        def run() -> Any:
            with self.reporter.stage(f"{name}: tune exits", None):
                reference = reference_states(self.decoder, held)
                traces = exit_traces(ExitHeads(self.decoder, exits), reference, layers, total)
                return tune_exits(traces, layers, latency, context).model_dump(mode="json")

        choice = ExitChoice.model_validate(self.work.stage(f"exits-{name}-{measured_on(latency)}", run))
        self.reporter.note(
            f"{name}: --strategy exit would exit after layer {', '.join(map(str, choice.stops))}, "
            f"{choice.predicted_speedup:.2f}x predicted"
        )
        return choice
