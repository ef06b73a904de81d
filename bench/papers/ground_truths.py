"""Searches on random models with three ground truths: what each method finds in 24, 100 and 400 evaluations.

`python -m bench.papers.ground_truths`

The models are small random Llamas, so that hundreds of masks take seconds; a sub-layer is priced at what one of
SmolLM2's takes on this device. `planted`: layers that are weak one by one. `pairs`: pairs of layers whose MLPs cancel.
`diffuse`: every planted sub-layer is weak by a factor of its own. Averages over seeds of the best predicted speed-up;
in brackets the seconds of the search.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.fixtures.hard_planted import plant_diffuse, plant_pairs
from bench.fixtures.planted import plant
from bench.harness.latencies import measured_latency, read_latency
from bench.papers.search_cost import METHODS
from ssd_compiler.calibrate import continue_prompts, reference_states, samples_of
from ssd_compiler.search.evaluate import Evaluator
from ssd_compiler.search.search import SearchBounds, search
from ssd_profiles.mask import SkipMask
from ssd_runtime.command import run_guarded
from ssd_runtime.model.decoder import Decoder

LAYERS = 12
"""Real layers; as many are planted."""
VOCABULARY = 512
CONTEXT = 128
Made = tuple[PreTrainedModel, SkipMask]
TRUTHS: dict[str, Callable[[PreTrainedModel, int], Made]] = {
    "pairs": lambda model, seed: plant_pairs(model, LAYERS // 2, 1.0, seed=seed),
    "diffuse": lambda model, seed: plant_diffuse(model, LAYERS, 0.01, 0.5, seed=seed),
    "planted": lambda model, seed: plant(model, 0.02, LAYERS, seed),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--evaluations", default="24,100,400")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--latency", type=Path, help="a latency table of SmolLM2, in place of this device's")
    arguments = parser.parse_args()
    given = arguments.latency
    latency = read_latency(given, 2 * LAYERS) if given else measured_latency("demo", 2 * LAYERS)
    counts = [int(text) for text in arguments.evaluations.split(",")]
    print(f"{2 * LAYERS} layers, half of them planted; {arguments.seeds} seeds; latencies of {latency.device.device}")
    print("ground truth  planted mask  method      " + "".join(f"{count:>22}" for count in counts))
    for name, make in TRUTHS.items():
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        truths = list[float]()
        for seed in range(arguments.seeds):
            model, mask = make(random_model(seed), seed)
            decoder = Decoder(model)
            prompts = [[1 + (17 * i + 5 * j + seed) % (VOCABULARY - 1) for j in range(12)] for i in range(4)]
            samples = samples_of(continue_prompts(decoder, prompts, 48, frozenset(), lambda: None), name)
            reference = reference_states(decoder, samples)
            judge = Evaluator(decoder, reference, latency, CONTEXT, 8, 1, float("inf"), lambda: None)
            truths.append(judge.rate(mask, "planted").speedup)
            for method in METHODS:
                for count in counts:
                    bounds = SearchBounds(count, float("inf"), seed, 8, method)
                    cost = search(decoder, reference, latency, CONTEXT, bounds, lambda: None, lambda *_: None).cost
                    found.setdefault((method, count), []).append((cost.progress[-1][1], cost.seconds))
        for method in METHODS:
            cells = (np.mean(found[method, count], 0) for count in counts)
            shown = "".join(f"{f'{speed:.3f} ({seconds:.0f} s)':>22}" for speed, seconds in cells)
            print(f"{name:13} {np.mean(truths):12.3f}  {method:10}{shown}", flush=True)


def random_model(seed: int) -> PreTrainedModel:
    """A random Llama whose layers matter: its weights are larger than at the start of a training."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.12,
    )
    return LlamaForCausalLM(config).eval()


if __name__ == "__main__":
    run_guarded(main)
