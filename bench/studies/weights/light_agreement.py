"""Measures how often the model on lighter copies of its weights chooses the full model's token, by bits and by part.

`python -m bench.studies.weights.light_agreement --model build/off-grid --tokens 1024`
Texts are the prompts of a file of JSON lines, in chunks. Every position is predicted from the text before it, so this
is the agreement of the kernels that drafts run on, but not of a draft's own keys. Parts are lightened alone: the
attention blocks, the MLP blocks, the head, and each quarter of the layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.fixtures.prompt_files import SPEC_BENCH
from bench.studies.weights.packed_quality import HEAD_ROWS, chunks_of
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.linear import Linear

WIDTHS: tuple[DraftBits, ...] = ("8", "4")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/off-grid")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, "cpu", "fp32")
    decoder = Decoder(loaded.model)
    chunks = list(chunks_of(loaded, arguments.prompts, arguments.tokens))
    full = [chosen(decoder, chunk, light=False) for chunk in chunks]
    for name, part in parts_of(decoder).items():
        for bits in WIDTHS:
            decoder.lighten("none")
            for linear in part:
                linear.lighten(bits)
            decoder.follow_layers()
            equal = [chosen(decoder, chunk, light=True) == own for chunk, own in zip(chunks, full, strict=True)]
            print(f"{name}, {bits} bits ({decoder.light}): {float(torch.cat(equal).float().mean()):.3f}", flush=True)


def parts_of(decoder: Decoder) -> dict[str, Sequence[Linear]]:
    """The projections that are lightened together, by name."""
    layers = [layer.linears() for layer in decoder.layers]
    head = decoder.head_projection
    quarter = -(-len(layers) // 4)
    parts = {
        "all": [each for layer in layers for each in layer] + [head],
        "attention": [each for layer in layers for each in layer[:2]],
        "MLP": [each for layer in layers for each in layer[2:]],
        "head": [head],
    }
    for begin in range(0, len(layers), quarter):
        own = layers[begin : begin + quarter]
        parts[f"layers {begin + 1}-{begin + len(own)}"] = [each for layer in own for each in layer]
    return parts


@torch.inference_mode()
def chosen(decoder: Decoder, ids: list[int], light: bool) -> Tensor:
    """The most probable token after each of `ids`."""
    [states] = ModelRunner(decoder).answer([Session(decoder).request(ids, light=light)])
    return torch.cat([decoder.logits(rows, light).argmax(-1) for rows in states.split(HEAD_ROWS)])


if __name__ == "__main__":
    run_guarded(main)
