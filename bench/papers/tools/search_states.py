"""Measures the loss and the saving of a KnapSpec search that carries fewer budgets and looks at fewer tokens.

`python -m bench.papers.tools.search_states --model build/planted --prompts ../shared/data/spec_bench/dev.jsonl`

After `--answer` tokens of each prompt's plain answer, the search looks at the last tokens. The mask that it chooses is
then replayed on the `--later` tokens that follow. A line has means over prompts: the search's price in plain steps, the
speed-up that the search predicts, and that on the later tokens, with the best draft length and confidence.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
import torch

from bench.fixtures.prompts.prompt_files import stratified
from bench.harness.pricing.latencies import read_latency
from bench.papers.tools.references import answered, rows_of
from bench.papers.tools.search_prices import search_price
from ssd_profiles.acceptance import AcceptanceProfile
from ssd_profiles.formulas import tokens_per_time
from ssd_profiles.latency import LatencyTable
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.loading.models import conversation
from ssd_runtime.planning.cost import CostModel, Entry
from ssd_runtime.planning.settings import KnapsackSettings
from ssd_runtime.search.knapsack import Candidate, Weights, search_knapsack
from ssd_runtime.search.replay import replay_mask

BLOCK = 8
"""Length of the drafts that are replayed."""


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/planted")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--answer", type=int, default=20)
    parser.add_argument("--later", type=int, default=40)
    parser.add_argument("--tokens", default="4,8")
    parser.add_argument("--states", default="0,32,16,8,4")
    parser.add_argument("--latency", type=Path, help="a latency table, in place of this device's")
    arguments = parser.parse_args()
    engine = Engine.open(model=arguments.model)
    decoder = engine.decoder
    given = arguments.latency
    latency = read_latency(given, decoder.shape.num_layers) if given else engine.latency
    settings = [
        (tokens, states)
        for tokens, states in product(*(map(int, text.split(",")) for text in (arguments.tokens, arguments.states)))
    ]
    found: dict[tuple[int, int], list[tuple[float, float, float]]] = {each: [] for each in settings}
    whole = arguments.answer + arguments.later
    for prompt in stratified(arguments.prompts, arguments.count):
        reference = answered(decoder, engine.loaded.encode(conversation(prompt)), whole)
        if len(reference) < whole:
            continue
        context = reference.groups[0].start + arguments.answer
        weights = Weights.of(latency, context)
        later = rows_of(reference, arguments.answer, whole)
        for tokens, states in settings:
            seen = rows_of(reference, arguments.answer - tokens, arguments.answer)
            candidates = search_knapsack(decoder, seen, weights, most=states)
            predicted, chosen = max(
                ((predicted_speedup(latency, context, each), each) for each in candidates), key=lambda pair: pair[0]
            )
            profile = AcceptanceProfile.of_traces(replay_mask(decoder, later, chosen.mask, BLOCK))
            option = CostModel(latency).best_option([Entry("chosen", chosen.mask, profile)], context)
            price = search_price(latency, weights, context, tokens, states)
            found[tokens, states].append((price, predicted, option.speedup if option else 1.0))
    counted = len(next(iter(found.values())))
    print(f"{decoder.shape.num_layers} layers, {counted} prompts; latencies of {latency.device.device}")
    print("tokens  budgets  plain steps  predicted  later")
    for (tokens, states), figures in found.items():
        price, predicted, after = np.mean(figures, 0)
        print(f"{tokens:6}  {states or 'all':>7}  {price:11.1f}  {predicted:9.3f}  {after:5.3f}")


def predicted_speedup(latency: LatencyTable, context: int, candidate: Candidate) -> float:
    """A candidate's highest TPT over draft lengths ÷ plain decoding's (KnapSpec eq. 4)."""
    draft = latency.step_seconds(context, 1, candidate.mask)
    lengths = range(1, KnapsackSettings().max_draft + 1)
    rates = (
        tokens_per_time(
            token_agreement=candidate.token_agreement,
            draft_length=length,
            draft_seconds=draft,
            verify_seconds=latency.step_seconds(context, length + 1),
        )
        for length in lengths
    )
    return max(rates) * latency.step_seconds(context)


if __name__ == "__main__":
    run_guarded(main)
