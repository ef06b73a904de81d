"""Measures the pieces of a large model's forward on this machine: one layer and the head of each shape.

    python -m bench.studies.scale.pieces --out build/pieces.json

A whole model of these shapes fits no small machine, but it is as many equal layers as it has, one after the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ssd_runtime.model.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.clock import seconds
from ssd_runtime.weights.kernel_choice import fitted_decoder

ROWS = (1, 8, 32, 256)
CONTEXT = 512
REPEATS = 5


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: str

    def config(self, layers: int) -> LlamaConfig:
        """The configuration of a model of so many of its layers."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            dtype=getattr(torch, self.dtype),
        )


SHAPES = (
    Shape("study", 8, 256, 1024, 4, 2, 49152, "float32"),
    Shape("1B", 16, 2048, 8192, 32, 8, 128256, "float32"),
    Shape("8B", 32, 4096, 14336, 32, 8, 128256, "bfloat16"),
)
LARGEST = Shape("70B", 80, 8192, 28672, 64, 8, 128256, "bfloat16")
"""Its layer does not fit a small machine beside others: the 8B's times the ratio of their parameters."""


@dataclass(frozen=True)
class Pieces:
    """Seconds of one layer and of the head by number of rows, and bytes."""

    shape: Shape
    layer: dict[int, float]
    head: dict[int, float]
    weight_bytes: float

    def forward(self, rows: int, head_rows: int = 1) -> float:
        """Seconds of a forward of the whole model: measured rows, linear between and beyond them."""
        return self.shape.layers * between(self.layer, rows) + between(self.head, head_rows)


def between(points: dict[int, float], at: float) -> float:
    """The value at a number of rows: linear between the points, and beyond the last one in proportion."""
    known = sorted(points)
    if at >= known[-1]:
        return points[known[-1]] * at / known[-1]
    for low, high in pairwise(known):
        if at <= high:
            return points[low] + (points[high] - points[low]) * (max(at, low) - low) / (high - low)
    raise AssertionError("the points cover everything up to the last one")


def measure(shape: Shape) -> Pieces:
    """Time one layer and the head. One layer is enough where it is larger than the processor's cache; else all are."""
    torch.manual_seed(0)
    layers = shape.layers if shape.hidden < 1024 else 1
    before = torch.get_default_dtype()
    # Made in their own dtype, since a copy in fp32 of the largest layer takes 8 GB.
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        model = LlamaForCausalLM(shape.config(layers)).eval()
    finally:
        torch.set_default_dtype(before)
    decoder = fitted_decoder(model, None)
    layer, head = dict[int, float](), dict[int, float]()
    with torch.inference_mode():
        cache = decoder.new_cache()
        cache.reserve(CONTEXT + max(ROWS))
        for rows in ROWS:
            x = decoder.embed([(17 + 31 * i) % shape.vocabulary for i in range(rows)])
            batch = Batch.of([decoder.batches.consecutive(cache, CONTEXT, rows)])
            layer[rows] = _median(partial(decoder.run, x, batch), decoder) / layers
            head[rows] = _median(partial(decoder.logits, x), decoder)
    weights = sum(parameter.numel() for parameter in model.model.layers[0].parameters()) * shape.layers
    total = (weights + shape.vocabulary * shape.hidden) * model.dtype.itemsize
    del decoder, model, cache
    gc.collect()
    return Pieces(shape, layer, head, total)


def _median(work: Callable[[], object], decoder: Decoder) -> float:
    work()
    return statistics.median(seconds(work, decoder.device) for _ in range(REPEATS))


def load(path: Path) -> list[Pieces]:
    """Read what `main` wrote, and add the largest shape, scaled from the last one measured."""
    found = [
        Pieces(
            Shape(**each["shape"]),
            {int(rows): value for rows, value in each["layer"].items()},
            {int(rows): value for rows, value in each["head"].items()},
            each["weight_bytes"],
        )
        for each in json.loads(path.read_text())
    ]
    last, wider = found[-1], LARGEST
    ratio = layer_parameters(wider) / layer_parameters(last.shape)
    per_row = wider.hidden / last.shape.hidden
    weights = layer_parameters(wider) * wider.layers + wider.vocabulary * wider.hidden
    scaled = Pieces(
        wider,
        {rows: value * ratio for rows, value in last.layer.items()},
        {rows: value * per_row for rows, value in last.head.items()},
        2.0 * weights,
    )
    return [*found, scaled]


def layer_parameters(shape: Shape) -> int:
    """Weights of one layer's projections."""
    head = shape.hidden // shape.heads
    attention = 2 * shape.hidden * shape.hidden + 2 * shape.hidden * shape.kv_heads * head
    return attention + 3 * shape.hidden * shape.intermediate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found = []
    for shape in SHAPES:
        found.append(asdict(measure(shape)))
        print(json.dumps(found[-1]), flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
