"""llama.cpp's own benchmark, `llama-bench`, on a `.gguf` file."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from pydantic import BaseModel, Field, PositiveInt, TypeAdapter, ValidationError

from ssd_profiles.errors import UserError, first_line


class LlamaTest(BaseModel, strict=True, frozen=True):
    """One of the tests in llama-bench's JSON: `n_prompt` tokens at once, or `n_gen` tokens one by one."""

    n_prompt: int
    n_gen: int
    samples_ns: list[PositiveInt] = Field(min_length=1)
    """Nanoseconds of each repeat."""

    @property
    def seconds(self) -> float:
        """Median over the repeats."""
        return median(self.samples_ns) / 1e9


_TESTS = TypeAdapter(list[LlamaTest])


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
        found = _TESTS.validate_json(done.stdout)
    except ValidationError:
        raise UserError(f"{program}: its figures cannot be read; try {' '.join(command)}") from None
    if sorted((test.n_prompt, test.n_gen) for test in found) != sorted([(n, 0) for n in prompts] + [(0, new)]):
        raise UserError(f"{program}: it ran other tests than it was asked for; try {' '.join(command)}")
    return found
