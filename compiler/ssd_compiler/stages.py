"""The stages of a compile, each kept in the workspace when it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any

import numpy as np

from ssd_artifacts.anchors import AnchorSet
from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_record import MIXTURE, Choice, DomainRecord, FrontierEntry, SearchCost, Validation
from ssd_artifacts.exits import ExitSet
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_compiler.anchors import build_anchors
from ssd_compiler.calibrate import Sample, continue_prompts, features_of, middle_context, reference_states, samples_of
from ssd_compiler.cluster_stage import ClusterStage
from ssd_compiler.exit_stage import ExitStage
from ssd_compiler.progress import Reporter
from ssd_compiler.prompts import DomainPrompts, PromptPool, read_pool, split_pool
from ssd_compiler.report import html_report, json_report
from ssd_compiler.search import SearchBounds, SearchResult, search
from ssd_compiler.settings import CompileSettings
from ssd_compiler.validate import validate
from ssd_compiler.workspace import Workspace
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.decoder import Decoder
from ssd_runtime.generate import Limits
from ssd_runtime.models import LoadedModel
from ssd_runtime.planning.throughput import Entry, best_option
from ssd_runtime.profiler import device_key, measure_latency


@dataclass(slots=True)
class Stages:
    """The stages of one compile, and what they all need."""

    settings: CompileSettings
    loaded: LoadedModel
    decoder: Decoder
    fingerprint: ModelFingerprint
    work: Workspace
    reporter: Reporter
    base: Bundle | None = None
    """A bundle that the new domains join."""
    began: float = field(default_factory=perf_counter)
    given: CompileSettings = field(init=False)
    """The settings as they were before domains were found."""

    def __post_init__(self) -> None:
        """Raises UserError when the new domains cannot join the base."""
        self.given = self.settings
        if self.base is not None:
            self.base.model.require_same_model(self.fingerprint, str(self.settings.base))
            if self.base.model.dtype != self.fingerprint.dtype:
                raise UserError(
                    f"{self.settings.base}: compiled in {self.base.model.dtype}, the model is loaded in "
                    f"{self.fingerprint.dtype}; give --dtype"
                )

    def latency(self) -> LatencyTable:
        """Measure what every sub-layer costs on this device, unless the base knows."""
        known = self.base.latency.get(device_key(self.decoder).slug()) if self.base is not None else None
        if known is not None:
            return known

        def measure() -> str:
            with self.reporter.stage("measure latency", None):
                return measure_latency(self.decoder).to_json()

        return LatencyTable.from_json(self.work.stage("latency", measure))

    def find_domains(self) -> tuple[str, ...]:
        """The new domains' names; those found in unlabelled prompts become files of the workspace.

        Raises UserError when one found has the name of a domain that the base has.
        """
        if self.settings.clusters is None:
            return self.settings.new_domains
        stage = ClusterStage(self.loaded, self.decoder, self.work, self.reporter)
        self.settings = replace(self.settings, domain_files=stage.find(self.settings))
        for name in self.settings.new_domains:
            if self.base is not None and name in self.base.domains:
                raise UserError(f"domain {name!r}: {self.settings.base} has it already; rename the --domain-file")
        return self.settings.new_domains

    def prompts(self, names: Sequence[str]) -> dict[str, DomainPrompts]:
        """Read every domain's prompts, and only then split them: search, anchors, validation."""

        def read() -> list[dict[str, Any]]:
            return [asdict(read_pool(name, self.settings, self.loaded, self.reporter.warn)) for name in names]

        def split(pool: PromptPool) -> dict[str, Any]:
            def survey(prompts: list[list[int]]) -> list[dict[str, list[float]]]:
                with self.reporter.stage(f"{pool.name}: features", len(prompts)) as tick:
                    return features_of(self.decoder, prompts, tick)

            return asdict(split_pool(pool, self.settings, survey))

        pools = [PromptPool(**pool) for pool in self.work.stage("pools", read)]
        return {
            pool.name: DomainPrompts(**self.work.stage(f"prompts-{pool.name}", partial(split, pool))) for pool in pools
        }

    def calibrate(self, prompts: DomainPrompts) -> list[Sample]:
        """Let the full model continue the search prompts."""

        def generate() -> Any:
            with self.reporter.stage(f"{prompts.name}: calibrate", len(prompts.search)) as tick:
                eos = self.loaded.eos_ids
                return continue_prompts(self.decoder, prompts.search, prompts.max_new_tokens, eos, tick)

        return samples_of(self.work.stage(f"calibration-{prompts.name}", generate), prompts.name)

    def exits(self, samples: dict[str, list[Sample]]) -> ExitSet | None:
        """Fit exit heads on all domains together; a base's stay as they are."""
        if self.base is not None and self.base.exits is not None:
            return self.base.exits
        if not self.settings.exits:
            return None
        return self._exit_stage.fit(samples, self.settings.exits, self.settings.exit_epochs)

    def domain(
        self,
        name: str,
        samples: list[Sample],
        prompts: DomainPrompts,
        latency: LatencyTable,
        exits: ExitSet | None,
    ) -> DomainRecord:
        """Search a domain's masks and confirm the best of them by timed decoding; tune its exits."""
        found = self._search(name, samples, latency)
        confirmed = self._validate(name, found, prompts, latency)
        choice = Choice.model_validate(confirmed["choice"]) if confirmed else None
        validation = Validation.model_validate(confirmed["validation"]) if confirmed else None
        pays = validation is not None and validation.speedup_interval[0] > 1.0
        record = _record(name, found, choice, validation, pays)
        if exits is None:
            return record
        return record.model_copy(update={"exit": self._exit_stage.tune(name, samples, latency, exits)})

    def mixture(self, samples: dict[str, list[Sample]], latency: LatencyTable) -> dict[str, DomainRecord]:
        """Search one frontier for all domains together, an equal number of samples from each.

        A single domain has none. A base's stays: the samples of its domains are not in the bundle.
        """
        if self.base is not None:
            kept = "kept as it is there" if MIXTURE in self.base.domains else "none, as there"
            self.reporter.note(f"{MIXTURE}: {kept}; compile all domains together for one over all of them")
            return {}
        if len(samples) < 2:
            return {}
        total = max(len(some) for some in samples.values())
        share = max(1, total // len(samples))
        mixed = [sample for some in samples.values() for sample in some[:share]]
        found = self._search(MIXTURE, mixed, latency)
        finalists = self._finalists(found, latency)
        if not finalists:
            return {MIXTURE: _record(MIXTURE, found, None, None, False)}
        entry, option = finalists[0]
        choice = Choice(
            entry=entry,
            draft_length=option.draft_length,
            threshold=option.threshold,
            predicted_speedup=round(option.speedup, 4),
        )
        return {MIXTURE: _record(MIXTURE, found, choice, None, option.speedup > 1.0)}

    def anchors(self, prompts: dict[str, DomainPrompts], samples: dict[str, list[Sample]]) -> AnchorSet:
        """Pick each domain's anchors and the out-of-domain threshold."""
        feature = self.base.anchors.feature if self.base is not None else self.settings.feature

        def measure(name: str) -> Any:
            asked = prompts[name].asked
            with self.reporter.stage(f"{name}: anchors", len(asked)) as tick:
                return prompts[name].anchor_features + (features_of(self.decoder, asked, tick) if asked else [])

        pool = {name: self.work.stage(f"anchors-{name}", partial(measure, name)) for name in prompts}
        return build_anchors(
            {name: np.asarray([row[feature] for row in rows], np.float32) for name, rows in pool.items()},
            {name: np.asarray([s.features[feature] for s in some], np.float32) for name, some in samples.items()},
            feature,
            self.settings.anchors,
            self.settings.seed,
            base=self.base.anchors if self.base is not None else None,
        )

    def bundle(
        self, latency: LatencyTable, records: dict[str, DomainRecord], anchors: AnchorSet, exits: ExitSet | None
    ) -> Bundle:
        """Put everything together, with the reports."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        seconds = perf_counter() - self.began
        tables = {latency.device.slug(): latency}
        if self.base is not None:
            records, tables = self.base.domains | records, self.base.latency | tables
        # The mixture last, where people look for it.
        records = {name: records[name] for name in sorted(records, key=lambda name: name == MIXTURE)}
        report = json_report(self.given, self.fingerprint, latency, records, seconds)
        return Bundle(
            version("ssd-decoding"),
            created,
            self.fingerprint,
            records,
            anchors,
            tables,
            {"report.json": report, "report.html": html_report(self.fingerprint, latency, records, created)},
            exits,
        )

    @property
    def _exit_stage(self) -> ExitStage:
        return ExitStage(self.decoder, self.work, self.reporter)

    def _search(self, name: str, samples: list[Sample], latency: LatencyTable) -> SearchResult:
        settings = self.settings
        context = middle_context(samples)
        mixed = len(settings.new_domains) > 1 and self.base is None
        searches = len(settings.new_domains) + mixed
        timed = settings.budget_seconds is not None
        # The mixture is the fallback for prompts of no domain: half the effort.
        evaluations = settings.evaluations // 2 if name == MIXTURE else settings.evaluations
        bounds = SearchBounds(
            10_000 if timed else evaluations,
            settings.budget_seconds / searches if settings.budget_seconds is not None else float("inf"),
            settings.seed,
            settings.block,
        )

        def announce(potential: float, predicted: float, worthwhile: bool) -> None:
            verdict = (
                "searching on"
                if worthwhile
                else "skipping layers will not pay on this model and device; the runtime will decode plainly"
            )
            self.reporter.note(
                f"{name}: at most {potential:.2f}x of plain decoding if drafts always ended in time, "
                f"{predicted:.2f}x predicted: {verdict}"
            )

        def run() -> dict[str, Any]:
            with self.reporter.stage(f"{name}: search", None if timed else evaluations) as tick:
                reference = reference_states(self.decoder, samples)
                found = search(self.decoder, reference, latency, context, bounds, tick, announce)
            return {
                "frontier": [entry.model_dump(mode="json") for entry in found.frontier],
                "finalists": found.finalists,
                "context": found.context,
                "potential": found.potential,
                "worthwhile": found.worthwhile,
                "cost": found.cost.model_dump(mode="json"),
            }

        kept = self.work.stage(f"search-{name}", run)
        return SearchResult(
            [FrontierEntry.model_validate(entry) for entry in kept["frontier"]],
            kept["finalists"],
            kept["context"],
            kept["potential"],
            kept["worthwhile"],
            SearchCost.model_validate(kept["cost"]),
        )

    def _validate(self, name: str, found: SearchResult, prompts: DomainPrompts, latency: LatencyTable) -> Any:
        finalists = [(index, option.entry) for index, option in self._finalists(found, latency)]
        held_back = prompts.validation
        if not found.worthwhile:
            # One timed look at the best is enough to back a no.
            finalists, held_back = finalists[:1], held_back[: max(2, len(held_back) // 2)]
        limits = Limits(prompts.max_new_tokens, self.loaded.eos_ids)

        def run() -> dict[str, Any]:
            with self.reporter.stage(f"{name}: validate", len(held_back)) as tick:
                confirmed = validate(self.decoder, held_back, finalists, latency, found.context, limits, tick)
            return {
                "choice": confirmed.choice.model_dump(mode="json"),
                "validation": confirmed.validation.model_dump(mode="json"),
            }

        return self.work.stage(f"validation-{name}", run) if finalists else None

    def _finalists(self, found: SearchResult, latency: LatencyTable) -> list[tuple[int, Any]]:
        """Frontier index and best option of each finalist."""
        layers, chosen = self.decoder.shape.num_layers, []
        for index in found.finalists:
            entry = found.frontier[index]
            option = best_option([Entry(entry.mask, entry.skip_mask(layers), entry.profile())], latency, found.context)
            chosen.append((index, option))
        return chosen


def _record(
    name: str, found: SearchResult, choice: Choice | None, validation: Validation | None, pays: bool
) -> DomainRecord:
    return DomainRecord(
        name=name,
        context=found.context,
        frontier=found.frontier,
        choice=choice,
        potential=round(found.potential, 4),
        pays=pays,
        validation=validation,
        search=found.cost,
    )
