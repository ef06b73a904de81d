"""Searches on random models with three ground truths: what each method finds in 24, 100 and 400 evaluations.

`python -m bench.papers.tools.ground_truths --out build/truths`

The models are small random Llamas, so that hundreds of masks take seconds; a sub-layer is priced at what one of
SmolLM2's takes on this device. `planted`: layers that are weak one by one. `pairs`: pairs of layers whose MLPs cancel.
`diffuse`: every planted sub-layer is weak by a factor of its own. Averages over seeds of the best predicted speed-up;
in brackets the seconds of the search. `--out` keeps every search, so that a killed run goes on, and gets a chart of
each ground truth: the best predicted speed-up against seconds of search, of the first seed's longest searches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.fixtures.hard_planted import plant_diffuse, plant_pairs
from bench.fixtures.planted import plant
from bench.harness.drawing.chart import Labels, stairs
from bench.harness.pricing.latencies import measured_latency, read_latency
from bench.papers.tools.search_cost import METHODS
from ssd_artifacts.files import write_atomically
from ssd_compiler.calibrate import continue_prompts, reference_states, samples_of
from ssd_compiler.search.evaluate import Evaluator
from ssd_compiler.search.search import SearchBounds, search
from ssd_compiler.settings import SearchMethod
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.search.replay import ReferenceStates

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
    parser.add_argument("--out", type=Path, default=Path("build/truths"))
    arguments = parser.parse_args()
    given = arguments.latency
    latency = read_latency(given, 2 * LAYERS) if given else measured_latency("demo@wheel", 2 * LAYERS)
    counts = [int(text) for text in arguments.evaluations.split(",")]
    print(f"{2 * LAYERS} layers, half of them planted; {arguments.seeds} seeds; latencies of {latency.device.device}")
    print("ground truth  planted mask  method      " + "".join(f"{count:>22}" for count in counts))
    for name in TRUTHS:
        grounds = [Ground(name, seed, latency, arguments.out) for seed in range(arguments.seeds)]
        found = {
            (method, count): [ground.searched(method, count) for ground in grounds]
            for count in counts
            for method in METHODS
        }
        truth = np.mean([ground.planted for ground in grounds])
        for method in METHODS:
            cells = (mean_of(found[method, count]) for count in counts)
            shown = "".join(f"{f'{speed:.3f} ({seconds:.0f} s)':>22}" for speed, seconds in cells)
            print(f"{name:13} {truth:12.3f}  {method:10}{shown}")
        added = (mean_of(found["both", count])[0] / mean_of(found["knapsack", count])[0] for count in counts)
        print(f"{'Bayesian optimisation adds to the programme':40}" + "".join(f"{ratio - 1:>22.1%}" for ratio in added))
        longest = {method: found[method, counts[-1]][0] for method in METHODS}
        drawn = {str(method): [*each.progress, (each.seconds, each.best)] for method, each in longest.items()}
        labels = Labels(f"a random model of 24 layers: {name}", "seconds of search", "best speed-up predicted so far")
        stairs(drawn, labels, arguments.out / name)


@dataclass(frozen=True, slots=True)
class Searched:
    """A search's seconds, and its best predicted speed-up whenever that rose."""

    seconds: float
    progress: list[tuple[float, float]]

    @property
    def best(self) -> float:
        """The best predicted speed-up."""
        return self.progress[-1][1]


class Ground:
    """A model with a ground truth, and the searches on it that were made, now or before."""

    def __init__(self, name: str, seed: int, latency: LatencyTable, folder: Path) -> None:
        self._name = name
        self._seed = seed
        self._latency = latency
        self._path = folder / f"{name}-{seed}-{latency.device.slug()}.json"
        self._known: dict[str, object] = json.loads(self._path.read_text()) if self._path.is_file() else {}
        self._made: tuple[Decoder, ReferenceStates, SkipMask] | None = None

    @property
    def planted(self) -> float:
        """Predicted speed-up of the mask of what was planted."""

        def rate() -> float:
            decoder, reference, mask = self._model()
            judge = Evaluator(decoder, reference, self._latency, CONTEXT, 8, 1, float("inf"), lambda: None)
            return judge.rate(mask, "planted").speedup

        return float(self._kept("planted", rate))  # type: ignore[arg-type]

    def searched(self, method: SearchMethod, evaluations: int) -> Searched:
        """Search, or recall the search."""

        def run() -> Mapping[str, object]:
            decoder, reference, _ = self._model()
            bounds = SearchBounds(evaluations, float("inf"), self._seed, 8, method)
            cost = search(decoder, reference, self._latency, CONTEXT, bounds, lambda: None, lambda *_: None).cost
            return asdict(Searched(cost.seconds, cost.progress))

        return Searched(**self._kept(f"{method}, {evaluations}", run))  # type: ignore[arg-type]

    def _kept(self, key: str, compute: Callable[[], object]) -> object:
        if key not in self._known:
            self._known[key] = compute()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(self._known))
        return self._known[key]

    def _model(self) -> tuple[Decoder, ReferenceStates, SkipMask]:
        if self._made is None:
            model, mask = TRUTHS[self._name](random_model(self._seed), self._seed)
            decoder = Decoder(model)
            some = range(4)
            prompts = [[1 + (17 * i + 5 * j + self._seed) % (VOCABULARY - 1) for j in range(12)] for i in some]
            samples = samples_of(continue_prompts(decoder, prompts, 48, frozenset(), lambda: None), self._name)
            self._made = decoder, reference_states(decoder, samples), mask
        return self._made


def mean_of(some: list[Searched]) -> tuple[float, float]:
    """Means of the best predicted speed-up and of the seconds."""
    return float(np.mean([each.best for each in some])), float(np.mean([each.seconds for each in some]))


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
