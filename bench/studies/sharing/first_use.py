"""Time from a bundle in a registry to the first token, on a machine that has the model and never saw the bundle.

`python -m bench.studies.sharing.first_use --artifact demo --model demo@wheel --rounds 3`

A registry runs on this machine (apt-get install docker-registry). Each round begins with an empty cache but for the
model, and runs `ssd-run` twice: the first run fetches the bundle, checks it, measures the device and answers; the
second finds all of that. `pull` alone is timed beside them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench.fixtures.machines.registry import running_registry
from bench.harness.clients.first_byte import seconds_to_first_byte
from ssd_artifacts.files import cache_folder
from ssd_artifacts.reference_bundle import bundle_path
from ssd_artifacts.sharing.reference import read_reference
from ssd_artifacts.sharing.registry import push_to_registry
from ssd_runtime.command import run_guarded
from ssd_runtime.loading.sources import find_model

PROMPT = "Why is the sky blue?"
RUN = [sys.executable, "-c", "from ssd_runtime.cli import main; main()", PROMPT, "--max-new-tokens", "1"]
PULL = [sys.executable, "-c", "from ssd_compiler.bundles.cli import main; main()", "pull"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, default=Path("demo"))
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    find_model(arguments.model)
    models = cache_folder() / "models"
    seconds: dict[str, list[float]] = {"pull": [], "first run": [], "second run": []}
    with tempfile.TemporaryDirectory() as room, running_registry(Path(room)) as host:
        place = f"oci://{host}/bundles/studied:v1"
        push_to_registry(bundle_path(arguments.artifact), read_reference(place), {})
        run = [*RUN, "--artifact", place, "--model", arguments.model]
        for number in range(arguments.rounds):
            cache = Path(room) / f"cache{number}"
            cache.mkdir()
            (cache / "models").symlink_to(models)
            works = {
                "pull": [*PULL, place, "--out", str(Path(room) / f"out{number}")],
                "first run": run,
                "second run": run,
            }
            for name, command in works.items():
                seconds[name].append(seconds_to_first_byte(command, cache))
                print(f"round {number + 1}, {name}: {seconds[name][-1]:.1f} s", flush=True)
    for name, values in seconds.items():
        print(f"{name:12} {np.median(values):.1f} s ({min(values):.1f}–{max(values):.1f})")


if __name__ == "__main__":
    run_guarded(main)
