"""Measures the loss by packed weights: perplexity and greedy agreement against the dequantised model.

`python -m bench.studies.weights.packed_quality --model demo@wheel --tokens 20000`
Texts are the prompts of a file of JSON lines, each followed by those after it up to a chunk's length. Both models
predict every token of a chunk but its first. Agreement is the share of positions at which both give the highest logit
to the same token. The interval of the ratio of perplexities is by Student's t over chunks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from bench.fixtures.prompts.prompt_files import SPEC_BENCH
from ssd_profiles.prompts import read_prompts
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import LoadedModel, load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.weights.kernel_choice import fitted_decoder

CHUNK = 512
HEAD_ROWS = 128
"""Rows whose logits are in memory at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, "cpu", weights="packed")
    packed = fitted_decoder(loaded.model)
    dense = fitted_decoder(load_model(arguments.model, "cpu").model)
    print(f"packed: {packed.kernels}; {'; '.join(loaded.notes)}\ndense: {dense.kernels}")
    losses, agreed = list[tuple[float, float]](), list[float]()
    for chunk in chunks_of(loaded, arguments.prompts, arguments.tokens):
        (nll, best), (dense_nll, dense_best) = judged(packed, chunk), judged(dense, chunk)
        losses.append((float(nll.mean()), float(dense_nll.mean())))
        agreed.append(float((best == dense_best).float().mean()))
    found = np.asarray(losses)
    change = found[:, 0] - found[:, 1]
    width = student.ppf(0.975, len(change) - 1) * change.std(ddof=1) / np.sqrt(len(change))
    low, middle, high = (
        100 * np.expm1(value) for value in (change.mean() - width, change.mean(), change.mean() + width)
    )
    print(
        f"{len(found) * CHUNK} tokens in chunks of {CHUNK}: perplexity {np.exp(found[:, 0].mean()):.3f} packed, "
        f"{np.exp(found[:, 1].mean()):.3f} dense, {middle:+.2f}% (95%: {low:+.2f} to {high:+.2f}); "
        f"greedy agreement {np.mean(agreed):.2%}"
    )


def chunks_of(loaded: LoadedModel, path: Path, tokens: int) -> Iterator[list[int]]:
    """Chunks of token ids, at least `tokens` in all if the texts have as many."""
    rest, left = list[int](), tokens
    for prompt in read_prompts(path, all_turns=True):
        rest += loaded.encode([("user", "\n\n".join(prompt.turns) + "\n\n")], raw=True)
        while len(rest) >= CHUNK and left > 0:
            yield rest[:CHUNK]
            rest, left = rest[CHUNK:], left - CHUNK
        if left <= 0:
            return


@torch.inference_mode()
def judged(decoder: Decoder, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Negative log probabilities of all tokens but the first, and the most probable tokens in their places."""
    states = Session(decoder).forward(ids)[:-1]
    nll, best = list[Tensor](), list[Tensor]()
    for rows, targets in zip(states.split(HEAD_ROWS), torch.tensor(ids[1:]).split(HEAD_ROWS), strict=True):
        logits = decoder.logits(rows).float()
        nll.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        best.append(logits.argmax(-1))
    return torch.cat(nll), torch.cat(best)


if __name__ == "__main__":
    run_guarded(main)
