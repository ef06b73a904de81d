"""llama.cpp's own benchmark, `llama-bench`, on a `.gguf` file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ssd_profiles.errors import UserError, first_line


@dataclass(frozen=True, slots=True)
class LlamaTest:
    """One of llama-bench's tests: a prompt of `prompt` tokens at once, or `new` tokens one by one."""

    prompt: int
    new: int
    seconds: float
    """Median over the repeats."""


def llama_bench(
    program: Path,
    file: Path,
    *,
    threads: int,
    prompts: Sequence[int],
    new: int,
    repeats: int,
    most_seconds: float | None = None,
) -> list[LlamaTest]:
    """Run llama-bench on the processor: a test per number in `prompts`, and one of `new` tokens.

    Raises UserError if it cannot be run, fails, takes longer than `most_seconds`, or prints no such figures.
    """
    tests = ["-p", ",".join(map(str, prompts or [0])), "-n", str(new), "-r", str(repeats)]
    command = [str(program), "-m", str(file), "-t", str(threads), "-ngl", "0", *tests, "-o", "json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=most_seconds
        )
    except OSError as error:
        raise UserError(f"{program}: cannot be run ({first_line(error)}); build it") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{program}: has not ended within {most_seconds:.0f} s; try {' '.join(command)}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UserError(f"{program}: failed with {done.returncode} ({said[:200]}); try {' '.join(command)}")
    try:
        found = [_read(test) for test in json.loads(done.stdout)]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{program}: its figures cannot be read; try {' '.join(command)}") from None
    if sorted((test.prompt, test.new) for test in found) != sorted([(n, 0) for n in prompts] + [(0, new)]):
        raise UserError(f"{program}: it ran other tests than it was asked for; try {' '.join(command)}")
    return found


def _read(test: dict[str, object]) -> LlamaTest:
    """A test in llama-bench's JSON, which has the nanoseconds of its samples. Raises errors if it is none."""
    samples = test["samples_ns"]
    if not isinstance(samples, list) or not all(type(each) is int and each > 0 for each in samples):
        raise ValueError(samples)
    prompt, new = test["n_prompt"], test["n_gen"]
    if type(prompt) is not int or type(new) is not int:
        raise ValueError(test)
    return LlamaTest(prompt, new, median(samples) / 1e9)
