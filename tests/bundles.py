"""A small bundle to write, damage and plan with."""

from __future__ import annotations

import numpy as np

from ssd_artifacts.anchors import AnchorSet
from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import Choice, DomainConfig, FrontierEntry, SearchCost, Validation
from ssd_artifacts.exits import ExitSet
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.successors import SuccessorSet
from ssd_profiles.mask import SubLayerPlan
from tests.tables import DEVICE, latency_table, profile, with_light_costs

LAYERS, WIDTH = 4, 32


def fingerprint(**changes: str) -> ModelFingerprint:
    given = {"config_sha256": "c" * 64, "tokenizer_sha256": "d" * 64, "weights_sample_sha256": "b" * 64}
    return ModelFingerprint(
        name="tiny",
        revision=None,
        architecture="LlamaForCausalLM",
        num_layers=LAYERS,
        weights_sha256="a" * 64,
        dtype="float32",
        quantization=None,
        **{**given, **changes},
    )


def record(
    name: str,
    agreements: dict[tuple[int, ...], float],
    measured: float | None = None,
    accepted: tuple[float, float] = (2.5, 0.8),
) -> DomainConfig:
    """A domain whose frontier has these masks with these token agreements; the speed-up, M and α of its validation."""
    table = latency_table(LAYERS)
    masks = [(SubLayerPlan.of(LAYERS, skipped), agreement) for skipped, agreement in agreements.items()]
    validation = (
        Validation(
            prompts=3,
            new_tokens=99,
            speedup=measured,
            speedup_interval=(measured - 0.1, measured + 0.1),
            mean_acceptance_length=accepted[0],
            draft_acceptance_rate=accepted[1],
            identical=True,
        )
        if measured is not None
        else None
    )
    return DomainConfig(
        name=name,
        context=300,
        frontier=[
            FrontierEntry.of(mask, "knapsack", profile(agreement), table.draft_cost(mask, 300))
            for mask, agreement in masks
        ],
        choice=Choice(entry=0, draft_length=4, threshold=0.0, predicted_speedup=1.2) if masks else None,
        oracle_speedup=1.4,
        pays=True,
        validation=validation,
        search=SearchCost(seconds=1.5, evaluations=9, target_forwards=4.2),
    )


def light_record(name: str, masks: dict[SubLayerPlan, float]) -> DomainConfig:
    """A domain whose frontier has these masks, light ones too, with these token agreements."""
    config = record(name, {(2, 3, 4, 5): 0.95}, 1.2)
    table = with_light_costs(latency_table(LAYERS), 0.5, (8, 4))
    found = [
        FrontierEntry.of(mask, "light", profile(agreement), table.draft_cost(mask, 300))
        for mask, agreement in masks.items()
    ]
    return config.model_copy(update={"frontier": [*config.frontier, *found]})


def exits() -> ExitSet:
    """Exit heads of the first layers that change nothing."""
    return ExitSet((1, 2), np.stack([np.eye(WIDTH, dtype=np.float16)] * 2), np.zeros((2, WIDTH), np.float16))


def bundle(**domains: DomainConfig) -> Bundle:
    """A bundle of these domains, `one` and `two` by default; their anchors lie along the first axes."""
    given = domains or {
        "one": record("one", {(2, 3, 4, 5): 0.95}, 1.2),
        "two": record("two", {(0, 1): 0.7, (6,): 0.9}),
    }
    names = tuple(name for name in given if name != "mix")
    return Bundle(
        "0.1.0",
        "2026-11-21T00:00:00+00:00",
        fingerprint(),
        given,
        AnchorSet(
            "mean",
            names,
            np.eye(len(names), WIDTH, dtype=np.float32),
            np.zeros(WIDTH, np.float32),
            np.arange(len(names)),
            0.5,
            np.eye(len(names), WIDTH, dtype=np.float16),
            np.arange(len(names)),
        ),
        {DEVICE.slug(): latency_table(LAYERS)},
        '{"Ω": 1}',
        successors=SuccessorSet.of([[5, 6, 1, 2, 3, 4], [6, 1, 7, 8, 9, 10]]),
    )
