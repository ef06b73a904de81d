"""KnapSpec's masks and their speed as the context grows (KnapSpec's Figure 3).

`python -m bench.papers.tools.context_sweep --model build/planted --prompts build/prompts/spec_bench/dev.jsonl`

Prompts are concatenated texts of the file. At each length the mask is searched on the tokens just generated, with
attention and MLP weighed by their latency there. The budget is below what could be spared, so that the mask is a real
choice. Answers continue after their end token, so that all have one length. The last column excludes the search.
"""

from __future__ import annotations

import argparse
from itertools import cycle
from pathlib import Path

from ssd_profiles.prompts import read_prompts
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.loop import Generation, Limits
from ssd_runtime.engine.offline.interleaved import in_turn
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import conversation
from ssd_runtime.planning.papers.knapsack import KnapsackPlanner
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.settings import KnapsackSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/planted")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--contexts", default="256,1024,2048,4096,8000")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=0.25, help="Largest share of the latency that is skipped.")
    arguments = parser.parse_args()
    engine = Engine.open(model=arguments.model)
    loaded = engine.loaded
    decoder = engine.decoder
    latency = engine.latency
    texts = cycle([text for prompt in read_prompts(arguments.prompts) for _, text in conversation(prompt)])
    limits = Limits(arguments.max_new_tokens)
    settings = KnapsackSettings(refresh=10**6, budget=arguments.budget)
    contenders = {"plain": PlainPlanner, "knapsack": lambda: KnapsackPlanner(latency, settings)}
    print("context   attention block ÷ MLP block   skipped attention, MLP   M      α     ÷ plain   drafting alone")
    for context in map(int, arguments.contexts.split(",")):
        ids: list[int] = []
        while len(ids) < context - arguments.max_new_tokens:
            ids += loaded.encode([("user", next(texts))])
        session = Session(decoder)
        prompt = session.prefill(ids[: context - arguments.max_new_tokens])
        runs: dict[str, list[Generation]] = {name: [] for name in contenders}
        for number in range(arguments.rounds + 1):
            for name, run in in_turn(session, prompt, contenders, limits, number).items():
                if number:  # the first round warms up
                    runs[name].append(run)
        attention = latency.attention_seconds(context, 1, latency.layer_kinds[0])
        print(f"{context:7}   {attention / latency.mlp_seconds(1):26.2f}   {_outcome(runs)}", flush=True)


def _outcome(runs: dict[str, list[Generation]]) -> str:
    plain = runs["plain"]
    cycles = [cycle for run in runs["knapsack"] for cycle in run.cycles]
    drafting = [cycle for cycle in cycles if cycle.plan.mask and cycle.drafted]
    step = sum(cycle.seconds for run in plain for cycle in run.cycles) / sum(len(run.cycles) for run in plain)
    whole = sum(run.decode_seconds for run in plain) / sum(run.decode_seconds for run in runs["knapsack"])
    if not drafting:
        return f"nothing drafted; {whole:.2f} of plain"
    mask = drafting[-1].plan.mask
    assert mask is not None
    tokens = sum(len(cycle.tokens) for cycle in drafting)
    drafted = sum(cycle.drafted for cycle in drafting)
    alone = tokens * step / sum(cycle.seconds for cycle in drafting)
    accepted = sum(cycle.accepted for cycle in drafting) / drafted
    share = f"{mask.attention_skipped / mask.num_layers:.0%}, {mask.mlp_skipped / mask.num_layers:.0%}"
    return f"{share:>22}   {tokens / len(drafting):5.2f}  {accepted:5.2f}  {whole:7.2f}   {alone:14.2f}"


if __name__ == "__main__":
    run_guarded(main)
