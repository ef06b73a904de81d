"""Adopts a bundle for another form of its model: other files, another quantisation, a fine-tune.

load → compare shapes → draft with each mask for a minute → keep, replace or refuse → a new bundle
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter

import numpy as np

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import DomainConfig, FrontierEntry, SearchCost
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.manifest import tool_version
from ssd_compiler.calibrate import Sample, continue_prompts, reference_states, samples_of
from ssd_compiler.progress import Reporter
from ssd_compiler.settings import DRAFT_BLOCK
from ssd_profiles.acceptance import AcceptanceProfile, Trace
from ssd_profiles.domain import domain_names, load_domain, starter_set
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.loading.draft_copies import make_copies
from ssd_runtime.loading.loaded_model import LoadedModel, conversation
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.family.families import max_context
from ssd_runtime.search.replay import replay_mask

NEW_TOKENS = 48
"""Tokens of a continuation on which agreement is measured."""
LEAST_AGREEMENT = 0.8
"""Smallest share of the compiled agreement at which a domain's chosen mask counts as fitting the other model."""
DOUBTS = 3.0
"""Standard errors within which a measured agreement does not contradict the compiled one."""


@dataclass(frozen=True, slots=True)
class AdoptedMask:
    """Token agreement of a domain's chosen mask, compiled and measured on the other model."""

    domain: str
    compiled: float
    measured: float
    positions: int
    kept: bool
    """Whether the compiled acceptance stays as a prior, because the measured one does not contradict it."""

    @property
    def fits(self) -> bool:
        """Whether the mask drafts about as well as it did for the original."""
        return self.measured >= LEAST_AGREEMENT * self.compiled


