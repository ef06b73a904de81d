"""What the target does on a set of prompts, written down so that a controller can be tried without a model.

`python -m bench.traces --out build/traces/demo.json` decodes a fixed stratified set plainly and keeps for each prompt
its tokens, the answer, and the target's most probable tokens at every place of the answer. `bench.simulate` replays
them. The prompts are written beside, for `bench.compare --prompts`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.progress import track
from torch import Tensor

from bench.stratified import stratified
from bench.streams import read_pool, write_stream
from ssd_profiles.prompts import Prompt
from ssd_runtime.command import run_guarded
from ssd_runtime.decoder import Decoder
from ssd_runtime.generate import Limits, generate
from ssd_runtime.kernels import fitted_decoder
from ssd_runtime.models import conversation, load_model
from ssd_runtime.planning.plan import Cycle, PlainPlanner
from ssd_runtime.session import Session

DATA = Path("../shared/data")
KEPT = 8
"""Candidates of each place."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One prompt, decoded plainly."""

    id: str
    category: str
    prompt: list[int]
    answer: list[int]
    candidates: list[list[int]]
    """candidates[i]: the most probable tokens behind answer[i], best first."""


class Watching(PlainPlanner):
    """Plain decoding that keeps candidates."""

    wants_states = True

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.candidates: list[list[int]] = []

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """One row a step."""
        assert states is not None, "they are wanted"
        self.candidates += self._decoder.logits(states[-1]).topk(KEPT).indices.tolist()


def prompts() -> list[Prompt]:
    """The fixed set, kind by kind in turn: every other one serves tuning, the rest never does."""
    kinds = [stratified(DATA / "spec_bench" / "dev.jsonl", 26)]
    for name in ("gsm8k/test.jsonl", "humaneval/HumanEval.jsonl"):
        kind = name.partition("/")[0]
        kinds.append([replace(prompt, category=kind) for prompt in read_pool(DATA / name)[:17]])
    return [prompt for kind in kinds for prompt in kind]


def read_traces(path: Path) -> list[Trace]:
    """Those that `main` wrote."""
    return [Trace(**each) for each in json.loads(path.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("build/traces/demo.json"))
    arguments = parser.parse_args()
    chosen = prompts()
    write_stream(chosen, arguments.out.with_suffix(".jsonl"))
    loaded = load_model(arguments.model, "cpu", "fp32")
    decoder, limits, traces = fitted_decoder(loaded.model, None), Limits(arguments.max_new_tokens, loaded.eos_ids), []
    for prompt in track(chosen, "decoding"):
        planner, ids = Watching(decoder), loaded.encode(conversation(prompt))
        answer = generate(Session(decoder), ids, planner, limits).token_ids
        traces.append(Trace(prompt.id, prompt.category or "", ids, answer, planner.candidates))
    arguments.out.write_text(json.dumps([asdict(trace) for trace in traces]))
    print(f"{arguments.out}: {len(traces)} prompts, {sum(len(trace.answer) for trace in traces)} tokens")


if __name__ == "__main__":
    run_guarded(main)
