"""Counts how often the host waits for a device in a cycle of each strategy, on a stand-in card.

`python -m bench.studies.steps.host_waits --places` decodes greedily with a tiny random model, planted so that a mask is
often right. A read is a result that the host asks for; an upload counts if the host waits until it is done. Kernels are
the calls that a card would be launched with, in eager mode. The prefill and the first token are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.fixtures.machines.card import Counts, stand_in
from bench.fixtures.planted import plant
from ssd_profiles.latency import DeviceKey, LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.sequence.generation import Generation
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.papers.swift import TREE
from ssd_runtime.planning.plan import ConstantPlanner, Plan, Planner
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.strategy import make_strategy

PROMPT = [7, 7, 9]
STRATEGIES = {
    "plain": [],
    "lookup": [],
    "auto": [],
    "knapsack": ["refresh=6", "window=3"],
    "clasp": ["refresh=4"],
    "swift": ["window=8", "steps=60", "bayes_interval=5"],
    "exit": ["threshold=0.1", "depth=0.8"],
    "del": ["every=1", "refresh=3", "confidence=0.1"],
}
"""Strategies without a bundle, with parameters that let their searches run often."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--max-new-tokens", type=int, default=60)
    parser.add_argument("--places", action="store_true", help="name the places in the code")
    arguments = parser.parse_args()
    decoder, weak = _planted()
    limits = Limits(arguments.max_new_tokens)
    print("| strategy | cycles | reads per cycle | uploads per cycle | kernels per cycle |\n|---|---|---|---|---|")
    for name, make in _planners(decoder, weak).items():
        got, counts = _decoded(decoder, make(), limits)
        cycles = len(got.cycles)
        # The choice of the first token is one read, and belongs to no cycle.
        reads = (counts.total("read") - 1) / cycles
        uploads = counts.total("upload") / cycles
        kernels = counts.operations.total() / cycles
        print(f"| {name} | {cycles} | {reads:.2f} | {uploads:.2f} | {kernels:.0f} |")
        if arguments.places:
            for wait, count in counts.waits.most_common():
                print(f"    {wait.kind} {count / cycles:.2f} {wait.place}")


def _planted() -> tuple[Decoder, SkipMask]:
    """A tiny model on the card, and the mask of its weak layers."""
    torch.manual_seed(4)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # larger weights make sharp predictions, which differ from token to token
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 2 else 0.05))
    model, weak = plant(model, 0.02, 4)
    return Decoder(model.to(stand_in().device)), weak


def _planners(decoder: Decoder, weak: SkipMask) -> dict[str, Callable[[], Planner]]:
    table = _table(decoder.shape.num_layers)
    planners: dict[str, Callable[[], Planner]] = {
        name: make_strategy(name, read_settings(name, settings), decoder, None, table)
        for name, settings in STRATEGIES.items()
    }
    chains = {
        "a mask, 4 tokens": Plan.masked("chain", weak, 4),
        "a mask, to a confidence of 0.3": Plan.masked("unsure", weak, 8, 0.3),
        "a mask with siblings": Plan.masked("tree", weak, 4, 0.3, branching=TREE),
    }
    return planners | {name: (lambda plan=plan: ConstantPlanner(plan)) for name, plan in chains.items()}


def _table(num_layers: int) -> LatencyTable:
    """Latencies at which rows of a verification cost little, so that every strategy drafts."""
    queries = np.array([1.0, 8.0, 32.0])
    contexts = np.array([16.0, 512.0])
    return LatencyTable(
        device=DeviceKey(device="none", threads=1, torch="", dtype="float32", kernels="module", engine=0),
        layer_kinds=("full",) * num_layers,
        queries=queries,
        contexts=contexts,
        attention={"full": 1e-4 + 1e-7 * contexts[:, None] + 1e-6 * queries[None]},
        mlp=2e-4 + 1e-6 * queries,
        head=1e-3 + 1e-6 * queries,
        overhead=np.full(queries.shape, 2e-4),
        spread={},
    )


def _decoded(decoder: Decoder, planner: Planner, limits: Limits) -> tuple[Generation, Counts]:
    session = Session(decoder)
    prompt = session.prefill(PROMPT, new_tokens=limits.max_new_tokens)
    with stand_in().counting() as counts:
        return decode(session, prompt, planner, limits), counts


if __name__ == "__main__":
    main()
