"""Compares strategies and peers over a prompt file: same weights, in turn, every output checked against plain decoding.

`python -m bench.compare --artifact demo --prompts build/prompts/spec_bench/dev.jsonl --out build/compare` is the quick
mode: 26 prompts spread over the categories, 64 tokens. `--full` takes every prompt and 128 tokens. A killed comparison
resumes. The prompts form one stream, in order, through which a strategy keeps its statistics; `single:auto` begins
without any at every prompt. `plain again` is plain decoding a second time: its deviation from 1 is noise.

With `--priced` every forward costs what the device's latency table says, or the table in a file, so that a busy machine
gives the same figures.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from bench.fixtures.prompts.prompt_files import read_pool, stratified
from bench.harness.contenders import PLAIN, about, digest, ours, singly, strategy_of
from bench.harness.ledger import NAME, Ledger, commits_of, stolen_share
from bench.harness.peers import PEERS
from bench.harness.pricing import priced, read_latency
from bench.harness.provenance import disturbance
from bench.harness.standings import standings
from bench.harness.tables import show
from bench.harness.turns import Make, decode_in_turn
from ssd_artifacts.files import sha256_file
from ssd_artifacts.manifest import MANIFEST
from ssd_artifacts.reference_bundle import bundle_path
from ssd_profiles.errors import UserError
from ssd_runtime import Engine, SamplingParams
from ssd_runtime.commands.command import run_guarded, uncollected
from ssd_runtime.weights.draft_bits import read_draft_bits

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
    with uncollected():  # As commands do.
        engine = Engine.open(arguments.artifact, model, dtype=arguments.dtype, draft_bits=bits)
    is_priced = arguments.priced is not None
    if is_priced and arguments.priced != Path():
        engine.latency = read_latency(arguments.priced, engine.decoder.shape.num_layers)
    sampling = replace(engine.loaded.greedy, temperature=arguments.temperature)
    contenders = _contenders(arguments.contenders.split(","), engine, sampling, is_priced)
    count = arguments.count or (None if arguments.full else 26)
    prompts = read_pool(arguments.prompts) if count is None else stratified(arguments.prompts, count)
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise UserError(f"{arguments.prompts}: two prompts of one id; make them differ, rows are told apart by it")
    new = arguments.max_new_tokens or (128 if arguments.full else 64)
    settings = {
        **about(engine),
        "prompts": [str(arguments.prompts.name), len(prompts), digest(prompts)],
        "max_new_tokens": new,
        "contenders": list(contenders),
        "light": engine.decoder.light.kernels,
        "bundle": sha256_file(bundle_path(arguments.artifact) / MANIFEST) if arguments.artifact else None,
        "system": platform.platform(),
        "sampling": asdict(sampling),
        **({"latency": engine.latency.device.device} if is_priced else {}),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(arguments.out / NAME, settings)
    decode_in_turn(
        ledger, engine, contenders, prompts, new, compared=list(contenders), sampling=sampling, console=console
    )
    found = standings(ledger.rows, [base for base in BASELINES if base in contenders])
    stolen = stolen_share(ledger.rows)
    summary = {"settings": settings, "commit": commits_of(ledger.rows), "stolen": stolen, "standings": found}
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1))
    show(found, PLAIN, BASELINES, console)
    if said := disturbance(stolen):
        console.print(said)


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
    parser.add_argument(
        "--priced",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="TABLE",
        help="time by the latency table of this device, or by that in a file; strategies only",
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--count", type=int)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0, sample; strategies only, no peers")
    parser.add_argument("--out", type=Path, default=Path("build/compare"))
    return parser.parse_args()


def _contenders(names: list[str], engine: Engine, sampling: SamplingParams, is_priced: bool) -> dict[str, Make]:
    """Make plain decoding twice, then the requested contenders. By price it has no noise, and is made once."""

    def strategy(name: str) -> Make:
        engine.planners(*strategy_of(name))  # errors are raised here, before anything is measured
        if is_priced:
            return lambda _: priced(engine, name, sampling)
        return lambda stream: ours(engine, name, stream, sampling)

    def peer(name: str) -> Make:
        if sampling.random or is_priced:
            raise UserError(f"--contenders {name}: peers are timed and decode greedily; omit sampling and --priced")
        made = PEERS[name](engine)
        return lambda _: made

    found = {PLAIN: strategy(PLAIN)} if is_priced else {PLAIN: strategy(PLAIN), AGAIN: strategy(PLAIN)}
    for name in names:
        if name in PEERS:
            found[name] = peer(name)
        elif name.startswith(SINGLE):
            found[name] = partial(singly, strategy(name.removeprefix(SINGLE)))
        else:
            found[name] = strategy(name)
    return found


if __name__ == "__main__":
    run_guarded(main)
