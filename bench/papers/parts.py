"""The comparisons of docs/papers.md: strategies on one model and one stream of prompts each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.fixtures.bundles import (
    DIFFUSE,
    DOMAINS,
    FIVE,
    PLANTED05,
    QWEN,
    QWEN_FIVE,
    QWEN_QUICK,
    REFERENCE,
    SMALL,
    MadeBundle,
)
from bench.fixtures.prompts.prompt_files import POOLS, SPEC_BENCH, read_pool
from bench.fixtures.prompts.streams import long_prompts, mixed_stream, write_stream
from bench.harness.ledger import NAME
from bench.harness.outcomes import Outcome, outcome_of_comparison
from ssd_runtime.loading.sources import NAMED, find_packed

LATENCY = Path(__file__).parent / "latency"
"""Latencies of each model's sub-layers, measured in a quiet minute, so that a busy machine gives the same figures."""
SPECBOUND = "depth=0.3125+width=8+threshold=0.55+annealing=0.2"
"""The paper's own parameters, in place of those that the compiler tuned."""
HALF = "depth=0.5+width=8+threshold=0.55+annealing=0.2"
"""SpecBound's parameters with the depth bound at half of the layers, where the late-weak model's real layers end."""
RATIOS = (0.0, 0.3, 1.0)
"""Mix ratios of the streams of two domains."""
INTERVALS = (16, 32, 64, 128)
"""CLaSp's verifications from one search to the next."""
CONTEXTS = (2048, 4096, 7500)
"""Tokens of long prompts; SmolLM2's context ends at 8,192."""
REAL_CONTEXTS = (2048, 8192)
LATE = {
    "late-heads": "weak layers at the end, exit heads fitted after every layer of the first half",
    "late-few": "weak layers at the end, exit heads fitted after every tenth layer",
}
"""Comparisons whose fixtures have left the tree."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Contenders on one stream of prompts."""

    name: str
    title: str
    bundle: MadeBundle
    contenders: Sequence[str]
    count: int = 26
    """Prompts; a mixed stream takes half of them from each domain."""
    tokens: int = 48
    """New tokens per prompt."""
    is_priced: bool = True
    """Whether time is priced by the bundle's latency table in place of the clock."""
    temperature: float = 0.0
    ratio: float | None = None
    """Mix ratio of the stream; None for Spec-Bench prompts by category."""
    stream: str | None = None
    """A file of prompts to decode in its order, in place of Spec-Bench's or a mixed stream."""
    context: int | None = None
    """Tokens of each prompt, which is then made of several of Spec-Bench's."""
    without_bundle: bool = False
    """Whether the contenders get the bundle's model alone."""

    def measure(self, folder: Path, packages: str) -> Outcome:
        """Decode whatever `folder`/NAME does not hold yet. Exits where the comparison fails."""
        own = folder / self.name
        given = ["--model", self.bundle.model] if self.without_bundle else ["--artifact", self.bundle.path]
        options = [*given, "--contenders", ",".join(self.names()), "--out", str(own)]
        options += ["--prompts", str(self._prompts(own)), "--max-new-tokens", str(self.tokens)]
        options += ["--priced", str(LATENCY / f"{self.bundle.latency}.json")] if self.is_priced else []
        options += ["--temperature", str(self.temperature)] if self.temperature else []
        spread = self.ratio is None and self.stream is None and self.context is None
        options += ["--count", str(self.count)] if spread else ["--full"]
        if code := subprocess.run([sys.executable, "-m", "bench.compare", *options], check=False).returncode:
            sys.exit(code)
        return outcome_of_comparison(own / NAME, self.name, packages)

    def is_current(self, outcome: Outcome) -> bool:
        """Whether an outcome is of these contenders and this bundle."""
        settings = outcome.settings or {}
        named = [name for name in settings.get("contenders", []) if not name.startswith("plain")]
        bundle = None if self.without_bundle else self.bundle.digest()
        return named == self.names() and settings.get("bundle") == bundle

    def names(self) -> list[str]:
        """The contenders, with the bundle's first domain where a name has a place for it."""
        return [name.format(first=self.bundle.first) for name in self.contenders]

    def _prompts(self, folder: Path) -> Path:
        """The file of prompts, written to `folder` unless it is there."""
        path = folder / "prompts.jsonl"
        if self.context is not None:
            write_stream(long_prompts(read_pool(SPEC_BENCH), self.context, self.count, self._tokens()), path)
        elif self.ratio is not None:
            pools = {name: read_pool(file)[-(self.count // 2) :] for name, file in POOLS.items()}
            write_stream(mixed_stream(pools, self.ratio, seed=1), path)
        else:
            return Path(self.stream or SPEC_BENCH)
        return path

    def _tokens(self) -> Any:
        """Counts the tokens of a text as a prompt of the bundle's model, with its chat template."""
        from transformers import AutoTokenizer

        model = self.bundle.model
        folder = find_packed(model).folder if model in NAMED else model
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

        def count(text: str) -> int:
            asked = [{"role": "user", "content": text}]
            return len(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"])

        return count


def _variants(name: str, *changes: str) -> tuple[str, ...]:
    """A strategy, and the same with one parameter changed each."""
    return (name, *(f"{name}+{change}" for change in changes))


ALL = (
    *("auto", "knn", "fixed:{first}", "fixed:mix", "knapsack", "knapsack+warm_start=0", "clasp", "swift"),
    *("exit", f"exit+{SPECBOUND}", "del", "lookup"),
)
PARTS = (
    Comparison("planted05", "planted, all strategies", PLANTED05, ALL, is_priced=False),
    Comparison("demo", "real, all strategies", REFERENCE, ALL, count=13, is_priced=False),
    # Equal pools give the same prompts at every ratio, and masks keep nothing from one prompt to the next. So the order
    # matters to nobody but strategies that learn along the stream.
    *(
        Comparison(
            name=f"domains-{ratio:g}",
            title=f"layers that matter in one of two domains, mix ratio {ratio:g}",
            bundle=DOMAINS,
            contenders=("auto+light=0", *(("knn", "fixed:{first}", "fixed:mix") if ratio == RATIOS[1] else ())),
            ratio=ratio,
            count=32,
        )
        for ratio in RATIOS
    ),
    Comparison(
        name="five-0",
        title="layers that matter in one of five domains",
        bundle=FIVE,
        contenders=("knn", "fixed:mix", "fixed:{first}"),
        stream="build/five/stream-0.jsonl",
    ),
    Comparison("priced-knn", "the two domains' model, other prompts", DOMAINS, _variants("knn", "out_of_domain=mix")),
    Comparison(
        name="priced-swift",
        title="planted, uniform masks without a search",
        bundle=PLANTED05,
        contenders=("swift+steps=0", "swift+steps=0+tree=0"),
    ),
    Comparison("priced-exit", "planted, early exits", PLANTED05, ("exit", f"exit+{SPECBOUND}")),
    Comparison(
        name="sampled",
        title="planted, temperature 1",
        bundle=PLANTED05,
        contenders=("clasp", "exit", f"exit+{SPECBOUND}"),
        temperature=1.0,
    ),
    Comparison(
        name="priced-clasp",
        title="planted, CLaSp with parts changed",
        bundle=PLANTED05,
        contenders=_variants("clasp", "skip=0.3", "skip=0.4", "skip=0.6", "confidence=0.4", "confidence=0.9"),
        tokens=64,
        without_bundle=True,
    ),
    Comparison(
        name="priced-knapsack",
        title="planted, KnapSpec without a bundle",
        bundle=PLANTED05,
        contenders=("knapsack",),
        count=3,
        tokens=256,
        without_bundle=True,
    ),
    # An answer of 256 tokens has some 95 verifications, so an interval of 128 is one search for each answer.
    Comparison(
        name="clasp-intervals",
        title="planted, CLaSp's intervals between searches",
        bundle=PLANTED05,
        contenders=tuple(f"clasp+refresh={interval}" for interval in INTERVALS),
        count=3,
        tokens=256,
        without_bundle=True,
    ),
    *(
        Comparison(
            name=f"context-{context}",
            title=f"planted, after {context:,} tokens",
            bundle=PLANTED05,
            contenders=("knapsack+warm_start=0",),
            context=context,
            count=1,
            tokens=256,
        )
        for context in CONTEXTS
    ),
    # The search goes on from prompt to prompt, so the stream has to be long.
    Comparison(
        name="swift-stream",
        title="diffuse, SWIFT on a stream",
        bundle=DIFFUSE,
        contenders=("swift",),
        count=60,
        tokens=128,
        without_bundle=True,
    ),
    Comparison(
        name="swift-sweep",
        title="diffuse, SWIFT's S, β and r",
        bundle=DIFFUSE,
        contenders=_variants(
            "swift", "steps=25", "steps=100", "bayes_interval=5", "bayes_interval=100", "skip=0.3", "skip=0.4"
        ),
        count=32,
        tokens=128,
        without_bundle=True,
    ),
    Comparison("qwen", "1.5B, all strategies", QWEN_FIVE, ALL, count=13),
    *(
        Comparison(
            name=f"{name}-domains",
            title=f"{size}, two domains",
            bundle=bundle,
            contenders=("knn", "fixed:{first}", "fixed:mix"),
            ratio=RATIOS[1],
            count=32,
        )
        for name, size, bundle in (("qwen", "1.5B", QWEN), ("smollm2", "135M", SMALL))
    ),
    Comparison(
        name="qwen-five",
        title="1.5B, five domains",
        bundle=QWEN_FIVE,
        contenders=("knn", "fixed:mix", "fixed:{first}"),
        stream="build/five/stream-0.jsonl",
    ),
    Comparison(
        name="qwen-swift",
        title="1.5B, SWIFT on a stream",
        bundle=QWEN,
        contenders=("swift",),
        count=100,
        tokens=128,
        without_bundle=True,
    ),
    Comparison(
        name="qwen-clasp",
        title="1.5B, CLaSp with parts changed",
        bundle=QWEN,
        contenders=(
            *_variants("clasp", "skip=0.1", "skip=0.2", "skip=0.3"),
            *_variants("clasp+skip=0.2", "sublayers=1", "confidence=0.4", "confidence=0.9")[1:],
        ),
        count=13,
        tokens=64,
        without_bundle=True,
    ),
    Comparison(
        name="qwen-intervals",
        title="1.5B, CLaSp's intervals between searches",
        bundle=QWEN,
        contenders=tuple(f"clasp+refresh={interval}+skip=0.2" for interval in INTERVALS),
        count=3,
        tokens=256,
        without_bundle=True,
    ),
    *(
        Comparison(
            name=f"qwen-context-{context}",
            title=f"1.5B, after {context:,} tokens",
            bundle=QWEN,
            contenders=("knapsack", "knapsack+warm_start=0"),
            context=context,
            count=1,
            tokens=256,
        )
        for context in REAL_CONTEXTS
    ),
    Comparison(
        name="qwen-sampled",
        title="1.5B, temperature 1",
        bundle=QWEN_FIVE,
        contenders=("knn", "clasp", "exit", f"exit+{SPECBOUND}"),
        count=13,
        temperature=1.0,
    ),
)


def quick_parts() -> list[Comparison]:
    """The comparisons of the real model, but that of five domains, on a quarter of their prompts with one bundle."""
    real = (part for part in PARTS if part.bundle.model == QWEN_QUICK.model and part.stream is None)
    return [replace(part, bundle=QWEN_QUICK, count=max(1, part.count // 4)) for part in real]
