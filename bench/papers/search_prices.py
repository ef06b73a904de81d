"""What KnapSpec's search costs by context, tokens and number of states, in plain steps, by the latency table.

`python -m bench.papers.search_prices --layers 60` prices every forward of a search as if each reachable budget were
kept, which is the most that it can cost: states whose similarity is below tau are dropped besides.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.harness.latencies import measured_latency, read_latency
from bench.harness.priced import head_price, sublayer_prices
from ssd_profiles.latency import LatencyTable
from ssd_runtime.command import run_guarded
from ssd_runtime.search.knapsack import Weights

STATES = (0, 32, 16, 8)
"""Most states that are carried; 0 for all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="whose sub-layers are priced")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--contexts", default="128,512,2048,4096,7500")
    parser.add_argument("--tokens", default="4,20")
    parser.add_argument("--latency", type=Path, help="a latency table, in place of this device's")
    arguments = parser.parse_args()
    given = arguments.latency
    latency = read_latency(given, arguments.layers) if given else measured_latency(arguments.model, arguments.layers)
    print(f"{arguments.layers} layers; {latency.device.device}, {latency.device.threads} threads; in plain steps")
    print("context  weights  tokens" + "".join(f"{f'{most} states' if most else 'all states':>12}" for most in STATES))
    for context in map(int, arguments.contexts.split(",")):
        weights = Weights.of(latency, context)
        for tokens in map(int, arguments.tokens.split(",")):
            prices = (search_price(latency, weights, context, tokens, most) for most in STATES)
            cells = "".join(f"{price:12.1f}" for price in prices)
            print(f"{context:7}  {'/'.join(map(str, weights.items[:2])):>7}  {tokens:6}{cells}", flush=True)


def search_price(latency: LatencyTable, weights: Weights, context: int, tokens: int, most: int) -> float:
    """Plain steps of a search for masks of up to half of the weight, on `tokens` tokens with `most` states or all."""
    half = sum(weights.items) // 2
    reached = {0}
    price = 0.0
    for item, weight in enumerate(weights.items):
        # The state that skips nothing is known already.
        states = (min(len(reached), most) if most else len(reached)) - 1
        if states:
            price += sublayer_prices(latency, context, tokens * states)[item]
        reached |= {skipped + weight for skipped in reached if skipped + weight <= half}
    final = min(len(reached), most) if most else len(reached)
    return (price + head_price(latency, tokens * final)) / latency.step_seconds(context)


if __name__ == "__main__":
    run_guarded(main)
