"""Tokens/s of one request at a time on a `.gguf` file: ours, plain and `auto`, against llama.cpp.

`python -m bench.studies.weights.llama_cpp --python /tmp/llama/env/bin/python --prompts 12 --new-tokens 48`

llama-cpp-python is built in an environment of its own, whose interpreter `--python` names. Both sides have two threads
and decode the same prompts in turn; prefills are left out. llama.cpp goes on after its end token, so that its answers
have the full length. Intervals are over prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import torch

from bench.fixtures.prompt_files import SPEC_BENCH, stratified
from bench.harness import llama_cpp_peer
from bench.harness.provenance import commit
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime import Engine
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.loop import Limits, generate
from ssd_runtime.engine.offline.divergence import Kind, compare
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import conversation
from ssd_runtime.loading.sources import find_packed

STRATEGIES = ("plain", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    engine = Engine.open(model=arguments.model, weights="packed")
    peer = Peer(arguments.python, find_packed(arguments.model).gguf)
    planners = {name: engine.planners(name) for name in STRATEGIES}
    taken = defaultdict[str, list[float]](list)
    kinds = Counter[Kind]()
    for number, prompt in enumerate([None, *stratified(SPEC_BENCH, arguments.prompts)]):
        ids = engine.loaded.encode([("user", "Hi there")] if prompt is None else conversation(prompt))
        new = 8 if prompt is None else arguments.new_tokens
        llama = peer.seconds(ids, new) / new
        answers = {
            name: generate(Session(engine.decoder), ids, planners[name](), Limits(new, engine.loaded.eos_ids))
            for name in (STRATEGIES if number % 2 else STRATEGIES[::-1])
        }
        if prompt is None:  # a warm-up
            continue
        taken["llama.cpp"].append(llama)
        for name, answer in answers.items():
            taken[name].append(answer.decode_seconds / len(answer.token_ids))
        plain, other = (answers[name].token_ids for name in STRATEGIES)
        kinds[compare(Session(engine.decoder), ids, plain, other).kind] += 1
    print(
        f"commit {commit()}; {engine.decoder.kernels}; {arguments.prompts} prompts, {arguments.new_tokens} new tokens"
    )
    print(f"auto against plain: {', '.join(f'{kinds[kind]} {kind}' for kind in Kind)}")
    for name, seconds in taken.items():
        against = [
            f"{speedup(taken[base], seconds):.3f} of {base} ({low:.3f}–{high:.3f})"
            for base in taken
            if base != name and (interval := speedup_interval(taken[base], seconds)) is not None
            for low, high in [interval]
        ]
        print(f"  {name:10} {len(seconds) / sum(seconds):6.1f} tokens/s; {'; '.join(against)}")


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
