"""Cost and result of the search, against Self-SD's, and the contribution of Bayesian optimisation.

`python -m bench.papers.search_cost --model build/planted --domain cnn --out build/pictures` also draws speed against
seconds.

Self-SD rates a mask by timed generation of 8 prompts × 32 tokens, 1000 times; a few such evaluations are timed here and
extrapolated. The masks that it would find are estimated generously: its Bayesian optimisation over 2L thresholded
variables runs for `--self-sd-evaluations` masks on our objective, which has no timing noise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
from bayes_opt import BayesianOptimization

from bench.fixtures.calibration import calibration
from bench.fixtures.planted import WEAK_FILE
from bench.harness.chart import stairs
from ssd_compiler.calibrate import Sample, middle_context, reference_states
from ssd_compiler.search.bayesian import VertexImprovement
from ssd_compiler.search.evaluate import Evaluator
from ssd_compiler.search.search import SearchBounds, search
from ssd_compiler.settings import CompileSettings
from ssd_profiles.mask import SkipMask
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.loop import Limits, generate
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.profiling.latency import measure_latency
from ssd_runtime.search.knapsack import Weights, search_knapsack
from ssd_runtime.weights.kernel_choice import fitted_decoder

SELF_SD_EVALUATIONS = 1000
SELF_SD_TOKENS = 32
SELF_SD_STOP = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/planted")
    parser.add_argument("--domain", default="cnn")
    parser.add_argument("--evaluations", type=int, default=48)
    parser.add_argument("--self-sd-evaluations", type=int, default=150)
    parser.add_argument("--timed", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/pictures"))
    arguments = parser.parse_args()
    settings = CompileSettings(arguments.model, (arguments.domain,))
    loaded = load_model(arguments.model)
    decoder = fitted_decoder(loaded.model)
    latency = measure_latency(decoder)
    _, samples = calibration(arguments.domain, settings, loaded, decoder, print)
    context = middle_context(samples)
    weak_file = Path(arguments.model) / WEAK_FILE
    weak = SkipMask.from_hex(weak_file.read_text(), decoder.shape.num_layers) if weak_file.is_file() else None

    def show(name: str, mask: SkipMask, speedup: float, seconds: float, work: str) -> None:
        jaccard = f", Jaccard with the planted set {mask.jaccard(weak):.2f}" if weak else ""
        print(f"{name}: best mask predicted at {speedup:.3f}x{jaccard}; {seconds:.0f} s, {work}", flush=True)

    reference = reference_states(decoder, samples)

    def evaluator(most: int) -> Evaluator:
        return Evaluator(
            decoder=decoder,
            reference=reference,
            latency=latency,
            context=context,
            block=settings.block,
            most=most,
            deadline=float("inf"),
            tick=lambda: None,
        )

    began = perf_counter()
    alone = evaluator(arguments.evaluations)
    candidates = search_knapsack(decoder, reference.every(len(reference) // 24), Weights.of(latency, context))
    picks = np.unique(np.linspace(1, len(candidates) - 1, arguments.evaluations).round().astype(int))
    alone.rate_all((candidates[i].mask for i in picks), "knapsack")
    alone_seconds = perf_counter() - began
    show("knapsack alone", alone.best().mask, alone.best().speedup, alone_seconds, f"{len(picks)} masks")

    began = perf_counter()
    bounds = SearchBounds(evaluations=arguments.evaluations, seconds=float("inf"), seed=0, block=settings.block)
    found = search(decoder, reference, latency, context, bounds, lambda: None, lambda *_: None)
    ours = perf_counter() - began
    best = found.frontier[found.finalists[0]]
    mask = best.skip_mask(decoder.shape.num_layers)
    rated = alone.rated.get(mask) or evaluator(1).rate(mask, best.origin)
    work = f"{found.cost.evaluations} masks, {found.cost.target_forwards} forwards of {len(reference)} rows"
    show(f"our search (best by {best.origin})", mask, rated.speedup, ours, work)

    timed = [self_sd_evaluation(decoder, samples, i) for i in range(arguments.timed)]
    whole = SELF_SD_EVALUATIONS * float(np.mean(timed))
    print(
        f"Self-SD: {np.mean(timed):.1f} s an evaluation ({min(timed):.1f} to {max(timed):.1f}), "
        f"{whole:.0f} s for {SELF_SD_EVALUATIONS}: {whole / ours:.0f} times our search"
    )
    began = perf_counter()
    theirs = evaluator(arguments.self_sd_evaluations)
    self_sd_search(theirs, decoder.shape.num_layers)
    taken = perf_counter() - began
    work = f"{arguments.self_sd_evaluations} masks"
    show("Self-SD's search on our objective", theirs.best().mask, theirs.best().speedup, taken, work)
    searches = {
        "the compiler's": (found.cost.progress, ours),
        "knapsack alone": (alone.progress, alone_seconds),
        "Self-SD's": (theirs.progress, taken),
    }
    # The best value holds until the search ends.
    drawn = {name: [*steps, (end, steps[-1][1])] for name, (steps, end) in searches.items()}
    for path in stairs(drawn, "seconds of search", "best speed-up predicted so far", arguments.out / "search"):
        print(f"picture: {path}", file=sys.stderr)


def self_sd_evaluation(decoder: Decoder, samples: list[Sample], seed: int) -> float:
    """Seconds of one evaluation of Self-SD: 32 tokens for each of 8 prompts with a random mask of half the
    sub-layers."""
    layers = decoder.shape.num_layers
    skipped = np.flatnonzero(np.random.default_rng(seed).random(2 * layers) > 0.5)
    plan = Plan.masked("Self-SD", SkipMask.of(layers, (int(i) for i in skipped)), 12, SELF_SD_STOP)
    began = perf_counter()
    for sample in samples[:8]:
        generate(Session(decoder), sample.prompt, ConstantPlanner(plan), Limits(SELF_SD_TOKENS))
    return perf_counter() - began


def self_sd_search(evaluator: Evaluator, layers: int) -> None:
    """Run Bayesian optimisation over 2L variables in [0, 1], skipped above one half."""
    process = BayesianOptimization(
        f=None,
        pbounds={str(i): (0.0, 1.0) for i in range(2 * layers)},
        acquisition_function=VertexImprovement(xi=0.01, random_state=0),
        random_state=0,
        verbose=0,
    )
    while not evaluator.exhausted:
        point = process.suggest()
        rated = evaluator.rate(SkipMask.of(layers, (int(i) for i, value in point.items() if value > 0.5)), "Self-SD")
        process.register(point, rated.speedup)


if __name__ == "__main__":
    run_guarded(main)
