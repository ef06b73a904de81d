"""Prices the searches of KnapSpec and CLaSp in plain steps, by the latency table.

`python -m bench.papers.tools.search_prices --layers 60` prices every forward of KnapSpec's search by context, tokens
and number of states as if each reachable budget were kept, which is the most that it can cost: states whose similarity
is below tau are dropped besides. CLaSp's search for half of the layers is priced by depth: the states of a layer run as
one forward, or one after the other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.harness.pricing.latencies import measured_latency, of_layers, read_latency
from bench.harness.pricing.priced import head_price, sublayer_prices
from ssd_profiles.latency import LatencyTable
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.search.knapsack import Weights

STATES = (0, 32, 16, 8)
"""Most states that are carried; 0 for all."""

CLASP_CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel", help="whose sub-layers are priced")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--contexts", default="128,512,2048,4096,7500")
    parser.add_argument("--tokens", default="4,20")
    parser.add_argument("--depths", default="30,60,90", help="numbers of layers for CLaSp")
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
    print(f"CLaSp, half of the layers, context {CLASP_CONTEXT}")
    print("layers  in parallel  one by one")
    for layers in map(int, arguments.depths.split(",")):
        deep = of_layers(latency, layers)
        parallel, single = (clasp_price(deep, layers // 2, CLASP_CONTEXT, each) for each in (True, False))
        print(f"{layers:6}  {parallel:11.1f}  {single:10.1f}")


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


def clasp_price(latency: LatencyTable, skipped: int, context: int, parallel: bool) -> float:
    """Plain steps of CLaSp's search for `skipped` layers to skip, with a layer's states in one forward or one each."""
    layers = len(latency.layer_kinds)
    price = 0.0
    for layer in range(layers):
        # Numbers of layers skipped before that leave enough to skip after this one. None skipped is known already.
        least = max(0, skipped - (layers - layer - 1))
        states = min(skipped, layer) - max(least, 1) + 1
        if states > 0:
            rows = [states] if parallel else [1] * states
            price += sum(sum(sublayer_prices(latency, context, n)[2 * layer : 2 * layer + 2]) for n in rows)
    return (price + head_price(latency, 1)) / latency.step_seconds(context)


if __name__ == "__main__":
    run_guarded(main)
