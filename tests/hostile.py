"""A tiny model and a bundle that drafts for it, to be damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import DomainConfig, ExitChoice
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.loading.models import load_model
from ssd_runtime.profiling.latency import device_key
from tests.bundles import LAYERS, bundle, exits, record
from tests.folders import save_tiny_model
from tests.tables import latency_table

STRATEGIES = ("auto", "knn", "knapsack", "exit", "fixed:one")
QUESTION = "How many loaves did the baker count?"
NEW_TOKENS = 16
TABLE = latency_table(LAYERS, per_token=1e-6)


def drafting(name: str, skipped: tuple[int, ...]) -> DomainConfig:
    """A domain whose masks and exits are promised to pay, so that they are drafted with."""
    choice = ExitChoice(stops=[1, 2], width=4, threshold=0.0, annealing=0.2, predicted_speedup=1.5)
    return record(name, {skipped: 0.95, (6, 7): 0.9}, 1.2).model_copy(update={"exit": choice})


def tiny(folder: Path) -> LoadedModel:
    """A model of four layers."""
    return load_model(str(save_tiny_model(folder, weak=0)), "cpu", "fp32")


def drafting_bundle(loaded: LoadedModel) -> Bundle:
    """A bundle of the tiny model with all that a bundle may have."""
    plain = bundle(one=drafting("one", (2, 3, 4, 5)), mix=drafting("mix", (2, 3)))
    here = device_key(Engine(loaded, weight_memory=0).decoder)
    return replace(
        plain,
        model=loaded.fingerprint(),
        anchors=replace(plain.anchors, threshold=-1.0),
        latency={here.slug(): replace(TABLE, device=here)},
        exits=exits(),
    )


def answer(engine: Engine, strategy: str) -> list[int]:
    """The tokens that a strategy decodes."""
    return engine.runner(RunSettings(strategy, max_new_tokens=NEW_TOKENS)).answer(QUESTION).generation.token_ids
