"""Kills a compile at random moments, resumes it, and compares the bundle with one never killed.

`python -m bench.studies.resume --model build/planted --domains cnn,gsm8k --kills 20 --out build/resume`

All compiles use the latency table that the first one measured. Dates, timings and choices made by timing are excluded
from the comparison; any other difference is printed and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

COMPILE = [sys.executable, "-c", "from ssd_compiler.cli import main; main()"]
TIMED = {"created", "validation", "choice", "pays", "seconds", "total_seconds", "progress"}
"""Fields that hold times or were chosen by timing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--domains", default="")
    parser.add_argument("--domain-file", action="append", default=[], help="NAME=prompts.jsonl; repeatable")
    parser.add_argument("--evaluations", default="16")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--within", type=float, help="latest moment of a kill in seconds; the whole compile by default")
    parser.add_argument("--out", type=Path, default=Path("build/resume"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    options = ["--model", arguments.model, "--domains", arguments.domains, "--evaluations", arguments.evaluations]
    options += [part for text in arguments.domain_file for part in ("--domain-file", text)]

    began = time.monotonic()
    whole = arguments.out / "whole"
    killed = arguments.out / "killed"
    begun = _uninterrupted(options, whole)
    duration = time.monotonic() - began
    print(f"never killed: {duration:.0f} s", flush=True)
    rng = random.Random(arguments.seed)
    kills = 0
    redone = 0
    bundles = 0
    differences = list[str]()
    while kills < arguments.kills:
        shutil.rmtree(killed, ignore_errors=True)
        kept: dict[str, int] = {}
        while not killed.exists():
            wait = rng.uniform(0.0, arguments.within or duration) if kills < arguments.kills else None
            was_killed = _compile(options, killed, wait, begun)
            kills += was_killed
            now = _written(killed)
            redone += sum(now.get(name, when) != when for name, when in kept.items()) if was_killed else 0
            kept = now
            if was_killed:
                print(f"kill {kills} after {wait:.1f} s: {max(0, len(now) - 1)} stages finished", flush=True)
        bundles += 1
        differences += _differences(whole, killed)
        leftovers = [path.name for path in arguments.out.iterdir() if path.name.startswith(".")]
        differences += [f"left behind: {name}" for name in leftovers]
    print(f"{kills} kills in {bundles} compiles; finished stages done again: {redone}")
    print("differences beside timing: " + ("; ".join(differences) or "none"))
    raise SystemExit(1 if differences or redone else 0)


def _uninterrupted(options: list[str], out: Path) -> dict[str, bytes]:
    """Run a compile to its end. Returns the workspace's files at the moment when the latency table was written."""
    process = subprocess.Popen([*COMPILE, *options, "--out", str(out)], stderr=subprocess.DEVNULL)
    begun: dict[str, bytes] = {}
    while process.poll() is None:
        if not any(name.startswith("latency") for name in begun):
            begun = _stages(out)
        time.sleep(0.2)
    assert process.returncode == 0
    assert any(name.startswith("latency") for name in begun)
    return begun


def _compile(options: list[str], out: Path, wait: float | None, begun: dict[str, bytes]) -> bool:
    """Resume the compile and kill it after `wait` seconds. Returns whether it was killed."""
    if not _workspace(out).exists():
        _workspace(out).mkdir()
        for name, content in begun.items():
            (_workspace(out) / name).write_bytes(content)
    log = out.parent / "errors.txt"
    with log.open("w") as errors:
        process = subprocess.Popen([*COMPILE, *options, "--out", str(out), "--resume"], stderr=errors)
    deadline = time.monotonic() + wait if wait is not None else float("inf")
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    assert process.returncode == 0, log.read_text()[-2000:]
    return False


def _workspace(out: Path) -> Path:
    return out.parent / f".{out.name}.compile"


def _stages(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in _workspace(out).glob("*.json")}


def _written(out: Path) -> dict[str, int]:
    """Time at which each stage was written. A repeated stage has the same content, but a later time."""
    return {path.name: path.stat().st_mtime_ns for path in _workspace(out).glob("*.json")}


def _differences(one: Path, other: Path) -> list[str]:
    files = [{path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} for folder in (one, other)]
    found = [f"{path}, in one alone" for path in sorted(files[0] ^ files[1])]
    for path in sorted(files[0] & files[1]):
        if path.name == "report.html":
            continue
        a, b = ((folder / path).read_bytes() for folder in (one, other))
        if path.name == "report.json":
            a, b = (json.dumps(json.loads(text)["settings"]).encode() for text in (a, b))
        elif path.name == "manifest.yaml":  # its hashes depend on the excluded fields
            a, b = (_settled({**yaml.safe_load(text), "files": None}) for text in (a, b))
        elif path.suffix in (".yaml", ".json"):
            a, b = (_settled(yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)) for text in (a, b))
        if a != b:
            found.append(str(path))
    return found


def _settled(value: Any) -> Any:
    """The value without fields in `TIMED`."""
    if isinstance(value, dict):
        return {key: _settled(item) for key, item in value.items() if key not in TIMED}
    return [_settled(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
