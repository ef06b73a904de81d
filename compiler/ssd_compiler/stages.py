"""The stages of a compile. Each one's result is kept in the workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ssd_artifacts.anchors import AnchorSet
from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import MIXTURE, DomainConfig, ExitChoice
from ssd_artifacts.exits import ExitSet
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.manifest import MAX_TABLES, tool_version
from ssd_artifacts.successors import SuccessorSet
from ssd_compiler.anchors.build import build_anchors
from ssd_compiler.calibrate import Sample, continue_prompts, features_of, samples_of
from ssd_compiler.data.cluster_stage import find_domains
from ssd_compiler.data.prompts import (
    DomainPrompts,
    PromptFeatures,
    PromptPool,
    out_of_domain_prompts,
    read_pool,
    split_pool,
)
from ssd_compiler.exits.stage import ExitStage
from ssd_compiler.patience import Patience, TooBusyError
from ssd_compiler.progress import Reporter
from ssd_compiler.report.summary import json_report
from ssd_compiler.search.search import SearchResult
from ssd_compiler.search.stage import SearchStage, mixture_of
from ssd_compiler.settings import CompileSettings
from ssd_compiler.workspace import Store
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_profiles.latency_law import broken_law
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.latency import (
    BusyMachineError,
    coarse_latency,
    device_key,
    keep_latency,
    known_latency,
    measure_latency,
)
from ssd_runtime.profiling.light import with_light
from ssd_runtime.profiling.other_work import working_threads
from ssd_runtime.sampling.params import SamplingParams


@dataclass(slots=True)
class Stages:
    """The stages of one compile and what they share."""

    settings: CompileSettings
    loaded: LoadedModel
    decoder: Decoder
    fingerprint: ModelFingerprint
    work: Store
    reporter: Reporter
    base: Bundle | None = None
    """Bundle that the new domains join."""
    patience: Patience = field(default_factory=Patience)
    began: float = field(default_factory=perf_counter)
    given: CompileSettings = field(init=False)
    """The settings before domains were found by clustering."""

    def __post_init__(self) -> None:
        """Raise UserError when the new domains cannot join the base."""
        self.given = self.settings
        if self.base is not None:
            shape = self.decoder.shape
            self.base.require_model(self.fingerprint, shape.hidden, shape.vocabulary, str(self.settings.base))
            known, model = self.base.model, self.fingerprint
            if known.quantization != model.quantization:
                raise UserError(
                    f"{self.settings.base}: compiled for weights in {known.quantization or 'no quantisation'}, the "
                    f"model has {model.quantization or 'none'}; give the bundle's own model, or use ssd-bundle adopt"
                )
            if known.dtype != model.dtype:
                raise UserError(
                    f"{self.settings.base}: compiled in {known.dtype}, the model is loaded in {model.dtype}; "
                    "give --dtype"
                )
            if len(self.base.latency.keys() | {device_key(self.decoder).slug()}) > MAX_TABLES:
                raise UserError(
                    f"{self.settings.base}: has {MAX_TABLES} latency tables, as many as a bundle may have, and none of "
                    "this device; compile without --from"
                )

    def latency(self) -> LatencyTable:
        """Measure the latency of every kind of sub-layer at every precision here, unless the base or a run has it.

        A table that breaks the law is only returned if the user goes on with a coarse one; it is not kept. Raises
        UserError if the machine stays too busy otherwise.
        """
        model_key = self.fingerprint.config_sha256
        known = known_latency(self.decoder, self.base.latency if self.base is not None else {}, model_key)
        if known is not None and set(self.decoder.light.bits) <= set(known.light):
            return known

        threads = working_threads(self.decoder.device)

        def dense() -> LatencyTable:
            with self.reporter.stage("measure latency", None):
                table = measure_latency(self.decoder)
            keep_latency(self.decoder, model_key, table)
            return table

        def with_copies(table: LatencyTable) -> LatencyTable:
            with self.reporter.stage("measure light copies", None):
                return with_light(table, self.decoder, model_key)

        def kept(name: str, measure: Callable[[], LatencyTable]) -> LatencyTable:
            found = self.work.stage(name, lambda: self.patience.measured(measure, threads, self.reporter).to_json())
            return LatencyTable.from_json(found)

        name = f"latency-{device_key(self.decoder).slug()}"
        bits = "".join(f"-{bits}" for bits in self.decoder.light.bits)
        try:
            known = known or kept(name, dense)
            return kept(name + bits, partial(with_copies, known)) if bits else known
        except TooBusyError as error:
            if not self.patience.coarse:
                raise
            self.reporter.warn(f"{error.seen}; the search goes on with coarse latencies, which stay out of the bundle")
        try:
            return with_copies(known or coarse_latency(self.decoder))
        except BusyMachineError as error:
            return error.coarse

    def find_domains(self) -> tuple[str, ...]:
        """Return the names of the new domains, found in unlabelled prompts if the settings ask for it.

        Raises UserError when a domain found has a name that the base already uses.
        """
        if self.settings.clusters is None:
            return self.settings.new_domains
        found = find_domains(self.settings, self.loaded, self.decoder, work=self.work, reporter=self.reporter)
        self.settings = replace(self.settings, domain_files=found)
        for name in self.settings.new_domains:
            if self.base is not None and name in self.base.domains:
                raise UserError(f"domain {name!r}: {self.settings.base} has it already; rename the --domain-file")
        return self.settings.new_domains

    def pools(self, names: Sequence[str]) -> list[PromptPool]:
        """Read the prompts of all domains."""

        # One warning names all domains that it is about.
        warned: dict[str, list[str]] = {}

        def pool_of(name: str) -> PromptPool:
            return read_pool(name, self.settings, self.loaded, lambda text: warned.setdefault(text, []).append(name))

        def read() -> list[dict[str, Any]]:
            try:
                return [asdict(pool_of(name)) for name in names]
            finally:
                for text, domains in warned.items():
                    self.reporter.warn(f"{', '.join(domains)}: {text}")

        return [PromptPool(**pool) for pool in self.work.stage("pools", read)]

    def split(self, pool: PromptPool) -> DomainPrompts:
        """Split a domain's prompts between search, anchors and validation."""

        def survey(prompts: list[list[int]]) -> list[PromptFeatures]:
            with self.reporter.stage(f"{pool.name}: features", len(prompts)) as tick:
                return features_of(self.decoder, prompts, tick)

        def run() -> dict[str, Any]:
            return asdict(split_pool(pool, self.settings, survey))

        return DomainPrompts(**self.work.stage(f"prompts-{pool.name}", run))

    def calibrate(self, prompts: DomainPrompts) -> list[Sample]:
        """Let the full model continue the search prompts."""

        def generate() -> Any:
            with self.reporter.stage(f"{prompts.name}: calibrate", len(prompts.search)) as tick:
                eos = self.loaded.eos_ids
                return continue_prompts(self.decoder, prompts.search, prompts.max_new_tokens, eos, tick, self.sampling)

        return samples_of(self.work.stage(f"calibration-{prompts.name}", generate), prompts.name)

    def exits(self, samples: dict[str, list[Sample]]) -> ExitSet | None:
        """Fit exit heads on all domains together. A base's heads stay as they are."""
        if self.base is not None and self.base.exits is not None:
            return self.base.exits
        if not self.settings.exits:
            return None
        return self._exit_stage.fit(samples, self.settings.exits)

    def to_search(self, samples: dict[str, list[Sample]]) -> dict[str, list[Sample]]:
        """The samples of every search: those of each domain and, of several domains together, the mixture's.

        A base's mixture stays as it is, because the samples of its domains are not in the bundle.
        """
        if self.base is not None:
            kept = "kept as it is there" if MIXTURE in self.base.domains else "none, as there"
            self.reporter.note(f"{MIXTURE}: {kept}; compile all domains together for one over all of them")
        return {**samples, MIXTURE: mixture_of(list(samples.values()))} if self._mixed else samples

    def search(self, name: str, samples: list[Sample], latency: LatencyTable) -> SearchResult:
        """Search the masks of a domain, or of the mixture."""
        return self._search_stage(latency).search(name, samples)

    def tune_exits(
        self, name: str, samples: list[Sample], latency: LatencyTable, exits: ExitSet | None
    ) -> ExitChoice | None:
        """Tune how a domain uses the exit heads; None without any."""
        return None if exits is None else self._exit_stage.tune(name, samples, latency, exits)

    def validate(self, name: str, found: SearchResult, prompts: DomainPrompts, latency: LatencyTable) -> DomainConfig:
        """Validate a domain's best masks by timed decoding."""
        return self._search_stage(latency).validate(name, found, prompts)

    def mixture(self, found: SearchResult, latency: LatencyTable) -> DomainConfig:
        """The mixture's frontier, which is not timed."""
        return self._search_stage(latency).mixture(found)

    def anchor_features(self, prompts: DomainPrompts) -> list[PromptFeatures]:
        """Features of the prompts that a domain's anchors are chosen from, in both phrasings."""

        def measure() -> list[PromptFeatures]:
            asked = prompts.asked
            with self.reporter.stage(f"{prompts.name}: anchors", len(asked)) as tick:
                return prompts.anchor_features + (features_of(self.decoder, asked, tick) if asked else [])

        found: list[PromptFeatures] = self.work.stage(f"anchors-{prompts.name}", measure)
        return found

    def anchors(self, pool: dict[str, list[PromptFeatures]], samples: dict[str, list[Sample]]) -> AnchorSet:
        """Select each domain's anchors from the features of its `pool` and set the out-of-domain threshold."""
        feature = self.base.anchors.feature if self.base is not None else self.settings.feature
        known = (*pool, *(self.base.anchors.domains if self.base is not None else ()))

        def measure_unknown() -> Any:
            # A single domain has nothing to be centred against, so its own prompts set the threshold.
            unknown = out_of_domain_prompts(known, self.loaded) if len(known) > 1 else []
            if not unknown:
                return []
            with self.reporter.stage("out-of-domain prompts", len(unknown)) as tick:
                return features_of(self.decoder, unknown, tick)

        unknown = self.work.stage("out-of-domain", measure_unknown)
        return build_anchors(
            pool={name: np.asarray([row[feature] for row in rows], np.float32) for name, rows in pool.items()},
            held_back={
                name: np.asarray([sample.features[feature] for sample in some], np.float32)
                for name, some in samples.items()
            },
            feature=feature,
            k=self.settings.anchors,
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
        tuned: dict[str, ExitChoice | None],
        anchors: AnchorSet,
        exits: ExitSet | None,
        successors: SuccessorSet,
    ) -> Bundle:
        """Assemble the bundle and its report."""
        domains = {name: each.model_copy(update={"exit": tuned.get(name)}) for name, each in domains.items()}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        seconds = perf_counter() - self.began
        tables = {latency.device.slug(): latency} if broken_law(latency) is None else {}
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
    def sampling(self) -> SamplingParams:
        """The sampling that `ssd-run` uses by default."""
        return self.loaded.greedy

    @property
    def _mixed(self) -> bool:
        return self.settings.base is None and len(self.settings.new_domains) > 1

    def _search_stage(self, latency: LatencyTable) -> SearchStage:
        searches = len(self.settings.new_domains) + self._mixed
        return SearchStage(
            settings=self.settings,
            decoder=self.decoder,
            eos_ids=self.loaded.eos_ids,
            sampling=self.sampling,
            latency=latency,
            work=self.work,
            reporter=self.reporter,
            searches=searches,
        )
