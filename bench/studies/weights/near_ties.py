"""Measures how far logits move with the number of rows of a forward, and how often that tips a choice.

`python -m bench.studies.weights.near_ties --dtypes fp32,bf16,packed --prompts 24`; packed is a `.gguf` file's own
weights. Each prompt's plain answer is run again, 2, 4, … rows at a time. Per dtype and kernel and number of rows:
percentiles of |Δ logit| against one row at a time over all positions and tokens of the vocabulary; flips, positions at
which another token is the most probable, per 10,000; and the largest gap between plain decoding's best two logits at
a flip.
`engine/divergence.py` takes its bounds from here.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from torch import Tensor

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import conversation, load_model
from ssd_runtime.planning.plan import PlainPlanner

ROWS = (1, 2, 4, 8, 16, 32)
QUANTILES = (0.5, 0.99, 0.999, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    for dtype in arguments.dtypes.split(","):
        packed = dtype == "packed"
        loaded = load_model(arguments.model, "cpu", None if packed else dtype, "packed" if packed else "dense")
        for weight_memory in (None, 0) if dtype == "fp32" else (None,):
            engine = Engine(loaded, weight_memory=weight_memory)
            print(f"{dtype}, kernels: {engine.decoder.kernels}")
            measure(engine, arguments.prompts, arguments.new_tokens)


@torch.inference_mode()
def measure(engine: Engine, prompts: int, new_tokens: int) -> None:
    """Print one line per number of rows."""
    moved, flips, positions = defaultdict[int, list[Tensor]](list), defaultdict[int, list[float]](list), 0
    for prompt in stratified(SPEC_BENCH, prompts):
        ids = engine.loaded.encode(conversation(prompt))
        limits = Limits(new_tokens, engine.loaded.eos_ids)
        answer = generate(Session(engine.decoder), ids, PlainPlanner(), limits).token_ids
        positions += len(answer)
        plain = logits_of(engine, ids, answer, 1)
        best = plain.topk(2).values
        for rows in ROWS[1:]:
            logits = logits_of(engine, ids, answer, rows)
            difference = (logits - plain).abs()
            # All of them would be millions of numbers per prompt: every 97th tells the percentiles, the rest the most.
            moved[rows] += [difference.flatten()[::97], difference.max()[None]]
            other = (logits.argmax(-1) != plain.argmax(-1)).nonzero()[:, 0]
            flips[rows] += (best[other, 0] - best[other, 1]).tolist()
    for rows in ROWS[1:]:
        every = torch.cat(moved[rows])
        quantiles = ", ".join(f"{100 * q:g}%: {float(every.quantile(q)):.2g}" for q in QUANTILES)
        rate = 10_000 * len(flips[rows]) / positions
        print(
            f"  {rows:2} rows, {positions} tokens: |Δ logit| {quantiles}; "
            f"{rate:.1f} flips per 10,000, largest gap {max(flips[rows], default=0.0):.2g}",
            flush=True,
        )


def logits_of(engine: Engine, ids: list[int], answer: list[int], rows: int) -> Tensor:
    """Logits [answer, vocabulary] of an answer that is run so many rows at a time, in fp32."""
    session, parts = Session(engine.decoder), list[Tensor]()
    session.prefill(ids[:-1] or ids, new_tokens=len(answer))
    tokens = [ids[-1], *answer[:-1]] if len(ids) > 1 else answer
    for begin in range(0, len(tokens), rows):
        chunk = tokens[begin : begin + rows]
        parts.append(engine.decoder.logits(session.forward(chunk)).float())
        session.commit(chunk)
    return torch.cat(parts)


if __name__ == "__main__":
    run_guarded(main)
