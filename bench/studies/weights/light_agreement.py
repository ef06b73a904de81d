"""Measures how often the model on lighter copies of its weights chooses the full model's token, by bits and by part.

`python -m bench.studies.weights.light_agreement --model build/off-grid --tokens 1024`
Texts are the prompts of a file of JSON lines, in chunks. Every position is predicted from the text before it, so this
is the agreement of the kernels that drafts run on, but not of a draft's own keys. Parts are lightened alone: the
attention blocks, the MLP blocks, the head, and each quarter of the layers; with `--each` every sub-layer, which is
skipped alone as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.fixtures.prompts.prompt_files import SPEC_BENCH
from bench.studies.weights.packed_quality import HEAD_ROWS, chunks_of
from ssd_profiles.mask import FULL, WIDTHS, SkipMask
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import ModelRunner


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/off-grid")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--each", action="store_true", help="every sub-layer alone")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, "cpu", "fp32")
    decoder = Decoder(loaded.model)
    layers = decoder.shape.num_layers
    decoder.lighten("auto", [SkipMask.of(layers).lightened(4)])
    print(f"copies: {decoder.light.kernels}")
    chunks = list(chunks_of(loaded, arguments.prompts, arguments.tokens))
    full = [chosen(decoder, chunk, None) for chunk in chunks]

    def agreement(mask: SkipMask) -> float:
        equal = [chosen(decoder, chunk, mask) == own for chunk, own in zip(chunks, full, strict=True)]
        return float(torch.cat(equal).float().mean())

    for name, part in each_of(layers) if arguments.each else parts_of(layers):
        whole = SkipMask.of(layers)
        found = {f"{width} bits": agreement(whole.lightened(dict.fromkeys(part, width))) for width in WIDTHS}
        if arguments.each and 2 * layers not in part:
            found["skipped"] = agreement(SkipMask.of(layers, part))
        print(f"{name}: {', '.join(f'{how} {share:.3f}' for how, share in found.items())}", flush=True)


def parts_of(layers: int) -> Iterator[tuple[str, list[int]]]:
    """Names of parts, and the sub-layers that are lightened together; the head is number 2L."""
    yield "all", list(range(2 * layers + 1))
    yield "attention", list(range(0, 2 * layers, 2))
    yield "MLP", list(range(1, 2 * layers, 2))
    yield "head", [2 * layers]
    quarter = -(-layers // 4)
    for begin in range(0, layers, quarter):
        end = min(begin + quarter, layers)
        yield f"layers {begin + 1}-{end}", list(range(2 * begin, 2 * end))


def each_of(layers: int) -> Iterator[tuple[str, list[int]]]:
    """Every sub-layer alone, then the head."""
    for index in range(2 * layers):
        yield f"{('attention', 'MLP')[index % 2]} {index // 2}", [index]
    yield "head", [2 * layers]


@torch.inference_mode()
def chosen(decoder: Decoder, ids: list[int], mask: SkipMask | None) -> Tensor:
    """The most probable token after each of `ids`."""
    [states] = ModelRunner(decoder).answer([Session(decoder).request(ids, mask=mask)])
    width = FULL if mask is None else mask.head_width
    return torch.cat([decoder.logits(rows, width).argmax(-1) for rows in states.split(HEAD_ROWS)])


if __name__ == "__main__":
    run_guarded(main)
