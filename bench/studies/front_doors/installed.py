"""Size of an installation, seconds of its imports and of a first token, for each extra.

`python -m bench.studies.front_doors.installed --model demo@wheel`

Each extra is installed from this clone into an environment of its own, with the versions of `constraints.txt`. Imports
and answers are the wall time of a process, the median of `--rounds`. The first run of `ssd-run --strategy auto` begins
with an empty cache but for the model, so it measures the device and compiles the kernels; later runs read the results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.harness.clients.first_byte import seconds_to_first_byte
from bench.harness.provenance import commit
from ssd_artifacts.files import cache_folder
from ssd_runtime.command import run_guarded
from ssd_runtime.loading.sources import find_model

ROOT = Path(__file__).parents[3]
IMPORTS = {
    "": "import ssd_runtime.engine.engine",
    "serve": "import ssd_runtime.serving.http.app",
    "compile": "import ssd_compiler.build",
    "share": "import ssd_compiler.bundles.cli",
    "ray": "import ssd_runtime.serving.ray_app.application",
}
"""The import statement of each extra's command."""
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--extras", default=",serve,compile,share,ray", help="comma-separated; empty for the runtime")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    models = Path(find_model(arguments.model).folder).parent
    assert models.is_relative_to(cache_folder())
    print(f"commit {commit()}")
    print("| installed | packages | MiB | without torch | import, s | `--help`, s |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as room:
        for extra in arguments.extras.split(","):
            folder = Path(room) / (extra or "runtime")
            python = install(folder, extra)
            sizes = package_sizes(folder)
            nothing = taken([[str(python), "-c", "pass"]] * arguments.rounds)
            imports = taken([[str(python), "-c", IMPORTS[extra]]] * arguments.rounds) - nothing
            helped = taken([[str(folder / "bin" / "ssd-run"), "--help"]] * arguments.rounds)
            name = f".[{extra}]" if extra else "."
            whole, rest = sum(sizes.values()), sum(sizes.values()) - sizes.get("torch", 0)
            print(
                f"| `{name}` | {len(sizes)} | {whole / MIB:.0f} | {rest / MIB:.0f} | {imports:.1f} | {helped:.1f} |",
                flush=True,
            )
            if not extra:
                first_tokens = answer_seconds(folder, arguments.model, models, arguments.rounds)
        for name, (first, later) in first_tokens.items():
            print(f"first token by {name}: {first:.1f} s in the first run, {later:.1f} s in later ones")


def install(folder: Path, extra: str) -> Path:
    """Install this clone with an extra into a new environment; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    what = f"{ROOT}[{extra}]" if extra else str(ROOT)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), what], check=True)
    return python


def package_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each top-level entry in an environment's site-packages, metadata left out."""
    [packages] = folder.glob("lib/python*/site-packages")
    return {
        entry.name: sum(each.stat().st_size for each in entry.rglob("*") if each.is_file())
        for entry in packages.iterdir()
        if entry.is_dir() and not entry.name.endswith((".dist-info", "__pycache__")) and entry.name != "pip"
    }


def taken(commands: Sequence[list[str]]) -> float:
    """Median seconds of processes that run one after the other."""
    seconds = []
    for command in commands:
        began = perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(perf_counter() - began)
    return median(seconds)


def answer_seconds(folder: Path, model: str, models: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds to the first token of a first run and the median of later ones, by strategy."""
    found = {}
    for strategy in ("plain", "auto"):
        with tempfile.TemporaryDirectory() as cache:
            (Path(cache) / models.name).symlink_to(models)
            run = [str(folder / "bin" / "ssd-run"), "--model", model, "--strategy", strategy, "Why is the sky blue?"]
            seconds = [seconds_to_first_byte([*run, "--max-new-tokens", "1"], Path(cache)) for _ in range(rounds + 1)]
            found[f"`{strategy}`"] = (seconds[0], median(seconds[1:]))
    return found


if __name__ == "__main__":
    run_guarded(main)
