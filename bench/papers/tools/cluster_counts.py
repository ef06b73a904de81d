"""Bundles with 1, 3, 5 and 7 domains found in unlabelled prompts, on other prompts of the kind (KNN-SSD's Table 5).

`python -m bench.papers.tools.cluster_counts --model build/domain-planted`

Eighty of GSM8K's test questions and as many of HumanEval's functions, interleaved and unlabelled, go to `ssd-compile
--domains auto:N`; other prompts are decoded with `knn`, by priced time. Existing bundles are reused, so other settings
need another --out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.compare import PLAIN
from bench.fixtures.prompts.prompt_files import POOLS, read_pool
from bench.fixtures.prompts.streams import mixed_stream, write_stream
from bench.harness.drawing.tables import interval
from bench.harness.ledger import NAME, Row, read_rows
from bench.harness.pricing.latencies import QUIET
from bench.harness.standings import standings
from ssd_runtime.commands.command import run_guarded

STRATEGY = "knn"
COMPILE = [sys.executable, "-c", "from ssd_compiler.cli import main; main()"]
HEADER = "domains   speed                  M      α   "


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/domain-planted")
    parser.add_argument("--counts", default="1,3,5,7")
    parser.add_argument("--prompts", type=int, default=12, help="decoded, of either kind")
    parser.add_argument("--known", type=int, default=80, help="to find domains in, of either kind")
    parser.add_argument("--evaluations", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("build/cluster-counts"))
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    pools = {kind: read_pool(path) for kind, path in POOLS.items()}
    unlabelled = out / "unlabelled.jsonl"
    asked = out / "asked.jsonl"
    write_stream(mixed_stream({kind: pool[: arguments.known] for kind, pool in pools.items()}, 1.0, seed=1), unlabelled)
    write_stream(mixed_stream({kind: pool[-arguments.prompts :] for kind, pool in pools.items()}, 1.0, seed=1), asked)
    print(f"{2 * arguments.prompts} prompts, {arguments.evaluations} evaluations per search")
    for place, count in enumerate(arguments.counts.split(",")):
        bundle = out / f"bundle-{count}"
        if not bundle.is_dir():
            compiling = ["--model", arguments.model, "--evaluations", arguments.evaluations, "--draft-bits", "none"]
            found = ["--domain-file", f"all={unlabelled}", "--domains", f"auto:{count}"]
            _run(
                [sys.executable, "-c", "from ssd_compiler.cli import main; main()"], *compiling, *found, "--out", bundle
            )
        priced = out / f"priced-{count}"
        asking = ["--prompts", asked, "--max-new-tokens", arguments.max_new_tokens, "--contenders", STRATEGY]
        _run([sys.executable, "-m", "bench.priced"], "--artifact", bundle, *asking, "--latency", QUIET, "--out", priced)
        rows = read_rows(priced / NAME)
        if not place:
            print(HEADER + "  ".join(f"{kind:>9}" for kind in _categories(rows)))
        print(line(count, rows), flush=True)


def line(count: str, rows: Sequence[Row]) -> str:
    """The speed ÷ plain decoding with `count` domains, M, α, and the speed by category."""
    found = standings(rows, [PLAIN])[STRATEGY]
    each = found["overall"]
    ratio = each["against"][PLAIN]
    speed = f"{ratio['speedup']:.2f}{interval(ratio)}"
    by_category = (found["categories"][kind]["against"][PLAIN]["speedup"] for kind in _categories(rows))
    cells = "  ".join(f"{category:9.2f}" for category in by_category)
    drafting = f"{each['mean_acceptance_length']:4.2f}   {each['draft_acceptance_rate']:4.2f}"
    return f"{count:>7}   {speed:20}   {drafting}   {cells}"


def _categories(rows: Sequence[Row]) -> list[str]:
    return sorted({row.category for row in rows})


def _run(command: list[str], *options: object) -> None:
    """Run a command whose standard output goes where errors go; exits where it fails."""
    done = subprocess.run([*command, *map(str, options)], stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    run_guarded(main)
