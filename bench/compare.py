"""Compares strategies and peers over a prompt file: same weights, in turn, every output checked against plain decoding.

`python -m bench.compare --artifact demo --prompts build/prompts/spec_bench/dev.jsonl --out build/compare` is the quick
mode: 26 prompts spread over the categories, 64 tokens. `--full` takes every prompt and 128 tokens. A killed comparison
resumes. The prompts form one stream, in order, through which a strategy keeps its statistics; `single:auto` begins
without any at every prompt. `plain again` is plain decoding a second time: its deviation from 1 is noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from bench.fixtures.bundles import model_title
from bench.fixtures.prompts.prompt_files import read_pool, stratified
from bench.harness.contenders import Decode, Timed, ours
from bench.harness.drawing.chart import draw
from bench.harness.drawing.tables import show
from bench.harness.ledger import NAME, NOT_COMPARED, Ledger, Row
from bench.harness.peers.in_process import PEERS
from bench.harness.provenance import Watch, disturbance
from bench.harness.standings import standings
from ssd_artifacts.files import sha256_file
from ssd_artifacts.manifest import MANIFEST
from ssd_artifacts.reference_bundle import bundle_path
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.output.divergence import compare
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.models import LoadedModel, conversation
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.profiling.latency import device_key
from ssd_runtime.sampling.params import SamplingParams, read_sampling
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.draft_bits import read_draft_bits

PLAIN = "plain"
AGAIN = "plain again"
SINGLE = "single:"
"""Prefix of a strategy that begins without statistics at every prompt."""
QUICK = ("auto", "transformers", "transformers-lookup")
BASELINES = (PLAIN, "transformers")


def main() -> None:
    arguments = _arguments()
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    model = arguments.model or (None if arguments.artifact else "demo@wheel")
    bits = read_draft_bits(arguments.draft_bits)
    engine = Engine.open(arguments.artifact, model, dtype=arguments.dtype, draft_bits=bits)
    loaded = engine.loaded
    decoder = engine.decoder
    fingerprint = engine.loaded.fingerprint()
    sampling = read_sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=loaded.repetition_penalty,
        seed=0,
        rejection=arguments.rejection,
    )
    contenders = _contenders(arguments.contenders.split(","), engine, sampling, console)
    count = arguments.count or (None if arguments.full else 26)
    prompts = read_pool(arguments.prompts) if count is None else stratified(arguments.prompts, count)
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise UserError(f"{arguments.prompts}: two prompts of one id; make them differ, rows are told apart by it")
    limits = Limits(arguments.max_new_tokens or (128 if arguments.full else 64), loaded.eos_ids)
    name = Path(fingerprint.name).name
    settings = {
        "prompts": [str(arguments.prompts.name), len(prompts), digest(prompts)],
        "max_new_tokens": limits.max_new_tokens,
        "contenders": list(contenders),
        "model": fingerprint.weights_sample_sha256,
        "name": name,
        "device": dataclasses.asdict(device_key(decoder)),
        "light": decoder.light.kernels,
        "bundle": sha256_file(bundle_path(arguments.artifact) / MANIFEST) if arguments.artifact else None,
        "system": platform.platform(),
        "sampling": dataclasses.asdict(sampling),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(arguments.out / NAME, settings)
    _measure(ledger, prompts, contenders, loaded, Session(decoder, sampling), limits, arguments.repeats, console)
    found = standings(ledger.rows, [base for base in BASELINES if base in contenders])
    summary = {"settings": settings, "commit": ledger.commits, "stolen": ledger.stolen, "standings": found}
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1))
    show(found, PLAIN, BASELINES, console)
    if said := disturbance(ledger.stolen):
        console.print(said)
    for path in draw(found, PLAIN, model_title(name), arguments.out):
        console.print(f"picture: {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--dtype")
    parser.add_argument("--draft-bits", default="auto")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument(
        "--contenders",
        default=",".join(QUICK),
        help=f"strategies, such as knn, swift+tree=0 or single:auto, or peers: {', '.join(PEERS)}",
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--count", type=int)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--repeats", type=int, default=1, help="each a stream of its own")
    parser.add_argument("--temperature", type=float, help="sample; strategies only, no peers")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--rejection", action="store_true", help="outputs are not compared then: they differ")
    parser.add_argument("--out", type=Path, default=Path("build/compare"))
    return parser.parse_args()


def _contenders(
    names: list[str], engine: Engine, sampling: SamplingParams, console: Console
) -> dict[str, Callable[[], Decode]]:
    """Make plain decoding twice, then the requested contenders.

    Each value makes a contender afresh for one stream. A peer that cannot take part is left out with its reason.
    """

    def fresh(strategy: str, assignments: list[str]) -> Callable[[], Decode]:
        settings = read_settings(strategy, assignments)
        engine.planners(strategy, settings)  # errors are raised here, before anything is measured
        return lambda: ours(engine.decoder, engine.planners(strategy, settings), sampling)

    found = {PLAIN: fresh(PLAIN, []), AGAIN: fresh(PLAIN, [])}
    for name in names:
        if name in PEERS:
            if sampling.random:
                raise UserError(f"--contenders {name}: peers are compared greedily; leave out the sampling options")
            peer = PEERS[name](engine.loaded)
            found[name] = lambda peer=peer: peer  # type: ignore[misc]
            continue
        strategy, *assignments = name.removeprefix(SINGLE).split("+")
        make = fresh(strategy, assignments)
        found[name] = _singly(make) if name.startswith(SINGLE) else make
    return found


def _singly(make: Callable[[], Decode]) -> Callable[[], Decode]:
    """A contender that is made afresh for every prompt, as a lone request would find it."""

    def decode(ids: list[int], limits: Limits) -> Timed:
        return make()(ids, limits)

    return lambda: decode


def _measure(
    ledger: Ledger,
    prompts: list[Prompt],
    contenders: dict[str, Callable[[], Decode]],
    loaded: LoadedModel,
    session: Session,
    limits: Limits,
    repeats: int,
    console: Console,
) -> None:
    """Run every contender on every prompt in turn, rotating the order from prompt to prompt."""
    todo = [(repeat, i) for repeat in range(repeats) for i in range(len(prompts))]
    todo = [(repeat, i) for repeat, i in todo if not ledger.has(prompts[i].id, repeat)]
    if todo:
        warm_up = loaded.encode(conversation(prompts[0]))
        for make in contenders.values():
            make()(warm_up, dataclasses.replace(limits, max_new_tokens=8))
    names = list(contenders)
    stream = -1
    for repeat, i in track(todo, "decoding", console=console, disable=not console.is_terminal):
        if repeat != stream:
            # Every repeat starts without statistics from earlier ones.
            stream = repeat
            decoders = {name: make() for name, make in contenders.items()}
        prompt = prompts[i]
        shift = (i + repeat) % len(names)
        watch = Watch()
        ids = loaded.encode(conversation(prompt))
        done = {name: decoders[name](ids, limits) for name in names[shift:] + names[:shift]}
        expected = done[PLAIN].token_ids
        stolen = watch.stolen()
        ledger.add(
            [
                Row.of(
                    prompt=prompt.id,
                    category=prompt.category or "all",
                    contender=name,
                    repeat=repeat,
                    divergence=_difference(session, ids, expected, done[name].token_ids),
                    timed=done[name],
                )
                for name in names
            ],
            stolen,
        )


def digest(prompts: Sequence[Prompt]) -> str:
    """Hash of the decoded prompts, which tells apart files of the same name and length."""
    texts = [[prompt.id, *conversation(prompt)] for prompt in prompts]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _difference(session: Session, ids: list[int], expected: list[int], other: list[int]) -> str:
    """Classify the difference: `none`, `near_tie` or `error`, or `NOT_COMPARED` under tests by rejection."""
    if session.sampling.tests_drafts:
        return NOT_COMPARED
    return compare(session, ids, expected, other).kind.value


if __name__ == "__main__":
    run_guarded(main)
