"""The cost of planning: searches for masks, comparisons of candidates and routing, in plain steps.

`python -m bench.papers.tools.planning_cost --artifact build/bundle05` prints medians of interleaved rounds, after a
prompt and 40 tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ssd_runtime.commands.command import run_guarded
from ssd_runtime.devices.clock import seconds
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.planning.papers.recent import RecentStates
from ssd_runtime.planning.papers.swift import SwiftSearch
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.routing import Router
from ssd_runtime.planning.settings import SwiftSettings
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.search.knapsack import Weights, search_knapsack
from ssd_runtime.search.replay import replay_mask
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session

ANSWER = 40
PROMPT = "A shop sells pens at 3 for two dollars. How much do 18 pens cost, and how many can be bought for 30 dollars?"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, default=Path("demo"))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact)
    bundle = engine.bundle
    assert bundle is not None
    decoder = engine.decoder
    latency = engine.latency
    session, prompt, recent = behind_an_answer(engine)
    layers = decoder.shape.num_layers
    context = session.committed
    finish = ModelRunner(decoder).finish
    last, twenty, window = (finish(recent.referencing(session, rows)) for rows in (1, 20, 32))
    swift = SwiftSearch(layers, SwiftSettings())
    router = Router(bundle.anchors)
    for _ in range(30):
        swift.update(swift.suggest(), 0.5)
    swift.tried = SwiftSettings().bayes_interval - 1
    weights = Weights.of(latency, context)
    work: dict[str, Callable[[], object]] = {
        "plain step": lambda: argmax(decoder.logits(session.forward([session.ids[-1]]))).tolist(),
        "CLaSp, half of the layers": partial(
            search_knapsack, decoder, last, Weights((1,) * layers), threshold=-1.0, exactly=layers // 2
        ),
        "CLaSp, half of the sub-layers": partial(
            search_knapsack, decoder, last, Weights((1,) * 2 * layers), threshold=-1.0, exactly=layers
        ),
        "KnapSpec, 1 token": partial(search_knapsack, decoder, last, weights),
        "KnapSpec, 20 tokens (m = 5 cycles)": partial(search_knapsack, decoder, twenty, weights),
        "SWIFT, matchness of a mask on 32 tokens": lambda: replay_mask(decoder, window, swift.best, 1),
        "SWIFT, a Bayesian suggestion": swift.suggest,
        "routing": lambda: router.route(prompt),
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for number in range(arguments.rounds + 1):
        for name, run in random.Random(number).sample(list(work.items()), len(work)):
            elapsed = seconds(run, decoder.device)
            if number:
                taken[name].append(elapsed)
    step = float(np.median(taken["plain step"]))
    print(f"{layers} layers, context {context}, weights {sorted(set(weights.items))}")
    for name, times in taken.items():
        middle = float(np.median(times))
        print(f"{name:42} {middle * 1e3:9.2f} ms  {middle / step:7.2f} plain steps")


def behind_an_answer(engine: Engine) -> tuple[Session, Prefill, RecentStates]:
    """Decode an answer. Returns its session, the prompt's prefill and the answer's states."""
    ids = engine.loaded.encode([("user", PROMPT)])
    answer = generate(Session(engine.decoder), ids, PlainPlanner(), Limits(ANSWER)).token_ids
    session = Session(engine.decoder)
    prompt = session.prefill(ids)
    recent = RecentStates(1)
    recent.add(session.forward_states(answer))
    session.commit(answer)
    return session, prompt, recent


if __name__ == "__main__":
    run_guarded(main)
