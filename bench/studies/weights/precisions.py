"""Compares searches at equal evaluations, where each sub-layer may be skipped, in 4 bits, in 8 or in full.

`python -m bench.studies.weights.precisions --model build/off-grid --domain alpaca --evaluations 48`
Masks are searched on half of the calibration prompts. The best one of each search is rated again on the other half,
which no search saw: what was found by luck is lost there. Uniform choices, everything at one width, stand beside it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from bench.fixtures.prompts.calibration import calibration
from ssd_artifacts.fingerprint import config_sha256
from ssd_compiler.calibrate import Sample, middle_context, reference_states
from ssd_compiler.search.evaluate import Evaluator
from ssd_compiler.search.search import SearchBounds, SearchResult, light_masks, search
from ssd_compiler.settings import DRAFT_BLOCK, CompileSettings, SearchMethod
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import WIDTHS, SkipMask
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.profiling.light import with_light
from ssd_runtime.weights.draft_bits import read_draft_bits

METHODS: tuple[SearchMethod, ...] = ("knapsack", "bayesian", "both")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/off-grid")
    parser.add_argument("--domain", default="alpaca")
    parser.add_argument("--bits", default="none,8,auto", help="what the searches choose from, of --draft-bits")
    parser.add_argument("--evaluations", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=12, help="half of them for the searches")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    engine = Engine.open(model=arguments.model, draft_bits="none")
    decoder = engine.decoder
    layers = decoder.shape.num_layers
    whole = SkipMask.of(layers)
    settings = CompileSettings(arguments.model, (arguments.domain,), search_prompts=arguments.prompts)
    _, samples = calibration(arguments.domain, settings, engine.loaded, decoder, print)
    context = middle_context(samples)
    halves = [samples[half::2] for half in (0, 1)]
    print(f"{arguments.model}: {layers} layers, {context} tokens of context")
    for bits in map(read_draft_bits, arguments.bits.split(",")):
        decoder.lighten(bits, [whole.lightened(min(WIDTHS))])
        table = replace(engine.latency, light={})
        key = config_sha256(engine.loaded.model.config.to_dict())
        latency = with_light(table, decoder, key) if decoder.light.kernels else table
        costs = [f"{width} bits {latency.draft_cost(whole.lightened(width), context):.3f}" for width in latency.light]
        print(
            f"--draft-bits {bits}: {decoder.light.kernels or 'no copies'}; "
            f"draft steps in plain ones: {', '.join(costs) or '–'}"
        )
        seen, held = (_evaluator(engine, half, latency, context) for half in halves)
        for mask in light_masks(decoder):
            print(_line("everything", mask, seen, held), flush=True)
        for method in METHODS:
            bounds = SearchBounds(arguments.evaluations, float("inf"), arguments.seed, settings.block, method)
            found = search(decoder, seen.reference, latency, context, bounds, lambda: None, lambda *_: None)
            best = SkipMask.from_hex(max(found.cost.rated, key=lambda each: each[2])[0], layers)
            took = f"{found.cost.evaluations} masks in {found.cost.seconds:.0f} s; {_by_origin(found)}"
            print(f"{_line(method, best, seen, held)}; {took}", flush=True)


def _evaluator(engine: Engine, samples: Sequence[Sample], latency: LatencyTable, context: int) -> Evaluator:
    return Evaluator(
        decoder=engine.decoder,
        reference=reference_states(engine.decoder, samples),
        latency=latency,
        context=context,
        block=DRAFT_BLOCK,
        most=1 << 30,
        deadline=float("inf"),
        tick=lambda: None,
    )


def _line(name: str, mask: SkipMask, seen: Evaluator, held: Evaluator) -> str:
    """A mask's composition, and its token agreement and predicted speed-up on the text searched and on the other."""
    size = len(mask)
    counts = {f"{width} bits": sum(mask.width(i) == width for i in range(size)) for width in WIDTHS}
    counts = {"skipped": len(list(mask)), **counts, "in full": size - len(list(mask)) - sum(counts.values())}
    about = ", ".join(f"{count} {how}" for how, count in counts.items() if count)
    for each in (seen, held):
        each.rated.clear()  # a mask that compares with no other is rated on the whole text
    rated = [each.rate(mask, name) for each in (seen, held)]
    figures = [f"{each.profile.token_agreement:.3f} → {each.speedup:.3f}x" for each in rated]
    return f"  {name:10} {about}, head {mask.head_width or 'in full'}: searched {figures[0]}, held out {figures[1]}"


def _by_origin(found: SearchResult) -> str:
    best = defaultdict[str, list[float]](list)
    for text, origin, speedup in found.cost.rated:
        best[f"{origin}{' light' if '.' in text and origin != 'light' else ''}"].append(speedup)
    return ", ".join(f"{origin} {max(some):.3f} of {len(some)}" for origin, some in best.items())


if __name__ == "__main__":
    run_guarded(main)
