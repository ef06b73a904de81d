"""The states that KnapSpec's search carries and the masks it finds, by its similarity threshold tau.

`python -m bench.papers.tools.pruning --artifact build/bundle05` uses the last tokens of an answer. It counts the states
that run through sub-layers, over all budgets; the most at once is what memory has to hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from bench.papers.tools.planning_cost import behind_an_answer
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.devices.clock import seconds
from ssd_runtime.engine.engine import Engine
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.search import knapsack
from ssd_runtime.search.knapsack import Candidate, Weights, search_knapsack


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, default=Path("demo"))
    parser.add_argument("--similarities", default="-1,0.5,0.8,0.9,0.95")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact)
    session, _, recent = behind_an_answer(engine)
    reference = ModelRunner(engine.decoder).finish(recent.referencing(session, arguments.tokens))
    weights = Weights.of(engine.latency, session.committed)
    state = reference.states[0].numel() * reference.states[0].element_size()
    print(f"{len(weights.items) // 2} layers, context {session.committed}, {arguments.tokens} tokens")
    print("similarity   states run   most at once      MiB   masks   best agreement at half the weight        ms")
    for similarity in map(float, arguments.similarities.split(",")):

        def search(similarity: float = similarity) -> list[Candidate]:
            return search_knapsack(engine.decoder, reference, weights, similarity)

        found, levels = _watched(search)
        taken = median(seconds(search, engine.decoder.device) for _ in range(arguments.rounds))
        half = max(found, key=lambda candidate: candidate.skipped_weight)
        print(
            f"{similarity:10.2f} {sum(levels):12} {max(levels):14} {max(levels) * state / 2**20:8.2f} {len(found):7} "
            f"{half.token_agreement:21.2f} (weight {half.skipped_weight:3} of {sum(weights.items)}) {1e3 * taken:9.0f}",
            flush=True,
        )


def _watched(search: Callable[[], list[Candidate]]) -> tuple[list[Candidate], list[int]]:
    """Run a search and count the states after each of its items."""
    levels = list[int]()
    better = knapsack._best

    def counted(*given: Any, **named: Any) -> Any:
        found = better(*given, **named)
        levels.append(len(found[0].weights))
        return found

    with patch.object(knapsack, "_best", counted):
        return search(), levels


if __name__ == "__main__":
    run_guarded(main)
