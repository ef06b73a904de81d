"""Tokens/s of one request at a time on a `.gguf` file: ours, plain and `auto`, against llama.cpp.

`python -m bench.harness.peers.llama_cpp --python build/llama/bin/python --count 12 --max-new-tokens 48`

llama-cpp-python is built in an environment of its own, whose interpreter `--python` names. Both sides have two threads
and decode the same prompts in turn; prefills are left out. llama.cpp goes on after its end token, so that its answers
have the full length. Intervals are over prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from bench.harness.contenders import PLAIN, Timed, about, difference, ours
from bench.harness.ledger import NAME, NOT_COMPARED, Ledger, Row
from bench.harness.peers import llama_cpp_peer
from bench.harness.provenance import Watch
from bench.harness.standings import standings
from bench.harness.tables import show
from ssd_profiles.prompts import Prompt
from ssd_runtime import Engine
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.loading.models import conversation
from ssd_runtime.loading.sources import find_packed

LLAMA = "llama.cpp"
STRATEGIES = (PLAIN, "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument(
        "--out", type=Path, default=Path("build/llama-cpp"), help="folder of rows; a killed run resumes"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    engine = Engine.open(model=arguments.model, weights="packed")
    prompts = stratified(arguments.prompts, arguments.count)
    settings = {
        **about(engine),
        "prompts": [arguments.prompts.name, len(prompts)],
        "max_new_tokens": arguments.max_new_tokens,
        "contenders": [LLAMA, *STRATEGIES],
        "name": f"{arguments.model}, packed",
    }
    ledger = Ledger(arguments.out / NAME, settings)
    if todo := [prompt for prompt in prompts if not ledger.has(prompt.id, 0)]:
        index = find_packed(arguments.model).gguf
        assert index is not None
        measure(ledger, engine, Peer(arguments.python, index.path), todo, arguments)
    show(standings(ledger.rows, [PLAIN, LLAMA]), PLAIN, [PLAIN, LLAMA], Console(highlight=False, width=120))


def measure(
    ledger: Ledger, engine: Engine, peer: Peer, prompts: Sequence[Prompt], arguments: argparse.Namespace
) -> None:
    """Decode each prompt by all contenders in turn, after one that warms up."""
    contenders = {name: ours(engine, name, "beside llama.cpp") for name in STRATEGIES}
    for number, prompt in enumerate([None, *prompts]):
        ids = engine.loaded.encode([("user", "Hi there")] if prompt is None else conversation(prompt))
        new = 8 if prompt is None else arguments.max_new_tokens
        watch = Watch()
        seconds = peer.seconds(ids, new)
        answers = {name: contenders[name](ids, new) for name in (STRATEGIES if number % 2 else STRATEGIES[::-1])}
        stolen = watch.stolen()
        if prompt is None:
            continue
        row = partial(Row.of, prompt=prompt.id, category=prompt.category or "all", repeat=0)
        peers = Timed(token_ids=[0] * new, first_seconds=0.0, seconds=seconds, counted=new)
        rows = [row(contender=LLAMA, divergence=NOT_COMPARED, timed=peers)]
        for name in STRATEGIES:
            answer = answers[name]
            kind = difference(engine, ids, answers[PLAIN].token_ids, answer.token_ids)
            rows.append(row(contender=name, divergence=kind.value, timed=answer))
        ledger.add(rows, stolen)


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: Path, file: Path | None) -> None:
        self._process = subprocess.Popen(
            [str(python), llama_cpp_peer.__file__, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready", "llama.cpp cannot load the file"

    def seconds(self, ids: list[int], new: int) -> float:
        """Seconds to decode `new` tokens after a prompt."""
        assert self._process.stdin is not None, "it was opened with a pipe"
        self._process.stdin.write(json.dumps({"ids": ids, "new": new}) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None, "it was opened with a pipe"
        return self._process.stdout.readline().strip()


if __name__ == "__main__":
    run_guarded(main)
