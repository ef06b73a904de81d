"""The compile stages that find a domain's masks: a search, then validation by timed decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssd_artifacts.domain_config import MIXTURE, Choice, DomainConfig, Validation
from ssd_compiler.calibrate import Sample, middle_context, reference_states
from ssd_compiler.data.prompts import DomainPrompts
from ssd_compiler.load_validation import validate_under_load
from ssd_compiler.progress import Reporter
from ssd_compiler.search.search import SearchBounds, SearchResult, search
from ssd_compiler.settings import CompileSettings
from ssd_compiler.validate import choice_of, validate
from ssd_compiler.workspace import Store
from ssd_profiles.latency import LatencyTable
from ssd_profiles.latency_law import broken_law
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.cost import CostModel, Entry, Option
from ssd_runtime.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SearchStage:
    """Searches and validates masks domain by domain, with results kept in the workspace."""

    settings: CompileSettings
    decoder: Decoder
    eos_ids: frozenset[int]
    sampling: SamplingParams
    latency: LatencyTable
    work: Store
    reporter: Reporter
    searches: int
    """Number of searches, the mixture included, that share the time budget."""

    def validate(self, name: str, found: SearchResult, prompts: DomainPrompts) -> DomainConfig:
        """Validate the best masks of a domain's search on held-back prompts."""
        confirmed = self._confirm(name, found, prompts)
        if confirmed is None:
            return _config(name, found, None, None, pays=False)
        validation = Validation.model_validate(confirmed["validation"])
        choice = Choice.model_validate(confirmed["choice"])
        return _config(name, found, choice, validation, pays=validation.speedup_interval[0] > 1.0)

    def mixture(self, found: SearchResult) -> DomainConfig:
        """The frontier of all domains together, from its search. It is not timed."""
        finalists = self._finalists(found)
        if not finalists:
            return _config(MIXTURE, found, None, None, pays=False)
        entry, option = finalists[0]
        return _config(MIXTURE, found, choice_of(entry, option), None, pays=False)

    def search(self, name: str, samples: Sequence[Sample]) -> SearchResult:
        """Search the masks of a domain, or of the mixture."""
        settings = self.settings
        context = middle_context(samples)
        bounds = SearchBounds(
            evaluations=settings.most_evaluations,
            seconds=settings.search_seconds / self.searches,
            seed=settings.seed,
            block=settings.block,
            method=settings.search,
            # The samples of a mixture are one of each domain in turn, and a mask may suit some domains alone.
            look=len(settings.new_domains) if name == MIXTURE else 1,
        )

        def announce(oracle_speedup: float, predicted: float, worthwhile: bool) -> None:
            verdict = (
                ("the search goes on" if settings.search == "both" else "the search has ended")
                if worthwhile
                else "skipping layers will not pay here; `auto` will draft otherwise, or decode plainly"
            )
            self.reporter.note(
                f"{name}: {predicted:.2f}x of plain decoding is predicted for the first masks, and "
                f"{oracle_speedup:.2f}x if every draft ended just before its first error: {verdict}"
            )

        def run() -> dict[str, Any]:
            with self.reporter.stage(
                f"{name}: search", None if settings.budget_seconds else settings.most_evaluations
            ) as tick:
                reference = reference_states(self.decoder, samples)
                prompts = [sample.prompt for sample in samples]
                found = search(self.decoder, reference, self.latency, context, bounds, tick, announce, prompts)
            return found.model_dump(mode="json")

        return SearchResult.model_validate(self.work.stage(f"search-{name}-{measured_on(self.latency)}", run))

    def _confirm(self, name: str, found: SearchResult, prompts: DomainPrompts) -> Any:
        finalists = self._finalists(found)
        held_back = prompts.validation
        if not found.worthwhile:
            # Timing the single best mask is enough to confirm that skipping does not pay.
            finalists = finalists[:1]
            held_back = held_back[: max(2, len(held_back) // 2)]
        limits = Limits(prompts.max_new_tokens, self.eos_ids)

        def run() -> dict[str, Any]:
            loads = [sequences for sequences in self.settings.concurrency if sequences > 1]
            with self.reporter.stage(f"{name}: validate", len(held_back) + len(loads)) as tick:
                confirmed = validate(
                    decoder=self.decoder,
                    prompts=held_back,
                    finalists=finalists,
                    limits=limits,
                    tick=tick,
                    sampling=self.sampling,
                )
                confirmed = validate_under_load(
                    decoder=self.decoder,
                    prompts=held_back,
                    confirmed=confirmed,
                    concurrency=loads,
                    limits=limits,
                    tick=tick,
                    sampling=self.sampling,
                )
            return {
                "choice": confirmed.choice.model_dump(mode="json"),
                "validation": confirmed.validation.model_dump(mode="json"),
            }

        return self.work.stage(f"validation-{name}-{measured_on(self.latency)}", run) if finalists else None

    def _finalists(self, found: SearchResult) -> list[tuple[int, Option]]:
        """Frontier index and best option of each finalist."""
        layers = self.decoder.shape.num_layers
        chosen = []
        for index in found.finalists:
            entry = found.frontier[index]
            entries = [Entry.of(entry, layers)]
            option = CostModel(self.latency).best_option(entries, found.context)
            assert option is not None, "there is an entry"
            chosen.append((index, option))
        return chosen


def measured_on(latency: LatencyTable) -> str:
    """Name of the latencies that results rest on.

    Those of a coarse table are not taken up with a sound one, nor those of one with other light copies, which depend on
    the free memory.
    """
    copies = "".join(f"-{bits}" for bits in sorted(latency.light))
    return latency.device.slug() + copies + ("-coarse" if broken_law(latency) else "")


def mixture_of(domains: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The samples that the mixture is searched on: equally many of each domain, one of each in turn."""
    counts = [len(samples) for samples in domains]
    share = min(*counts, max(1, max(counts) // len(counts)))
    return [sample for turn in zip(*(samples[:share] for samples in domains), strict=True) for sample in turn]


def _config(
    name: str, found: SearchResult, choice: Choice | None, validation: Validation | None, pays: bool
) -> DomainConfig:
    return DomainConfig(
        name=name,
        context=found.context,
        frontier=found.frontier,
        choice=choice,
        oracle_speedup=round(found.oracle_speedup, 4),
        pays=pays,
        validation=validation,
        search=found.cost,
    )
