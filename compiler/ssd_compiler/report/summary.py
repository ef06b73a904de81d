"""The figures of a compile as JSON, for report.json, `--json` and the printed tables."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from ssd_artifacts.domain_config import DomainConfig, LoadValidation, Validation
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_compiler.settings import SELF_SD, SELF_SD_EVALUATIONS, CompileSettings
from ssd_profiles.formulas import expected_speedup
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import BITS


def domain_summary(config: DomainConfig, num_layers: int) -> dict[str, Any]:
    """The main figures of a domain."""
    choice = config.choice
    validation = config.validation
    entry = config.frontier[choice.entry] if choice else None
    mask = entry.sub_layer_plan(num_layers) if entry else None
    return {
        "domain": config.name,
        "context": config.context,
        "mask": entry.mask if entry else None,
        "mixers_skipped": mask.mixers_skipped if mask else 0,
        "mlps_skipped": mask.mlps_skipped if mask else 0,
        "lighter": {bits: count for bits in BITS if (count := mask.light.count(bits))} if mask else {},
        "draft_length": choice.draft_length if choice else 0,
        "threshold": choice.threshold if choice else 0.0,
        "token_agreement": entry.token_agreement if entry else None,
        "draft_cost": entry.draft_cost if entry else None,
        "draft_acceptance_rate": validation.draft_acceptance_rate if validation else None,
        "mean_acceptance_length": validation.mean_acceptance_length if validation else None,
        "oracle_speedup": config.oracle_speedup,
        "predicted_speedup": choice.predicted_speedup if choice else None,
        "measured_speedup": validation.speedup if validation else None,
        "measured_interval": list(validation.speedup_interval) if validation else None,
        "expected_speedup": _expected(validation, entry.draft_cost) if validation and entry else None,
        "under_load": [each.model_dump(mode="json") for each in validation.under_load] if validation else [],
        "pays_with": _paying_loads(config),
        "verdict": "not timed" if choice and not validation else "speculate" if config.pays else "plain",
        "search_seconds": config.search.seconds,
        "evaluations": config.search.evaluations,
        "target_forwards": config.search.target_forwards,
        "origins": origins(config),
        "self_sd_seconds_extrapolated": self_sd_seconds(config),
    }


def _expected(validation: Validation, draft_cost: float) -> float | None:
    """The papers' expected speed-up, which is none where nothing was accepted."""
    told = expected_speedup(validation.mean_acceptance_length, validation.draft_acceptance_rate, draft_cost)
    return None if math.isnan(told) else round(told, 4)


def skips_layers(summary: dict[str, Any]) -> bool:
    """Whether the chosen mask of a `domain_summary` skips any sub-layer; else it only runs some on light weights."""
    return bool(summary["mixers_skipped"] or summary["mlps_skipped"])


def origins(config: DomainConfig) -> dict[str, dict[str, float]]:
    """Number of masks rated and their best predicted speed-up, by the search that they came from."""
    found: dict[str, list[float]] = {}
    for _, origin, speedup in config.search.rated:
        found.setdefault(origin, []).append(speedup)
    return {origin: {"evaluations": len(some), "best": max(some)} for origin, some in found.items()}


def self_sd_seconds(config: DomainConfig) -> float | None:
    """Seconds of the papers' whole search by the clock, extrapolated from the masks that were timed.

    None for other searches. Rating the fastest masks is part of the time, a percent or two of an hour.
    """
    cost = config.search
    if not cost.evaluations or {origin for _, origin, _ in cost.rated} != {SELF_SD}:
        return None
    return round(cost.seconds / cost.evaluations * SELF_SD_EVALUATIONS, 1)


def self_sd_text(config: DomainConfig) -> str:
    """One sentence on a search by the clock and what the papers' whole one would take; empty for other searches."""
    whole = self_sd_seconds(config)
    if whole is None:
        return ""
    cost = config.search
    return (
        f"{cost.evaluations} masks were timed in {cost.seconds:.0f} s; the papers' {SELF_SD_EVALUATIONS} "
        f"would take {whole / 3600:.1f} h (extrapolated)"
    )


def speedup_text(timed: Validation | LoadValidation) -> str:
    """A measured speed-up with its interval, such as `1.31x (1.20–1.42)`."""
    low, high = timed.speedup_interval
    return f"{timed.speedup:.2f}x ({low:.2f}–{high:.2f})"


def load_text(config: DomainConfig) -> str:
    """One sentence on the speed-up of masks with several sequences at once; empty where nobody timed it."""
    if config.validation is None or not config.validation.under_load:
        return ""
    figures = [f"{each.concurrency}: {speedup_text(each)}" for each in config.validation.under_load]
    paying = ", ".join(map(str, _paying_loads(config))) or "no load that was timed"
    return f"{', '.join(figures)}; masks pay at {paying}"


def _paying_loads(config: DomainConfig) -> list[int]:
    """Numbers of sequences at once with which masks were faster than plain decoding, beyond doubt."""
    timed = config.validation.under_load if config.validation is not None else ()
    return [1] * config.pays + [each.concurrency for each in timed if each.speedup_interval[0] > 1.0]


def json_report(
    settings: CompileSettings,
    model: ModelFingerprint,
    latency: LatencyTable,
    domains: dict[str, DomainConfig],
    seconds: float,
) -> str:
    """Render report.json: settings, model, device and the figures of every domain."""
    return json.dumps(
        {
            "settings": asdict(settings),
            "model": model.model_dump(mode="json"),
            "device": asdict(latency.device),
            "seconds": round(seconds, 1),
            "domains": [domain_summary(config, model.num_layers) for config in domains.values()],
        },
        indent=1,
    )
