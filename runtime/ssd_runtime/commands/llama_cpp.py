"""llama.cpp's plain decoding beside a comparison of ours, where `llama-bench` is on the PATH."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ssd_profiles.errors import UserError
from ssd_runtime.engine.engine import Engine
from ssd_runtime.profiling.llama_bench import llama_bench

RUNS = 4
"""Most runs of llama-bench in a comparison: each loads the file."""
MOST_SECONDS = 120.0
"""Seconds after which a run is given up: its threads wait for each other where other processes work."""


@dataclass(slots=True)
class LlamaCpp:
    """Times llama.cpp on the file that is decoded, between our own prompts, so that all share the machine's pace."""

    program: Path
    file: Path
    new: int
    """Tokens that a run decodes, as many as ours have at most."""
    note: Callable[[str], object]
    """Receives one line about a run that failed, after which there is no other."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each run."""
    failed: bool = False

    @classmethod
    def find(cls, engine: Engine, new: int, note: Callable[[str], object]) -> LlamaCpp | None:
        """Make the timer; None unless a `.gguf` file's weights stay packed and llama-bench is on the PATH."""
        program, source = shutil.which("llama-bench"), engine.loaded.source
        if program is None or source is None or source.gguf is None or engine.loaded.types is None:
            return None
        return cls(program=Path(program), file=source.gguf.path, new=new, note=note)

    def before(self, number: int, prompts: int) -> None:
        """Run llama-bench if a run is due before prompt `number`, from 0; after the last prompt it is `prompts`.

        Runs are spread evenly. There is one before the first prompt and one after the last.
        """
        due = {round(run * prompts / (RUNS - 1)) for run in range(RUNS)}
        if number not in due or self.failed:
            return
        try:
            [test] = llama_bench(
                self.program,
                self.file,
                threads=torch.get_num_threads(),
                prompts=(),
                new=self.new,
                repeats=1,
                most_seconds=MOST_SECONDS,
            )
        except UserError as error:
            self.note(f"no comparison with llama.cpp: {error}")
            self.failed = True
        else:
            self.seconds.append(test.seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """All tokens ÷ all seconds; None without a run, or after one that failed."""
        return self.new * len(self.seconds) / sum(self.seconds) if self.seconds and not self.failed else None

    def comparison(self, strategy: str, ours: float, plain: float) -> str | None:
        """A sentence that compares tokens/s of a strategy and of plain decoding with llama.cpp's, if that is known."""
        if (theirs := self.tokens_per_second) is None:
            return None
        return (
            f"llama.cpp decodes the same file plainly at {theirs:.1f} tokens/s (llama-bench, {self.new} tokens, "
            f"{len(self.seconds)} runs around ours); {strategy} is {ours / theirs:.2f} and our plain decoding "
            f"{plain / theirs:.2f} times as fast."
        )
