"""Times `auto` with a bundle against `auto` without one, which drafts too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_compiler.data.prompts import DomainPrompts
from ssd_compiler.report.added import added_by
from ssd_compiler.search.stage import measured_on
from ssd_compiler.stages import Stages
from ssd_compiler.validate import timed_speedup
from ssd_profiles.latency import LatencyTable
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.strategy import StrategyInputs

AUTO = "auto"
MOST_PROMPTS = 8
"""Most prompts of a domain: each is decoded twice more."""


def with_added(bundle: Bundle, stages: Stages, prompts: Mapping[str, DomainPrompts], latency: LatencyTable) -> Bundle:
    """The bundle with what it adds in its report, per new domain, from prompts that the search never saw.

    `auto` with the bundle and without it decode in turn, each over one stream. Guesses take the tokens that are easy
    for a mask as well, so that a mask which pays by itself may add nothing.
    """
    assert bundle.report is not None, "a compile writes one"
    report, before = json.loads(bundle.report), added_by(stages.base)
    for figures in report["domains"]:
        name = figures["domain"]
        if name in before:
            figures["added"] = before[name].model_dump(mode="json")
        if (found := prompts.get(name)) is not None:
            measure = partial(_added, bundle, stages, found, latency)
            figures["added"] = stages.work.stage(f"added-{name}-{measured_on(latency)}", measure)
    return replace(bundle, report=json.dumps(report, indent=1))


def _added(bundle: Bundle, stages: Stages, prompts: DomainPrompts, latency: LatencyTable) -> dict[str, Any]:
    decoder = stages.decoder
    settings = read_settings(AUTO, [])
    makers = {
        name: make_strategy(StrategyInputs(name=AUTO, settings=settings, decoder=decoder, bundle=used, latency=latency))
        for name, used in {"without": None, "with": bundle}.items()
    }
    chosen = prompts.validation[:MOST_PROMPTS]
    limits = Limits(prompts.max_new_tokens, stages.loaded.eos_ids)
    with stages.reporter.stage(f"{prompts.name}: what the bundle adds", len(chosen)) as tick:
        found = timed_speedup(decoder, chosen, makers, limits, tick, stages.sampling)
    return {"prompts": found.prompts, "speedup": found.speedup, "interval": list(found.speedup_interval)}
