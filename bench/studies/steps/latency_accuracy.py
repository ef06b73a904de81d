"""Accuracy of the latency table for steps that it was not measured on.

`python -m bench.studies.steps.latency_accuracy --model demo@wheel` draws random plain steps, masked draft steps and
verifications, at contexts, masks and row counts between the table's grid points. Each is timed in turn with the others,
and the median of its times is compared with the prediction.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from ssd_profiles.mask import SkipMask
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import load_model
from ssd_runtime.profiling.clock import seconds
from ssd_runtime.profiling.latency import measure_latency
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.weights.kernel_choice import fitted_decoder

KINDS = ("plain step", "draft step", "verification")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--longest", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    decoder = fitted_decoder(load_model(arguments.model).model)
    began = perf_counter()
    table = measure_latency(decoder)
    print(f"{table.device.device}, {table.device.threads} threads; table measured in {perf_counter() - began:.0f} s")

    picker = random.Random(arguments.seed)
    layers = decoder.shape.num_layers
    longest = min(arguments.longest, decoder.shape.max_context - 40)
    session = Session(decoder)
    session.cache.reserve(longest + 40)
    cases: list[tuple[str, float, Callable[[], object]]] = []
    for number in range(arguments.cases):
        kind = KINDS[number % 3]
        context = int(longest ** picker.uniform(0.4, 1.0))
        mask = SkipMask.of(layers, picker.sample(range(2 * layers), round(picker.uniform(0.1, 0.7) * 2 * layers)))
        used, n = (mask, 1) if kind == "draft step" else (None, picker.randint(2, 20) if kind == "verification" else 1)
        cases.append((kind, table.step_seconds(context, n, used), step(session, context, n, used)))
    times: list[list[float]] = [[] for _ in cases]
    with torch.inference_mode():
        for round_number in range(arguments.rounds + 1):
            for taken, (_, _, work) in zip(times, cases, strict=True):
                elapsed = seconds(work, decoder.device)
                if round_number:  # the first round warms up
                    taken.append(elapsed)
    errors = np.array([p / np.median(t) - 1 for t, (_, p, _) in zip(times, cases, strict=True)])
    for kind in (*KINDS, "all"):
        chosen = np.array([kind in ("all", name) for name, _, _ in cases])
        absolute = np.abs(errors[chosen])
        print(
            f"{kind:12}  {chosen.sum():2} cases: |error| median {np.median(absolute):5.1%}, 90th percentile "
            f"{np.quantile(absolute, 0.9):5.1%}, bias {np.median(errors[chosen]):+.1%}"
        )


def step(session: Session, context: int, n: int, mask: SkipMask | None) -> Callable[[], object]:
    """A forward of `n` tokens over `context` cached ones, with the choice of the next tokens."""

    def work() -> None:
        session.ids = [1] * context
        x = session.forward([(11 + 7 * i) % 1000 for i in range(n)], mask)
        argmax(session.decoder.logits(x)).tolist()

    return work


if __name__ == "__main__":
    run_guarded(main)
