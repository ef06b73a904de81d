"""The stages that find a domain's masks: a search, then timed decoding with the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssd_artifacts.domain_config import MIXTURE, Choice, DomainConfig, FrontierEntry, SearchCost, Validation
from ssd_compiler.calibrate import Sample, middle_context, reference_states
from ssd_compiler.load_validation import validate_under_load
from ssd_compiler.progress import Reporter
from ssd_compiler.prompts import DomainPrompts
from ssd_compiler.search import SearchBounds, SearchResult, search
from ssd_compiler.settings import CompileSettings
from ssd_compiler.validate import validate
from ssd_compiler.workspace import Workspace
from ssd_profiles.latency import LatencyTable
from ssd_runtime.engine.loop import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.cost import CostModel, Entry, Option
from ssd_runtime.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SearchStage:
    """Searches and confirms masks, domain by domain."""

    settings: CompileSettings
    decoder: Decoder
    eos_ids: frozenset[int]
    sampling: SamplingParams
    latency: LatencyTable
    work: Workspace
    reporter: Reporter
    searches: int
    """Domains, and the mixture where there is to be one: they share the time there is."""

    def domain(self, name: str, samples: Sequence[Sample], prompts: DomainPrompts) -> DomainConfig:
        """Search, and confirm the best on prompts that were held back."""
        found = self._search(name, samples)
        confirmed = self._confirm(name, found, prompts)
        if confirmed is None:
            return _record(name, found, None, None, pays=False)
        validation = Validation.model_validate(confirmed["validation"])
        choice = Choice.model_validate(confirmed["choice"])
        return _record(name, found, choice, validation, pays=validation.speedup_interval[0] > 1.0)

    def mixture(self, domains: Sequence[Sequence[Sample]]) -> DomainConfig:
        """Search one frontier for all domains together, an equal number of samples from each; timed by nobody."""
        counts = [len(samples) for samples in domains]
        share = min(*counts, max(1, max(counts) // len(counts)))
        found = self._search(MIXTURE, [sample for samples in domains for sample in samples[:share]])
        finalists = self._finalists(found)
        if not finalists:
            return _record(MIXTURE, found, None, None, pays=False)
        entry, option = finalists[0]
        choice = Choice(
            entry=entry,
            draft_length=option.draft_length,
            threshold=option.threshold,
            predicted_speedup=round(option.speedup, 4),
        )
        return _record(MIXTURE, found, choice, None, pays=False)

    def _search(self, name: str, samples: Sequence[Sample]) -> SearchResult:
        settings, context = self.settings, middle_context(samples)
        timed = settings.budget_seconds is not None
        bounds = SearchBounds(
            10_000 if timed else settings.evaluations,
            settings.budget_seconds / self.searches if settings.budget_seconds is not None else float("inf"),
            settings.seed,
            settings.block,
        )

        def announce(potential: float, predicted: float, worthwhile: bool) -> None:
            verdict = (
                "searching on"
                if worthwhile
                else "skipping layers will not pay on this model and device; `auto` will guess, or decode plainly"
            )
            self.reporter.note(
                f"{name}: {potential:.2f}x of plain decoding with the first masks if drafts always ended in time, "
                f"{predicted:.2f}x predicted: {verdict}"
            )

        def run() -> dict[str, Any]:
            with self.reporter.stage(f"{name}: search", None if timed else settings.evaluations) as tick:
                reference = reference_states(self.decoder, samples)
                found = search(self.decoder, reference, self.latency, context, bounds, tick, announce)
            return {
                "frontier": [entry.model_dump(mode="json") for entry in found.frontier],
                "finalists": found.finalists,
                "context": found.context,
                "potential": found.potential,
                "worthwhile": found.worthwhile,
                "cost": found.cost.model_dump(mode="json"),
            }

        kept = self.work.stage(f"search-{name}-{self.latency.device.slug()}", run)
        return SearchResult(
            [FrontierEntry.model_validate(entry) for entry in kept["frontier"]],
            kept["finalists"],
            kept["context"],
            kept["potential"],
            kept["worthwhile"],
            SearchCost.model_validate(kept["cost"]),
        )

    def _confirm(self, name: str, found: SearchResult, prompts: DomainPrompts) -> Any:
        finalists = [(index, option.entry) for index, option in self._finalists(found)]
        held_back = prompts.validation
        if not found.worthwhile:
            # One timed look at the best is enough to back a no.
            finalists, held_back = finalists[:1], held_back[: max(2, len(held_back) // 2)]
        limits = Limits(prompts.max_new_tokens, self.eos_ids)

        def run() -> dict[str, Any]:
            loads = [sequences for sequences in self.settings.concurrency if sequences > 1]
            with self.reporter.stage(f"{name}: validate", len(held_back) + len(loads)) as tick:
                confirmed = validate(
                    *(self.decoder, held_back, finalists, self.latency, found.context, limits, tick),
                    sampling=self.sampling,
                )
                confirmed = validate_under_load(
                    *(self.decoder, held_back, confirmed, loads, limits, tick), sampling=self.sampling
                )
            return {
                "choice": confirmed.choice.model_dump(mode="json"),
                "validation": confirmed.validation.model_dump(mode="json"),
            }

        return self.work.stage(f"validation-{name}-{self.latency.device.slug()}", run) if finalists else None

    def _finalists(self, found: SearchResult) -> list[tuple[int, Option]]:
        """Frontier index and best option of each finalist."""
        layers, chosen = self.decoder.shape.num_layers, []
        for index in found.finalists:
            entry = found.frontier[index]
            entries = [Entry(entry.mask, entry.skip_mask(layers), entry.profile())]
            option = CostModel(self.latency).best_option(entries, found.context)
            assert option is not None, "there is an entry"
            chosen.append((index, option))
        return chosen


def _record(
    name: str, found: SearchResult, choice: Choice | None, validation: Validation | None, pays: bool
) -> DomainConfig:
    return DomainConfig(
        name=name,
        context=found.context,
        frontier=found.frontier,
        choice=choice,
        potential=round(found.potential, 4),
        pays=pays,
        validation=validation,
        search=found.cost,
    )
