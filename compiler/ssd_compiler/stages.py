"""The stages of a compile. Each one's result is kept in the workspace."""

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
from ssd_runtime.profiling.light import with_light
from ssd_runtime.sampling.params import SamplingParams


@dataclass(slots=True)
class Stages:
    """The stages of one compile and what they share."""

    settings: CompileSettings
    loaded: LoadedModel
    decoder: Decoder
    fingerprint: ModelFingerprint
    work: Workspace
    reporter: Reporter
    base: Bundle | None = None
    """Bundle that the new domains join."""
    began: float = field(default_factory=perf_counter)
    given: CompileSettings = field(init=False)
    """The settings before domains were found by clustering."""

    def __post_init__(self) -> None:
        """Raise UserError when the new domains cannot join the base."""
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
        """Measure the latency of every kind of sub-layer at every precision here, or take it from the base."""
        known = bundled_latency(self.decoder, self.base.latency) if self.base is not None else None
        slug = device_key(self.decoder).slug()

        def measure() -> str:
            with self.reporter.stage("measure latency", None):
                table = measure_latency(self.decoder) if known is None else known
                return with_light(table, self.decoder, self.fingerprint.config_sha256).to_json()

        if known is not None and set(self.decoder.light_widths) <= set(known.light):
            return known
        return LatencyTable.from_json(self.work.stage(f"latency-{slug}", measure))

    def find_domains(self) -> tuple[str, ...]:
        """Return the names of the new domains, found in unlabelled prompts if the settings ask for it.

        Raises UserError when a domain found has a name that the base already uses.
        """
        if self.settings.clusters is None:
            return self.settings.new_domains
        stage = ClusterStage(loaded=self.loaded, decoder=self.decoder, work=self.work, reporter=self.reporter)
        self.settings = replace(self.settings, domain_files=stage.find(self.settings))
        for name in self.settings.new_domains:
            if self.base is not None and name in self.base.domains:
                raise UserError(f"domain {name!r}: {self.settings.base} has it already; rename the --domain-file")
        return self.settings.new_domains

    def prompts(self, names: Sequence[str]) -> dict[str, DomainPrompts]:
        """Read the prompts of all domains, then split each between search, anchors and validation."""

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
        """Fit exit heads on all domains together. A base's heads stay as they are."""
        if self.base is not None and self.base.exits is not None:
            return self.base.exits
        if not self.settings.exits:
            return None
        settings = self.settings
        return self._exit_stage.fit(samples, settings.exits, settings.exit_epochs, settings.exit_depth)

    def domain(
        self,
        name: str,
        samples: list[Sample],
        prompts: DomainPrompts,
        latency: LatencyTable,
        exits: ExitSet | None,
    ) -> DomainConfig:
        """Search a domain's masks, validate the best by timed decoding, and tune its exits."""
        config = self._search_stage(latency).domain(name, samples, prompts)
        if exits is None:
            return config
        return config.model_copy(update={"exit": self._exit_stage.tune(name, samples, latency, exits)})

    def mixture(self, samples: dict[str, list[Sample]], latency: LatencyTable) -> dict[str, DomainConfig]:
        """Search one frontier for all domains together, if there are several.

        A base's mixture stays as it is, because the samples of its domains are not in the bundle.
        """
        if self.base is not None:
            kept = "kept as it is there" if MIXTURE in self.base.domains else "none, as there"
            self.reporter.note(f"{MIXTURE}: {kept}; compile all domains together for one over all of them")
            return {}
        return {MIXTURE: self._search_stage(latency).mixture(list(samples.values()))} if self._mixed else {}

    def anchors(self, prompts: dict[str, DomainPrompts], samples: dict[str, list[Sample]]) -> AnchorSet:
        """Select each domain's anchors and set the out-of-domain threshold."""
        feature = self.base.anchors.feature if self.base is not None else self.settings.feature

        def measure(name: str) -> Any:
            asked = prompts[name].asked
            with self.reporter.stage(f"{name}: anchors", len(asked)) as tick:
                return prompts[name].anchor_features + (features_of(self.decoder, asked, tick) if asked else [])

        known = (*prompts, *(self.base.anchors.domains if self.base is not None else ()))

        def measure_unknown() -> Any:
            # A single domain has nothing to be centred against, so its own prompts set the threshold.
            unknown = out_of_domain_prompts(known, self.loaded) if len(known) > 1 else []
            if not unknown:
                return []
            with self.reporter.stage("out-of-domain prompts", len(unknown)) as tick:
                return features_of(self.decoder, unknown, tick)

        pool = {name: self.work.stage(f"anchors-{name}", partial(measure, name)) for name in prompts}
        unknown = self.work.stage("out-of-domain", measure_unknown)
        return build_anchors(
            pool={name: np.asarray([row[feature] for row in rows], np.float32) for name, rows in pool.items()},
            held_back={
                name: np.asarray([sample.features[feature] for sample in some], np.float32)
                for name, some in samples.items()
            },
            feature=feature,
            k=self.settings.anchors,
            seed=self.settings.seed,
            rule=self.settings.anchor_rule,
            base=self.base.anchors if self.base is not None else None,
            out_of_domain=np.asarray([row[feature] for row in unknown], np.float32) if unknown else None,
        )

    def successors(self, samples: dict[str, list[Sample]]) -> SuccessorSet:
        """Collect the full model's most probable successors in its continuations, after those of the base."""
        known = self.base.successors.rows() if self.base is not None and self.base.successors is not None else []
        found = [row for some in samples.values() for sample in some for row in sample.successors]
        # The table keeps one row per pair; later rows replace earlier ones.
        return SuccessorSet.of(Successors(known + found).rows())

    def bundle(
        self,
        latency: LatencyTable,
        domains: dict[str, DomainConfig],
        anchors: AnchorSet,
        exits: ExitSet | None,
        successors: SuccessorSet,
    ) -> Bundle:
        """Assemble the bundle and its report."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        seconds = perf_counter() - self.began
        tables = {latency.device.slug(): latency}
        if self.base is not None:
            domains = self.base.domains | domains
            tables = self.base.latency | tables
        # The mixture comes last, where readers expect a total.
        domains = {name: domains[name] for name in sorted(domains, key=lambda name: name == MIXTURE)}
        report = json_report(self.given, self.fingerprint, latency, domains, seconds)
        return Bundle(
            tool_version=tool_version(),
            created=created,
            model=self.fingerprint,
            domains=domains,
            anchors=anchors,
            latency=tables,
            report=report,
            exits=exits,
            successors=successors,
        )

    @property
    def _exit_stage(self) -> ExitStage:
        return ExitStage(self.decoder, self.work, self.reporter)

    @property
    def _sampling(self) -> SamplingParams:
        """The sampling that `ssd-run` uses by default."""
        return SamplingParams(repetition_penalty=self.loaded.repetition_penalty)

    @property
    def _mixed(self) -> bool:
        return self.base is None and len(self.settings.new_domains) > 1

    def _search_stage(self, latency: LatencyTable) -> SearchStage:
        searches = len(self.settings.new_domains) + self._mixed
        return SearchStage(
            settings=self.settings,
            decoder=self.decoder,
            eos_ids=self.loaded.eos_ids,
            sampling=self._sampling,
            latency=latency,
            work=self.work,
            reporter=self.reporter,
            searches=searches,
        )
