"""Time from process start to the first token on standard output: `ssd-run` against transformers, in turn.

`python -m bench.studies.steps.first_token --artifact demo --rounds 8`

Both load the same weights from the same folder in fp32. With --artifact, `ssd-run` also loads and checks the bundle,
routes the prompt and plans. With --new-tokens more tokens are decoded; peak memory is over the whole run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.reference_bundle import bundle_path
from ssd_runtime.command import run_guarded
from ssd_runtime.loading.sources import find_model

PROMPT = "Why is the sky blue?"
ALONE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
messages = [{"role": "user", "content": sys.argv[2]}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
model.generate(**ids, max_new_tokens=int(sys.argv[3]), do_sample=False, streamer=TextStreamer(tokenizer, True))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, default=Path("demo"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=1)
    arguments = parser.parse_args()
    bundle = Bundle.load(bundle_path(arguments.artifact))
    folder = str(find_model(bundle.model.spec("bundle")).folder)
    run = [
        sys.executable,
        "-c",
        "from ssd_runtime.cli import main; main()",
        PROMPT,
        "--max-new-tokens",
        str(arguments.new_tokens),
    ]
    commands = {
        "transformers": [sys.executable, "-c", ALONE, folder, PROMPT, str(arguments.new_tokens)],
        "ssd-run auto": [*run, "--artifact", str(arguments.artifact)],
        "ssd-run plain": [*run, "--model", folder, "--strategy", "plain"],
        "ssd-run plain, nothing packed": [*run, "--model", folder, "--strategy", "plain", "--weight-memory", "0"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peaks: dict[str, int] = {}
    for turn in range(arguments.rounds + 1):
        for name, command in commands.items():
            taken, peaks[name] = _first_byte(command)
            if turn:  # the first round warms the disk cache
                seconds[name].append(taken)
    base = np.asarray(seconds["transformers"])
    for name, values in seconds.items():
        ratios = np.asarray(values) / base
        print(
            f"{name:30} {np.median(values):.2f} s ({min(values):.2f}–{max(values):.2f}), "
            f"÷ transformers {np.median(ratios):.2f} ({ratios.min():.2f}–{ratios.max():.2f}), "
            f"peak memory {peaks[name] / 2**30:.2f} GiB"
        )


def _first_byte(command: list[str]) -> tuple[float, int]:
    """Seconds to the first byte of output, and the process's peak resident memory in bytes."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.read(1)
    taken = time.perf_counter() - began
    process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    return taken, usage.ru_maxrss * 1024


if __name__ == "__main__":
    run_guarded(main)
