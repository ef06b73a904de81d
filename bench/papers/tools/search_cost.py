"""Compares searches by seconds on a model whose skippable layers are known, and extrapolates Self-SD's own.

`python -m bench.papers.tools.search_cost --model build/pairs --evaluations 24,100,400 --out build/pictures` also draws
the best predicted speed-up against seconds. Ground truths: `bench.fixtures.planted` (layers that are weak one by one)
and `bench.fixtures.hard_planted` (pairs that cancel; diffuse redundancy).

Self-SD rates a mask by timed generation of 8 prompts × 32 tokens, 1000 times; `--timed` such evaluations are made here
and extrapolated. Its search is run on our objective too (`--self-sd`), which has no timing noise: more generous to it
than its own.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from time import perf_counter

import numpy as np
from bayes_opt import BayesianOptimization

from bench.fixtures.bundles import model_title
from bench.fixtures.planted import WEAK_FILE
from bench.fixtures.prompts.calibration import calibration
from bench.harness.drawing.chart import Labels, stairs
from ssd_compiler.calibrate import Sample, middle_context, reference_states
from ssd_compiler.search.evaluate import Evaluator
from ssd_compiler.search.search import SearchBounds, SearchResult, search
from ssd_compiler.search.self_sd import tokens_per_second
from ssd_compiler.search.vertices import VertexImprovement
from ssd_compiler.settings import CompileSettings, SearchMethod
from ssd_profiles.mask import SkipMask
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.model.decoder import Decoder

SELF_SD_EVALUATIONS = 1000
METHODS: tuple[SearchMethod, ...] = ("knapsack", "bayesian", "both")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/planted")
    parser.add_argument("--domain", default="cnn")
    parser.add_argument("--evaluations", default="24,100,400")
    parser.add_argument("--self-sd", type=int, default=150, help="evaluations of its search on our objective")
    parser.add_argument("--timed", type=int, default=3, help="timed evaluations of Self-SD, to extrapolate from")
    parser.add_argument("--prompts", type=int, default=8, help="calibration prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/pictures"))
    arguments = parser.parse_args()
    settings = CompileSettings(arguments.model, (arguments.domain,), search_prompts=arguments.prompts)
    engine = Engine.open(model=arguments.model)
    decoder = engine.decoder
    latency = engine.latency
    layers = decoder.shape.num_layers
    _, samples = calibration(arguments.domain, settings, engine.loaded, decoder, print)
    reference = reference_states(decoder, samples)
    context = middle_context(samples)
    weak_file = Path(arguments.model) / WEAK_FILE
    weak = SkipMask.from_hex(weak_file.read_text(), layers) if weak_file.is_file() else None

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

    print(f"{arguments.model}: {layers} layers, {len(reference)} rows")
    if weak is not None:
        print(f"the planted mask: predicted at {evaluator(1).rate(weak, 'planted').speedup:.3f}x")
    print("method    allowed  rated  seconds   predicted   Jaccard   best by origin")
    drawn = dict[str, list[tuple[float, float]]]()
    for method in METHODS:
        for most in map(int, arguments.evaluations.split(",")):
            bounds = SearchBounds(most, float("inf"), arguments.seed, settings.block, method)
            found = search(decoder, reference, latency, context, bounds, lambda: None, lambda *_: None)
            print(f"{method:9} {most:7} {_outcome(found, weak, layers)}", flush=True)
            drawn[f"{method}, {most}"] = [*found.cost.progress, (found.cost.seconds, found.cost.progress[-1][1])]
    if arguments.timed:
        timed = [self_sd_evaluation(decoder, samples, i) for i in range(arguments.timed)]
        whole = SELF_SD_EVALUATIONS * float(np.mean(timed))
        print(
            f"Self-SD: {np.mean(timed):.1f} s an evaluation ({min(timed):.1f} to {max(timed):.1f}), "
            f"{whole:.0f} s for {SELF_SD_EVALUATIONS}, extrapolated: {whole / found.cost.seconds:.0f} times our search"
        )
    if arguments.self_sd:
        began = perf_counter()
        theirs = evaluator(arguments.self_sd)
        self_sd_search(theirs, layers)
        taken = perf_counter() - began
        jaccard = f"{theirs.best().mask.jaccard(weak):7.2f}" if weak is not None else "      –"
        best = theirs.best().speedup
        print(f"Self-SD's {arguments.self_sd:6} {len(theirs.rated):6} {taken:8.0f} {best:11.3f} {jaccard}")
        drawn["Self-SD's"] = [*theirs.progress, (taken, theirs.progress[-1][1])]
    labels = Labels(model_title(arguments.model), "seconds of search", "best speed-up predicted so far")
    for path in stairs(drawn, labels, arguments.out / "search"):
        print(f"picture: {path}", file=sys.stderr)


def _outcome(found: SearchResult, weak: SkipMask | None, layers: int) -> str:
    """The cells of a search: what it took, the best mask, and the best speed-up by origin."""
    best = defaultdict[str, list[float]](list)
    for _, origin, speedup in found.cost.rated:
        best[origin].append(speedup)
    origins = ", ".join(f"{origin} {max(some):.3f} of {len(some)}" for origin, some in best.items())
    mask = found.frontier[found.finalists[0]].skip_mask(layers)
    jaccard = f"{mask.jaccard(weak):9.2f}" if weak is not None else "        –"
    predicted = found.cost.progress[-1][1]
    return f"{found.cost.evaluations:6} {found.cost.seconds:8.0f} {predicted:11.3f} {jaccard}   {origins}"


def self_sd_evaluation(decoder: Decoder, samples: list[Sample], seed: int) -> float:
    """Seconds of one evaluation of Self-SD, with a random mask of half the sub-layers."""
    layers = decoder.shape.num_layers
    skipped = np.flatnonzero(np.random.default_rng(seed).random(2 * layers) > 0.5)
    began = perf_counter()
    tokens_per_second(decoder, [sample.prompt for sample in samples[:8]], SkipMask.of(layers, map(int, skipped)))
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
