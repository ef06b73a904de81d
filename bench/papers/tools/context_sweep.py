"""KnapSpec's masks and their speed as the context grows (KnapSpec's Figure 3), by priced time.

`python -m bench.papers.tools.context_sweep --model build/planted --prompts build/prompts/spec_bench/dev.jsonl`

Prompts are concatenated texts of the file. At each length the mask is searched on the tokens just generated, with
attention and MLP weighed by their latency there. The budget is below what could be spared, so that the mask is a real
choice. Answers continue after their end token, so that all have one length. The last column leaves the search out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from bench.compare import PLAIN
from bench.harness.contenders import Timed
from bench.harness.pricing.latencies import read_latency
from bench.harness.pricing.lockstep import run_together
from bench.harness.pricing.priced import priced
from ssd_profiles.prompts import read_prompts
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.models import conversation
from ssd_runtime.planning.papers.knapsack import KnapsackPlanner
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.settings import KnapsackSettings
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sequence.session import Session

HEADER = (
    "context   attention ÷ MLP block   skipped attention, MLP   attention among them   α   ÷ plain   drafting alone"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/planted")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--contexts", default="256,1024,2048,4096,8000")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--budget", type=float, default=0.25, help="largest share of the latency that is skipped")
    parser.add_argument("--latency", type=Path, help="a latency table, in place of this device's")
    arguments = parser.parse_args()
    engine = Engine.open(model=arguments.model)
    decoder = engine.decoder
    layers = decoder.shape.num_layers
    latency = read_latency(arguments.latency, layers) if arguments.latency else engine.latency
    texts = cycle([text for prompt in read_prompts(arguments.prompts) for _, text in conversation(prompt)])
    limits = Limits(arguments.max_new_tokens)
    settings = KnapsackSettings(refresh=10**6, budget=arguments.budget)
    contenders: dict[str, MakePlanner] = {PLAIN: PlainPlanner, "knapsack": lambda: KnapsackPlanner(latency, settings)}
    print(f"at most {arguments.budget:.0%} of the latency is skipped; {arguments.max_new_tokens} tokens\n{HEADER}")
    for context in map(int, arguments.contexts.split(",")):
        ids: list[int] = []
        while len(ids) < context - arguments.max_new_tokens:
            ids += engine.loaded.encode([("user", next(texts))])
        session = Session(decoder)
        prompt = session.prefill(ids[: context - arguments.max_new_tokens])
        done = {
            name: run_together(decoder, [priced(session, prompt, make, latency, limits)])[0]
            for name, make in contenders.items()
        }
        attention = latency.attention_seconds(context, 1, latency.layer_kinds[0])
        print(line(context, attention / latency.mlp_seconds(1), done, layers), flush=True)


def line(context: int, attention: float, done: Mapping[str, Timed], layers: int) -> str:
    """Format the skipped shares, α, and the speed with the search and without; `attention` is in MLP blocks."""
    return f"{context:7}   {attention:21.2f}   {_outcome(done, layers)}"


def _outcome(done: Mapping[str, Timed], layers: int) -> str:
    plain = done[PLAIN]
    ours = done["knapsack"]
    whole = plain.seconds / ours.seconds
    cycles = ours.cycles
    if not cycles["drafts"]:
        return f"nothing drafted; {whole:.2f} of plain"
    attention, mlp = (cycles[kind] / cycles["drafts"] / layers for kind in ("skipped_attention", "skipped_mlp"))
    step = plain.seconds / plain.counted
    alone = cycles["draft_tokens"] * step / (cycles["draft_seconds"] + cycles["verify_seconds"])
    share = f"{attention:.0%}, {mlp:.0%}"
    among = f"{attention / (attention + mlp):.0%}"
    return f"{share:>22}   {among:>20}   {cycles['accepted'] / cycles['drafted']:.2f}   {whole:7.2f}   {alone:14.2f}"


if __name__ == "__main__":
    run_guarded(main)