def adopt(
    bundle: Bundle,
    loaded: LoadedModel,
    decoder: Decoder,
    where: str,
    seconds: float,
    prompts: Sequence[Prompt],
    reporter: Reporter,
) -> tuple[Bundle, list[AdoptedMask]]:
    """Measure the masks' agreement on the loaded model for about `seconds`; returns a bundle of that model.

    Acceptance is a prior: nothing was searched or timed, so no domain pays by itself, and `auto` finds out. Exit heads
    are left out, since they were fitted to other weights, latencies where the config differs, and token pairs where the
    tokenizer does. Raises UserError when the model is the bundle's own, when sizes differ, or when no domain's mask
    fits.
    """
    fingerprint = loaded.fingerprint(full=True)
    _require_same_sizes(bundle, fingerprint, loaded.model.config.hidden_size, where)
    if bundle.model.serves(fingerprint):
        raise UserError(
            f"{where}: it serves {fingerprint.name} as it is; give it with --model, there is nothing to adopt"
        )
    same_config = bundle.model.config_sha256 == fingerprint.config_sha256
    same_tokenizer = bundle.model.tokenizer_sha256 == fingerprint.tokenizer_sha256
    known = [name for name, config in bundle.domains.items() if config.choice is not None]
    if not known:
        raise UserError(f"{where}: no domain has a mask to adopt; compile a bundle for this model")
    if bundle.light_masks:
        make_copies(decoder, "auto", reporter.note)
    found: list[AdoptedMask] = []
    domains: dict[str, DomainConfig] = {}
    for name in known:
        with reporter.stage(f"{name}: agreement", None):
            samples = _continued(_prompts(name, prompts), loaded, decoder, name, seconds / len(known))
            domains[name], mask = _measured(bundle.domains[name], samples, decoder)
        found.append(mask)
    if not any(mask.fits for mask in found):
        best = max(found, key=lambda mask: mask.measured / max(mask.compiled, 1e-9))
        raise UserError(
            f"{where}: no mask fits {fingerprint.name}: {best.domain}'s agrees on {best.measured:.2f} of the tokens, "
            f"compiled {best.compiled:.2f}; compile a bundle for this model"
        )
    adopted = replace(
        bundle,
        tool_version=tool_version(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=fingerprint,
        domains={name: domains.get(name) or _untimed(config) for name, config in bundle.domains.items()},
        latency=bundle.latency if same_config else {},
        report=None,
        exits=None,
        successors=bundle.successors if same_tokenizer else None,
    )
    return adopted, found


def _require_same_sizes(bundle: Bundle, model: ModelFingerprint, hidden: int, where: str) -> None:
    """Raise UserError when the bundle's masks and anchors cannot belong to a model of these sizes."""
    pairs = (
        ("architecture", bundle.model.architecture, model.architecture),
        ("layers", bundle.model.num_layers, model.num_layers),
        ("hidden size", bundle.anchors.center.size, hidden),
    )
    for part, expected, got in pairs:
        if expected != got:
            raise UserError(
                f"{where}: made for {part} {expected}, {model.name} has {got}; compile a bundle for this model"
            )


def _prompts(name: str, given: Sequence[Prompt]) -> list[list[tuple[str, str]]]:
    """Conversations to measure a domain on: the user's, else the domain's starter prompts, else those of all."""
    if given:
        return [conversation(prompt) for prompt in given]
    names = [name] if name in domain_names() else domain_names()
    asked = [
        [load_domain(each).ask(record, place) for place, record in enumerate(starter_set(each).records)]
        for each in names
    ]
    # One of each domain in turn.
    return [[("user", text)] for texts in zip(*asked, strict=False) for text in texts]


def _continued(
    conversations: Sequence[list[tuple[str, str]]],
    loaded: LoadedModel,
    decoder: Decoder,
    name: str,
    seconds: float,
) -> list[Sample]:
    """The model's own continuations of as many prompts as fit two thirds of the time, at least one."""
    room = max_context(loaded.model.config) - NEW_TOKENS
    sampling = loaded.greedy
    began = perf_counter()
    found = []
    for messages in conversations:
        ids = loaded.encode(messages)
        if len(ids) > room:
            continue
        found += continue_prompts(decoder, [ids], NEW_TOKENS, loaded.eos_ids, lambda: None, sampling)
        if perf_counter() - began > seconds * 2 / 3:
            break
    if not found:
        raise UserError(
            f"domain {name}: no prompt fits the context of {room + NEW_TOKENS} tokens; give shorter --prompts"
        )
    return samples_of(found, name)


def _measured(config: DomainConfig, samples: Sequence[Sample], decoder: Decoder) -> tuple[DomainConfig, AdoptedMask]:
    """The domain with the acceptance of each mask as compiled, or as measured where that contradicts it."""
    assert config.choice is not None
    reference = reference_states(decoder, samples)
    layers = decoder.shape.num_layers
    entries: list[FrontierEntry] = []
    chosen: AdoptedMask | None = None
    for index, entry in enumerate(config.frontier):
        traces = replay_mask(decoder, reference, entry.sub_layer_plan(layers), DRAFT_BLOCK)
        measured, positions, kept = _compared(entry, traces)
        grid = entry.draft_lengths, entry.thresholds  # the domain's choice is one of these
        profile = entry.profile() if kept else AcceptanceProfile.of_traces(traces, *grid)
        entries.append(FrontierEntry.of(entry.sub_layer_plan(layers), entry.origin, profile, entry.draft_cost))
        if index == config.choice.entry:
            chosen = AdoptedMask(config.name, entry.token_agreement, measured, positions, kept)
    assert chosen is not None
    return _untimed(config.model_copy(update={"frontier": entries})), chosen


def _compared(entry: FrontierEntry, traces: Sequence[Trace]) -> tuple[float, int, bool]:
    """Measured agreement, positions, and whether the compiled one lies within `DOUBTS` standard errors of it."""
    matches = np.concatenate([trace.matches for trace in traces])
    measured = float(matches.mean())
    error = float(np.sqrt(max(entry.token_agreement * (1 - entry.token_agreement), 0.01) / len(matches)))
    return measured, len(matches), abs(measured - entry.token_agreement) <= DOUBTS * error


def _untimed(config: DomainConfig) -> DomainConfig:
    """The domain as if nobody had searched or timed it, and without exits."""
    unknown = {"pays": False, "validation": None, "exit": None, "oracle_speedup": 0.0}
    choice = config.choice and config.choice.model_copy(update={"predicted_speedup": 0.0})
    search = SearchCost(seconds=0, evaluations=0, target_forwards=0)
    return config.model_copy(update={**unknown, "choice": choice, "search": search})
