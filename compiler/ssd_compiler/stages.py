"""The stages of a compile, each kept in the workspace when it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ssd_artifacts.anchors import AnchorSet
from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import MIXTURE, DomainConfig
from ssd_artifacts.exits import ExitSet
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.manifest import tool_version
from ssd_artifacts.successors import SuccessorSet
from ssd_compiler.anchors.build import build_anchors
from ssd_compiler.calibrate import Sample, continue_prompts, features_of, samples_of
from ssd_compiler.data.cluster_stage import ClusterStage
from ssd_compiler.data.prompts import DomainPrompts, PromptPool, out_of_domain_prompts, read_pool, split_pool
from ssd_compiler.exits.stage import ExitStage
from ssd_compiler.progress import Reporter
from ssd_compiler.report.html import html_report
from ssd_compiler.report.summary import json_report
from ssd_compiler.search.stage import SearchStage
from ssd_compiler.settings import CompileSettings
from ssd_compiler.workspace import Workspace
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.loading.models import LoadedModel
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.latency import bundled_latency, device_key, measure_latency
from ssd_runtime.sampling.params import SamplingParams


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
            shape = self.decoder.shape
            self.base.require_model(self.fingerprint, shape.hidden, shape.vocabulary, str(self.settings.base))
            if self.base.model.dtype != self.fingerprint.dtype:
                raise UserError(
                    f"{self.settings.base}: compiled in {self.base.model.dtype}, the model is loaded in "
                    f"{self.fingerprint.dtype}; give --dtype"
                )

    def latency(self) -> LatencyTable:
        """Measure what every sub-layer costs on this device, unless the base knows."""
        known = bundled_latency(self.decoder, self.base.latency) if self.base is not None else None
        if known is not None:
            return known
        slug = device_key(self.decoder).slug()

        def measure() -> str:
            with self.reporter.stage("measure latency", None):
                return measure_latency(self.decoder).to_json()

        return LatencyTable.from_json(self.work.stage(f"latency-{slug}", measure))

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
                return continue_prompts(self.decoder, prompts.search, prompts.max_new_tokens, eos, tick, self._sampling)

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
    ) -> DomainConfig:
        """Search a domain's masks and confirm the best of them by timed decoding; tune its exits."""
        record = self._search_stage(latency).domain(name, samples, prompts)
        if exits is None:
            return record
        return record.model_copy(update={"exit": self._exit_stage.tune(name, samples, latency, exits)})

    def mixture(self, samples: dict[str, list[Sample]], latency: LatencyTable) -> dict[str, DomainConfig]:
        """Search one frontier for all domains together.

        A single domain has none. A base's stays: the samples of its domains are not in the bundle.
        """
        if self.base is not None:
            kept = "kept as it is there" if MIXTURE in self.base.domains else "none, as there"
            self.reporter.note(f"{MIXTURE}: {kept}; compile all domains together for one over all of them")
            return {}
        return {MIXTURE: self._search_stage(latency).mixture(list(samples.values()))} if self._mixed else {}

    def anchors(self, prompts: dict[str, DomainPrompts], samples: dict[str, list[Sample]]) -> AnchorSet:
        """Pick each domain's anchors and the out-of-domain threshold."""
        feature = self.base.anchors.feature if self.base is not None else self.settings.feature

        def measure(name: str) -> Any:
            asked = prompts[name].asked
            with self.reporter.stage(f"{name}: anchors", len(asked)) as tick:
                return prompts[name].anchor_features + (features_of(self.decoder, asked, tick) if asked else [])

        known = (*prompts, *(self.base.anchors.domains if self.base is not None else ()))

        def measure_unknown() -> Any:
            # A domain alone has nothing to be centred between: its own prompts set its threshold.
            unknown = out_of_domain_prompts(known, self.loaded) if len(known) > 1 else []
            if not unknown:
                return []
            with self.reporter.stage("out-of-domain prompts", len(unknown)) as tick:
                return features_of(self.decoder, unknown, tick)

        pool = {name: self.work.stage(f"anchors-{name}", partial(measure, name)) for name in prompts}
        unknown = self.work.stage("out-of-domain", measure_unknown)
        return build_anchors(
            {name: np.asarray([row[feature] for row in rows], np.float32) for name, rows in pool.items()},
            {name: np.asarray([s.features[feature] for s in some], np.float32) for name, some in samples.items()},
            feature,
            self.settings.anchors,
            self.settings.seed,
            self.settings.anchor_rule,
            self.base.anchors if self.base is not None else None,
            np.asarray([row[feature] for row in unknown], np.float32) if unknown else None,
        )

    def successors(self, samples: dict[str, list[Sample]]) -> SuccessorSet:
        """Gather what the full model held for probable in its continuations; what a base has comes before them."""
        known = self.base.successors.rows() if self.base is not None and self.base.successors is not None else []
        found = [row for some in samples.values() for sample in some for row in sample.successors]
        # Of a pair that stands in several, the last row counts.
        return SuccessorSet.of(Successors(known + found).rows())

    def bundle(
        self,
        latency: LatencyTable,
        records: dict[str, DomainConfig],
        anchors: AnchorSet,
        exits: ExitSet | None,
        successors: SuccessorSet,
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
            tool_version(),
            created,
            self.fingerprint,
            records,
            anchors,
            tables,
            {"report.json": report, "report.html": html_report(self.fingerprint, latency, records, created)},
            exits,
            successors,
        )

    @property
    def _exit_stage(self) -> ExitStage:
        return ExitStage(self.decoder, self.work, self.reporter)

    @property
    def _sampling(self) -> SamplingParams:
        """As `ssd-run` decodes where nothing else is asked for."""
        return SamplingParams(repetition_penalty=self.loaded.repetition_penalty)

    @property
    def _mixed(self) -> bool:
        return self.base is None and len(self.settings.new_domains) > 1

    def _search_stage(self, latency: LatencyTable) -> SearchStage:
        searches = len(self.settings.new_domains) + self._mixed
        return SearchStage(
            *(self.settings, self.decoder, self.loaded.eos_ids, self._sampling),
            *(latency, self.work, self.reporter, searches),
        )
