"""Compares strategies by priced time: every forward costs what the device's latency table says.

`python -m bench.priced --artifact build/bundle05 --prompts build/prompts/spec_bench/dev.jsonl --contenders knn,clasp`
writes rows as `bench.compare` does, and every output is checked against plain decoding. The figures carry no timing
noise, so a busy machine will do; only the latency table has to come from a quiet one, or with `--latency` from a file.
Prompts of strategies that keep nothing from one to the next are decoded together, which changes no price. So are
streams of several strategies that do keep something.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from bench.compare import BASELINES, PLAIN, digest
from bench.fixtures.prompts.prompt_files import stratified
from bench.harness.contenders import Timed
from bench.harness.drawing.tables import show
from bench.harness.ledger import NAME, Ledger, Row
from bench.harness.pricing.latencies import read_latency
from bench.harness.pricing.lockstep import run_together
from bench.harness.pricing.priced import priced, priced_stream
from bench.harness.standings import standings
from ssd_artifacts.files import sha256_file
from ssd_artifacts.manifest import MANIFEST
from ssd_artifacts.reference_bundle import bundle_path
from ssd_profiles.prompts import Prompt, read_prompts
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.output.divergence import compare
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.models import conversation
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.profiling.latency import device_key
from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session

T = TypeVar("T")
STREAMS = ("auto", "swift", "lookup")
"""Strategies that carry statistics from prompt to prompt, so that they decode prompts one after the other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--contenders", required=True, help="strategies, such as knn or clasp+skip=0.6")
    parser.add_argument("--count", type=int, help="prompts, spread over the categories; all without it")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0, sample with one seed")
    parser.add_argument("--batch", type=int, default=16, help="prompts decoded together")
    parser.add_argument("--latency", type=Path, help="a latency table, in place of this device's")
    parser.add_argument("--out", type=Path, default=Path("build/priced"))
    arguments = parser.parse_args()
    console = Console(highlight=False, width=120)
    engine = Engine.open(arguments.artifact, arguments.model or (None if arguments.artifact else "demo@wheel"))
    if arguments.latency:
        engine.latency = read_latency(arguments.latency, engine.decoder.shape.num_layers)
    makers = {PLAIN: engine.planners(PLAIN, None)}
    for name in arguments.contenders.split(","):
        strategy, *assignments = name.split("+")
        makers[name] = engine.planners(strategy, read_settings(strategy, assignments))
    path = arguments.prompts
    prompts = stratified(path, arguments.count) if arguments.count else read_prompts(path)
    limits = Limits(arguments.max_new_tokens, engine.loaded.eos_ids)
    sampling = SamplingParams(arguments.temperature)
    settings = {
        "time": "priced",
        "prompts": [path.name, len(prompts), digest(prompts)],
        "max_new_tokens": limits.max_new_tokens,
        "contenders": list(makers),
        "model": engine.loaded.fingerprint().weights_sample_sha256,
        "device": dataclasses.asdict(device_key(engine.decoder)),
        "bundle": sha256_file(bundle_path(arguments.artifact) / MANIFEST) if arguments.artifact else None,
        "batch": arguments.batch,
    }
    if arguments.latency:
        settings["latency"] = engine.latency.device.device
    if sampling.random:
        settings["temperature"] = sampling.temperature
    ledger = Ledger(arguments.out / NAME, settings)
    for some in _parts([prompt for prompt in prompts if not ledger.has(prompt.id, 0)], arguments.batch):
        ledger.add(_rows(engine, some, makers, limits, sampling))
        console.print(f"{len({row.prompt for row in ledger.rows})} of {len(prompts)} prompts")
    found = standings(ledger.rows, [base for base in BASELINES if base in makers])
    summary = {"settings": settings, "commit": ledger.commits, "standings": found}
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1))
    show(found, PLAIN, [PLAIN], console)


def _rows(
    engine: Engine, prompts: Sequence[Prompt], makers: dict[str, MakePlanner], limits: Limits, sampling: SamplingParams
) -> list[Row]:
    """Decode the prompts with all contenders, and hold every output against plain decoding."""
    encoded = [engine.loaded.encode(conversation(prompt)) for prompt in prompts]
    judge = Session(engine.decoder, sampling)
    # Contenders go on from here one after the other, so that a long prompt is run once for all of them.
    begun = [
        (session := Session(engine.decoder, sampling), session.prefill(ids, new_tokens=limits.max_new_tokens))
        for ids in encoded
    ]
    streams = [name for name in makers if len(prompts) > 1 and name.split("+")[0] in STREAMS]
    works = [priced_stream(engine.decoder, encoded, makers[name], engine.latency, limits, sampling) for name in streams]
    found = dict(zip(streams, run_together(engine.decoder, works), strict=True))
    done = {name: found.get(name) or _decode(engine, begun, make, limits) for name, make in makers.items()}
    return [
        Row.of(
            prompt=prompt.id,
            category=prompt.category or "all",
            contender=name,
            repeat=0,
            divergence=compare(judge, ids, done[PLAIN][place].token_ids, each[place].token_ids).kind.value,
            timed=each[place],
        )
        for place, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True))
        for name, each in done.items()
    ]


def _decode(engine: Engine, begun: Sequence[tuple[Session, Prefill]], make: MakePlanner, limits: Limits) -> list[Timed]:
    """Go on after all prompts together."""
    works = [priced(session, prompt, make, engine.latency, limits) for session, prompt in begun]
    return run_together(engine.decoder, works)


def _parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


if __name__ == "__main__":
    run_guarded(main)
