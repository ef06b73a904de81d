"""Bundles with 1, 3, 5 and 7 domains found in unlabelled prompts, on other prompts of the kind (KNN-SSD's Table 5).

`python -m bench.papers.tools.cluster_counts --model build/domain-planted`

Eighty of GSM8K's test questions and as many of HumanEval's functions, interleaved and unlabelled, go to `ssd-compile
--domains auto:N`; other prompts are decoded with `knn`. Existing bundles are reused, so other settings need another
--out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench.fixtures.prompt_files import POOLS, read_pool
from bench.fixtures.streams import mixed_stream, write_stream
from bench.studies.resume import COMPILE
from ssd_runtime.command import run_guarded

COMPARE = [sys.executable, "-m", "bench.compare"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="build/domain-planted")
    parser.add_argument("--counts", default="1,3,5,7")
    parser.add_argument("--prompts", type=int, default=6, help="decoded, of either kind")
    parser.add_argument("--known", type=int, default=80, help="to find domains in, of either kind")
    parser.add_argument("--evaluations", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("build/cluster-counts"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    pools = {kind: read_pool(path) for kind, path in POOLS.items()}
    unlabelled = arguments.out / "unlabelled.jsonl"
    asked = arguments.out / "asked.jsonl"
    write_stream(mixed_stream({kind: pool[: arguments.known] for kind, pool in pools.items()}, 1.0, seed=1), unlabelled)
    write_stream(mixed_stream({kind: pool[-arguments.prompts :] for kind, pool in pools.items()}, 1.0, seed=1), asked)
    compiling = ["--model", arguments.model, "--evaluations", arguments.evaluations]
    asking = ["--prompts", asked, "--full", "--max-new-tokens", arguments.max_new_tokens, "--contenders", "knn"]
    for count in arguments.counts.split(","):
        bundle = arguments.out / f"bundle-{count}"
        if not bundle.is_dir():
            _run(
                COMPILE, *compiling, "--domain-file", f"all={unlabelled}", "--domains", f"auto:{count}", "--out", bundle
            )
        print(f"{count} domains found:", flush=True)
        _run(COMPARE, "--artifact", bundle, *asking, "--out", arguments.out / f"compare-{count}")


def _run(command: list[str], *options: object) -> None:
    if code := subprocess.run([*command, *map(str, options)], check=False).returncode:
        sys.exit(code)


if __name__ == "__main__":
    run_guarded(main)
