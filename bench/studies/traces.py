"""Traces of the target on a set of prompts, so that controllers can be tried without a model.

`python -m bench.studies.traces --out build/traces/demo.json` decodes a fixed stratified set plainly. For each prompt it
keeps the tokens, the answer, and the target's most probable tokens at every position of the answer.
`bench.studies.simulate` replays them. The prompts are written beside, for `bench.compare --prompts`.

With `--artifact` the model is the bundle's, and the drafts of each mask of the prompt's domain are kept, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.progress import track
from torch import Tensor

from bench.fixtures.prompts.prompt_files import POOLS, SPEC_BENCH, read_pool, stratified
from bench.fixtures.prompts.streams import write_stream
from ssd_artifacts.domain_config import MIXTURE
from ssd_compiler.calibrate import Sample, reference_states
from ssd_profiles.prompts import Prompt
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.engine.sequence.prefill import Prefill
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import conversation
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import Cycle, PlainPlanner
from ssd_runtime.planning.routing import Router
from ssd_runtime.search.replay import replay_mask

KINDS = ("spec_bench", *POOLS)
KEPT = 8
"""Candidates per position."""
BLOCK = 6
"""Draft length that the replay of masks assumes."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One prompt, decoded plainly."""

    id: str
    category: str
    prompt: list[int]
    answer: list[int]
    candidates: list[list[int]]
    """Most probable tokens after answer[i], best first."""
    domain: str | None = None
    """Domain to which the prompt was routed."""
    drafts: dict[str, list[tuple[bool, float]]] = field(default_factory=dict)
    """Maps a frontier entry, after answer[i], to whether the masked model is right there and its confidence."""


class Watching(PlainPlanner):
    """Plain decoding that records the target's candidates."""

    wants_states = True

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.candidates: list[list[int]] = []
        self.prompt: Prefill | None = None

    def start(self, session: Session, prompt: Prefill) -> None:
        """Keep the prefill, which routing needs."""
        self.prompt = prompt

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Record the candidates of the step's single row."""
        assert states is not None, "they are wanted"
        self.candidates += self._decoder.logits(states[-1]).topk(KEPT).indices.tolist()


def prompts(kinds: Sequence[str]) -> list[Prompt]:
    """The fixed set of prompts, kind by kind in turn. Every other one serves for tuning, the rest never does."""
    found = stratified(SPEC_BENCH, 26) if "spec_bench" in kinds else []
    for kind, path in POOLS.items():
        if kind in kinds:
            found += [replace(prompt, category=kind) for prompt in read_pool(path)[:17]]
    return found


def drafts(
    decoder: Decoder, frontier: Frontier, ids: list[int], answer: list[int]
) -> dict[str, list[tuple[bool, float]]]:
    """Drafts of each mask of a frontier along an answer, in the form of `Trace.drafts`."""
    if len(answer) < 2 or not frontier.entries:
        return {}
    reference = reference_states(decoder, [Sample(prompt=ids, continuation=answer, features={}, successors=[])])
    found = {}
    for entry in frontier.entries:
        [trace] = replay_mask(decoder, reference, entry.mask, BLOCK)
        found[entry.name] = list(zip(trace.matches.tolist(), trace.confidence.round(3).tolist(), strict=True))
    return found


def read_traces(path: Path) -> list[Trace]:
    """Read the traces that `main` wrote."""
    return [Trace(**each) for each in json.loads(path.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--artifact", "--bundle", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("build/traces/demo.json"))
    arguments = parser.parse_args()
    chosen = prompts(arguments.kinds.split(","))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_stream(chosen, arguments.out.with_suffix(".jsonl"))
    engine = Engine.open(arguments.artifact, None if arguments.artifact else arguments.model, "cpu", "fp32")
    bundle = engine.bundle
    decoder = engine.decoder
    router = Router(bundle.anchors) if bundle is not None else None
    domains = bundle.domains if bundle is not None else {}
    frontiers = Frontier.of_all(domains, decoder.shape.num_layers)
    loaded = engine.loaded
    limits = Limits(arguments.max_new_tokens, engine.loaded.eos_ids)
    traces = []
    for prompt in track(chosen, "decoding"):
        planner = Watching(decoder)
        ids = loaded.encode(conversation(prompt))
        answer = generate(Session(decoder), ids, planner, limits).token_ids
        route = router.route(planner.prompt) if router is not None and planner.prompt is not None else None
        domain = route.domain if route is not None and route.known else None
        masked = drafts(decoder, frontiers.get(domain or MIXTURE, Frontier(())), ids, answer)
        traces.append(
            Trace(
                id=prompt.id,
                category=prompt.category or "",
                prompt=ids,
                answer=answer,
                candidates=planner.candidates,
                domain=domain,
                drafts=masked,
            )
        )
    arguments.out.write_text(json.dumps([asdict(trace) for trace in traces]))
    print(f"{arguments.out}: {len(traces)} prompts, {sum(len(trace.answer) for trace in traces)} tokens")


if __name__ == "__main__":
    run_guarded(main)
