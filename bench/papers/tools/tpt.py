"""Predicted against measured speed over good and bad masks, for TPT and its variants.

`python -m bench.papers.tools.tpt --artifact build/bundle05 --domain gsm8k --out build/pictures`

Masks come from the domain's frontier and from random changes of it, each with a short and a long draft. Agreement is
from the search prompts; speed is from timed decoding of the validation prompts, interleaved with plain decoding. It
prints Pearson's r and R² of a straight line.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.fixtures.bundles import model_title
from bench.fixtures.prompts.calibration import calibration
from bench.harness.drawing.chart import Labels, points
from ssd_compiler.calibrate import middle_context, reference_states
from ssd_compiler.settings import CompileSettings
from ssd_profiles.acceptance import DRAFT_LENGTHS, AcceptanceProfile
from ssd_profiles.formulas import tokens_per_time
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.offline.interleaved import in_turn
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.search.replay import replay_mask
from ssd_runtime.sequence.session import Session

LENGTHS = (3, 6)


@dataclass(frozen=True, slots=True)
class Way:
    """A mask and a draft length with its predicted speed-ups."""

    mask: SkipMask
    length: int
    predictions: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, required=True)
    parser.add_argument("--domain", default="gsm8k")
    parser.add_argument("--masks", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("build/pictures"))
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact)
    bundle = engine.bundle
    assert bundle is not None
    loaded = engine.loaded
    decoder = engine.decoder
    latency = engine.latency
    settings = CompileSettings("", (arguments.domain,))
    prompts, samples = calibration(arguments.domain, settings, loaded, decoder, print)
    reference = reference_states(decoder, samples)
    ways = list[Way]()
    context = middle_context(samples)
    known = [entry.skip_mask(decoder.shape.num_layers) for entry in bundle.domains[arguments.domain].frontier]
    for mask in some_masks(known, arguments.masks):
        profile = AcceptanceProfile.of_traces(replay_mask(decoder, reference, mask, LENGTHS[-1]))
        ways += [Way(mask, length, predicted(profile, mask, length, latency, context)) for length in LENGTHS]

    limits = Limits(arguments.max_new_tokens, loaded.eos_ids)
    contenders = {"plain": PlainPlanner} | {
        str(number): lambda way=way: ConstantPlanner(Plan.masked("way", way.mask, way.length))
        for number, way in enumerate(ways)
    }
    warm = Session(decoder)
    in_turn(warm, warm.prefill(prompts.search[0]), contenders, Limits(8))
    seconds = dict.fromkeys(contenders, 0.0)
    for turn, ids in enumerate(prompts.validation[: arguments.prompts]):
        session = Session(decoder)
        for name, done in in_turn(session, session.prefill(ids), contenders, limits, 7 * turn).items():
            seconds[name] += done.decode_seconds
    measured = [seconds["plain"] / seconds[str(number)] for number in range(len(ways))]
    print(f"{len(ways)} ways over {arguments.prompts} prompts: measured {min(measured):.2f} to {max(measured):.2f}")
    for name in ways[0].predictions:
        values = [way.predictions[name] for way in ways]
        r = float(np.corrcoef(values, measured)[0, 1])
        error = float(np.median(np.abs(np.asarray(values) / measured - 1)))
        print(f"{name:46} Pearson {r:.3f}, R² {r * r:.3f}, median |predicted ÷ measured - 1| {error:.1%}")
    series = {name: ([way.predictions[name] for way in ways], measured) for name in list(ways[0].predictions)[1:]}
    labels = Labels(model_title(loaded.fingerprint().name), "predicted ÷ plain decoding", "measured ÷ plain decoding")
    for path in points(series, labels, arguments.out / "tpt"):
        print(f"picture: {path}", file=sys.stderr)


def some_masks(known: Sequence[SkipMask], count: int, seed: int = 0) -> list[SkipMask]:
    """Choose masks: half of them spread over the frontier, half with some sub-layers exchanged at random."""
    draws = random.Random(seed)
    layers = known[0].num_layers
    spread = [known[round(i)] for i in np.linspace(0, len(known) - 1, min(count // 2, len(known)))]
    changed = list[SkipMask]()
    while len(spread) + len(changed) < count:
        mask = set(draws.choice(spread))
        share = draws.choice([0.05, 0.1, 0.2])
        changed.append(SkipMask.of(layers, mask ^ {i for i in range(2 * layers) if draws.random() < share / 2}))
    return list(dict.fromkeys([*spread, *changed]))


@torch.inference_mode()
def predicted(
    profile: AcceptanceProfile, mask: SkipMask, length: int, latency: LatencyTable, context: float
) -> dict[str, float]:
    """Predict the speed-up by several formulas. Agreement alone is included because others rank masks by it."""
    draft = latency.step_seconds(context, 1, mask)
    costs = CostModel(latency).at(context)
    verification = float(costs.verification(length))
    row = DRAFT_LENGTHS.index(length)
    tokens = float(profile.tokens[row, 0])
    steps = float(profile.steps[row, 0])
    agreement = profile.token_agreement
    return {
        "token agreement alone": agreement,
        "TPT, verification as a plain step (KnapSpec)": tokens_per_time(agreement, length, draft, costs.plain)
        * costs.plain,
        "TPT, verification measured": tokens_per_time(agreement, length, draft, verification) * costs.plain,
        "replayed drafts, verification measured (ours)": float(costs.rate(tokens, steps, draft)) * costs.plain,
    }


if __name__ == "__main__":
    run_guarded(main)
