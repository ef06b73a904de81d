"""CLaSp's two claims on a real model: its programme against brute force, and how long a mask stays good.

`python -m bench.papers.tools.clasp --model demo@wheel --prompts build/prompts/spec_bench/dev.jsonl`

First, half of the middle layers are skipped on tokens of generated answers (CLaSp's Figure 3b). The final state's
cosine is printed for the programme's choice, the best and random ones. Second, with all layers free, masks of
neighbouring tokens are compared: Jaccard by distance (Figure 3a), and how often each layer is skipped.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from bench.fixtures.prompts.prompt_files import stratified
from bench.papers.tools.references import answered, rows_of
from ssd_profiles.mask import SkipMask
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.loading.models import conversation, load_model
from ssd_runtime.model.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.kernel_choice import fitted_decoder
from ssd_runtime.search.knapsack import Weights, search_knapsack
from ssd_runtime.search.replay import ReferenceStates

NEVER = 10**6
"""Weight of a layer that no budget can skip."""
DISTANCES = (1, 2, 4, 8, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--free", type=int, default=12)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model)
    decoder = fitted_decoder(loaded.model)
    layers = decoder.shape.num_layers
    first = (layers - arguments.free) // 2
    free = range(first, first + arguments.free)
    found: list[tuple[float, float, float, float]] = []
    agreements: dict[int, list[float]] = {distance: [] for distance in DISTANCES}
    skipped = np.zeros(layers)
    for prompt in stratified(arguments.prompts, arguments.count):
        reference = answered(decoder, loaded.encode(conversation(prompt)), arguments.answer)
        tokens = [rows_of(reference, row, row + 1) for row in range(len(reference))]
        found += [_optimality(decoder, token, free) for token in tokens[:: len(tokens) // 3]]
        masks = [_mask(decoder, token, Weights((1,) * layers), layers // 2) for token in tokens]
        for distance, values in agreements.items():
            values += [a.jaccard(b) for a, b in zip(masks, masks[distance:], strict=False)]
        skipped += np.mean([[mask.bits[2 * layer] for layer in range(layers)] for mask in masks], 0) / arguments.count
    programme, best, middle, quantile = np.mean(found, 0)
    print(
        f"{loaded.fingerprint().name}, {len(found)} tokens, {len(free) // 2} of {len(free)} free layers skipped: cosine"
    )
    print(f"  programme {programme:.4f}, best of all {best:.4f}, at random {middle:.4f}")
    print(f"  the programme is ahead of {quantile:.1%} of all choices")
    print(f"masks of {layers // 2} of {layers} layers, Jaccard by distance in tokens:")
    print("  " + ", ".join(f"{distance}: {np.mean(values):.3f}" for distance, values in agreements.items() if values))
    print("skipped, by layer: " + " ".join(f"{share:.2f}" for share in skipped))


def _mask(decoder: Decoder, token: ReferenceStates, weights: Weights, count: int) -> SkipMask:
    return search_knapsack(decoder, token, weights, threshold=-1.0, exactly=count)[0].mask


@torch.inference_mode()
def _optimality(decoder: Decoder, token: ReferenceStates, free: range) -> tuple[float, float, float, float]:
    """Cosine of the programme's choice, the best and mean over all choices, and the share that the programme beats."""
    count = len(free) // 2
    weights = Weights(tuple(1 if layer in free else NEVER for layer in range(decoder.shape.num_layers)))
    programme = search_knapsack(decoder, token, weights, threshold=-1.0, exactly=count)[0].cosine
    choices = torch.tensor([[layer in some for layer in free] for some in combinations(free, count)])
    [group] = token.groups
    variant, x = (
        decoder.batches.variants(group.cache, group.start, 1),
        token.states[2 * free[0]].repeat(len(choices), 1),
    )
    for layer in range(free[0], decoder.shape.num_layers):
        kept = ~choices[:, layer - free[0]] if layer in free else torch.ones(len(choices), dtype=torch.bool)
        batch = Batch.of([variant.times(int(kept.sum()))])
        x[kept] = decoder.run(x[kept], batch, first=2 * layer, last=2 * layer + 2)
    target = decoder.norm(token.states[-1])
    cosines = torch.cosine_similarity(decoder.norm(x), target, -1)
    beaten = float((cosines < programme - 1e-6).float().mean())
    return programme, float(cosines.max()), float(cosines.mean()), beaten


if __name__ == "__main__":
    run_guarded(main)
