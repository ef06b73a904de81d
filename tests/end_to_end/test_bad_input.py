"""A command with a mistake is refused in one line, before anything is computed, and leaves nothing."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import pytest
import torch

from ssd_compiler.cli import main as compile_main
from ssd_runtime.commands.run import main as run_main
from tests.commands import Within, assert_refused, compile_options
from tests.folders import save_tiny_model

BAD_RUNS = {
    "no prompt": (["--artifact", "bundle"], "prompt"),
    "two prompts": (["--artifact", "bundle", "hi", "--prompts", "rivers.jsonl"], "prompt"),
    "turns of one prompt": (["--artifact", "bundle", "hi", "--all-turns"], "--all-turns: needs prompts"),
    "no grammar": (["--artifact", "bundle", "hi", "--grammar", "nope"], "--grammar: nope cannot be read"),
    "empty prompt": (["--artifact", "bundle", "  "], "empty"),
    "empty prompt to compare": (["--artifact", "bundle", "--compare", ""], "prompt: must not be empty"),
    "empty stop": (["--artifact", "bundle", "hi", "--stop", ""], "--stop: must not be empty"),
    "half a character to stop at": (["--artifact", "bundle", "hi", "--stop", "a \ud83d"], "--stop: is not valid text"),
    "half a character": (["--artifact", "bundle", "a \ud83d"], "prompt: is not valid text"),
    "no bundle given": (["hi"], "--bundle"),
    "no such bundle": (["--artifact", "nope", "hi"], "no bundle there"),
    "bundle is a file": (["--artifact", "rivers.jsonl", "hi"], "not an archive of ssd-bundle pack"),
    "empty bundle": (["--artifact", "empty", "hi"], "manifest.yaml"),
    "unknown strategy": (["--artifact", "bundle", "hi", "--strategy", "magic"], "auto, plain, knn"),
    "fixed without name": (["--artifact", "bundle", "hi", "--strategy", "fixed"], "fixed:NAME"),
    "fixed unknown": (["--artifact", "bundle", "hi", "--strategy", "fixed:zoo"], "rivers, apples, mix"),
    "unknown parameter": (["--artifact", "bundle", "hi", "--strategy", "knapsack", "--set", "zap=1"], "refresh"),
    "bad parameter": (["--artifact", "bundle", "hi", "--strategy", "knapsack", "--set", "refresh=x"], "number"),
    "no value": (["--artifact", "bundle", "hi", "--strategy", "swift", "--set", "window"], "NAME=VALUE"),
    "strategy needs bundle": (["--model", "model", "hi", "--strategy", "knn"], "needs a bundle"),
    "unknown option": (["--artifact", "bundle", "hi", "--zap"], "--zap"),
    "another file": (["--model", "malformed.jsonl", "hi", "--strategy", "plain"], "a file, but not a .gguf file"),
    "other bits of keys": (["--model", "model", "hi", "--kv-bits", "4"], "expected 8, got 4"),
    "unknown model": (["--model", "./nope", "hi", "--strategy", "plain"], "no such folder"),
    "unknown device": (["--artifact", "bundle", "hi", "--device", "abacus"], "--device"),
    "device without numbers": (["--artifact", "bundle", "hi", "--device", "meta"], "--device: 'meta' cannot be used"),
    "device of another package": (["--artifact", "bundle", "hi", "--device", "hpu"], "--device: 'hpu' cannot be used"),
    "unknown dtype": (["--artifact", "bundle", "hi", "--dtype", "fp3"], "fp32 .float32., bf16 .bfloat16."),
    "missing file": (["--artifact", "bundle", "--prompts", "none.jsonl"], "none.jsonl: cannot be read"),
    "malformed file": (["--artifact", "bundle", "--prompts", "malformed.jsonl"], "malformed.jsonl:2"),
    "too long": (["--artifact", "bundle", "long " * 600], "prompt 1: .*512"),
    "another model": (["--artifact", "bundle", "--model", "other", "hi"], "compiled for"),
    "another tokenizer": (["--artifact", "bundle", "--model", "retokenized", "hi"], "other tokenizer"),
    "a folder for a file": (["--artifact", "bundle", "--prompts", "empty"], "empty: cannot be read"),
    "absurd threads": (["--artifact", "bundle", "hi", "--threads", "999999"], "--threads"),
    "bad size": (["--artifact", "bundle", "hi", "--weight-memory", "lots"], "such as 2G"),
    "size in other digits": (["--artifact", "bundle", "hi", "--weight-memory", "٢G"], "such as 2G"),
    "bad bits": (["--artifact", "bundle", "hi", "--draft-bits", "5"], "--draft-bits: expected one of auto, 8, 4, none"),
    "bitwise at once": (
        ["--artifact", "bundle", "--prompts", "rivers.jsonl", "--concurrency", "2", "--bitwise"],
        "--bitwise: decodes one prompt at a time",
    ),
    "no copies": (
        ["--model", "model", "hi", "--strategy", "light", "--draft-bits", "none"],
        "--strategy light: there is no light copy",
    ),
    "no new tokens": (["--artifact", "bundle", "hi", "--max-new-tokens", "0"], "--max-new-tokens"),
    "not a number": (["--artifact", "bundle", "hi", "--strategy", "knapsack", "--set", "budget=nan"], "number from 0"),
    "altered bundle": (["--artifact", "altered", "hi"], "altered"),
    "truncated weights": (["--model", "truncated", "hi", "--strategy", "plain"], "not a safetensors file"),
    "another kind of model": (["--model", "bert", "hi", "--strategy", "plain"], "a bert model is not supported"),
    "not a gguf": (["--model", "fake.gguf", "hi", "--strategy", "plain"], "not a GGUF file"),
}


@pytest.fixture(scope="session")
def bad_room(room: Path) -> Path:
    (room / "empty").mkdir()
    shutil.copytree(room / "bundle", room / "mixed")
    (room / "mixed" / "notes.txt").write_text("precious")
    shutil.copytree(room / "bundle", room / "altered")
    with (room / "altered" / "domains" / "rivers.yaml").open("a") as file:
        file.write("\n")
    (room / "malformed.jsonl").write_text('{"prompt": "a"}\n{"prompt"')
    (room / "few.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}')
    (room / "fake.gguf").write_bytes(b"GGUF nothing of the kind")
    save_tiny_model(room / "other", epsilon=0.3)
    for name in ("retokenized", "truncated", "bert"):
        shutil.copytree(room / "model", room / name)
    template = room / "retokenized" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    weights = room / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (room / "bert" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    return room


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_input_is_one_line_and_exit_code_2(bad_room: Path, case: str, within: Within) -> None:
    options, says = BAD_RUNS[case]
    assert_refused(within(bad_room, run_main, *options), says)


BAD_COMPILES = {
    "no domains": (["--model", "model"], "--domains"),
    "unknown domain": (["--model", "model", "--domains", "cnn,zoo"], "unknown domain 'zoo'"),
    "twice": (["--model", "model", "--domains", "cnn,cnn"], "differ"),
    "reserved": (["--model", "model", "--domain-file", "mix=rivers.jsonl"], "mix"),
    "path as name": (["--model", "model", "--domain-file", "../x=rivers.jsonl"], "names must"),
    "no file": (["--model", "model", "--domain-file", "x=none.jsonl"], "none.jsonl"),
    "no name": (["--model", "model", "--domain-file", "rivers.jsonl"], "NAME=prompts.jsonl"),
    "too few": (["--model", "model", "--domain-file", "x=few.jsonl"], "at least 6"),
    "bad budget": (["--model", "model", "--domains", "cnn", "--budget", "soon"], "--budget"),
    "empty budget": (["--model", "model", "--domains", "cnn", "--budget", ""], "--budget: expected a time"),
    "found and named": (["--model", "model", "--domains", "auto,cnn"], "expected auto or auto:N alone"),
    "found in a file, and named": (["--model", "model", "--domains", "cnn", "--domains", "auto:3"], "auto:N alone"),
    "out in use": (["--model", "model", "--domains", "cnn", "--out", "model"], "not a bundle"),
    "out holds more": (["--model", "model", "--domains", "cnn", "--out", "mixed"], "holds notes.txt, which is not"),
    "out is where one stands": (["--model", "model", "--domains", "cnn", "--out", "."], "contains the current folder"),
    "out is an archive": (["--model", "model", "--domains", "cnn", "--out", "x.ssd.tar"], "names an archive"),
    "endless time": (["--model", "model", "--domains", "cnn", "--max-wait", "9" * 400], "--max-wait: expected a time"),
    "endless hours": (["--model", "model", "--domains", "cnn", "--budget", "9" * 308 + "h"], "--budget: expected"),
    "domains twice": (["--model", "model", "--domains", "zoo", "--domains", "cnn"], "domain 'zoo'"),
    "out is a root": (["--model", "model", "--domains", "cnn", "--out", "/"], "is a mount point"),
    "no model": (["--domains", "cnn"], "--model"),
    "negative seed": (["--model", "model", "--domains", "cnn", "--seed", "-1"], "--seed"),
    "absurd evaluations": (["--model", "model", "--domains", "cnn", "--evaluations", "1e12"], "--evaluations"),
    "a folder nobody can write": (["--model", "model", "--domains", "cnn", "--out", "/proc/bundle"], "/proc"),
    "no bundle to add to": (["--from", "empty", "--domains", "cnn"], "manifest.yaml"),
    "domain there already": (["--from", "bundle", "--domain-file", "rivers=apples.jsonl"], "has this domain already"),
    "base of another model": (
        ["--from", "bundle", "--model", "other", "--domain-file", "new=rivers.jsonl"],
        "compiled for",
    ),
    "found domains have other names than the base": (
        ["--from", "bundle", "--model", "other", "--domains", "auto", "--domain-file", "rivers=rivers.jsonl"],
        "compiled for",
    ),
    "base of another dtype": (
        ["--from", "bundle", "--dtype", "bf16", "--domain-file", "new=rivers.jsonl"],
        "give --dtype",
    ),
    "not a model": (["--model", "empty", "--domains", "cnn"], "config.json"),
    "no load": (["--model", "model", "--domains", "cnn", "--concurrency", "1,,4"], "--concurrency: expected numbers"),
    "load of nobody": (["--model", "model", "--domains", "cnn", "--concurrency", "0"], "from 1 to 256"),
    "absurd load": (["--model", "model", "--domains", "cnn", "--concurrency", "999999"], "from 1 to 256"),
    "unknown option": (
        ["--model", "model", "--domains", "cnn", "--anchor-rule", "joint"],
        "No such option: --anchor-rule",
    ),
    "unknown search": (
        ["--model", "model", "--domains", "cnn", "--search", "any"],
        "both, knapsack, bayesian, self-sd",
    ),
}


@pytest.mark.parametrize("case", BAD_COMPILES)
def test_a_bad_compile_writes_nothing(bad_room: Path, case: str, within: Within) -> None:
    options, says = BAD_COMPILES[case]
    before = {path.name for path in bad_room.iterdir()}
    assert_refused(within(bad_room, compile_main, *options), says)
    left = {path.name for path in bad_room.iterdir()} - before
    assert left <= {"cache"}


def test_the_last_domains_prompts_are_checked_before_anything_is_computed(
    bad_room: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setattr("ssd_compiler.stages.features_of", None)
    before = {path.name for path in bad_room.iterdir()}
    options = ["--model", "model", "--domain-file", "rivers=rivers.jsonl", "--domain-file", "few=few.jsonl"]
    refused = within(bad_room, compile_main, *options, "--out", "no")
    assert_refused(refused, "few.jsonl has 2 prompts; at least 6 are needed")
    assert {path.name for path in bad_room.iterdir()} - before <= {"cache"}


def test_a_model_too_large_is_refused_before_it_is_loaded(
    bad_room: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setattr("ssd_runtime.devices.memory.available_bytes", lambda _: 1000)
    monkeypatch.setattr("ssd_runtime.loading.checkpoints.checkpoint.read_model", None)
    done = within(bad_room, run_main, "--artifact", "bundle", "hi")
    assert_refused(done, r"needs 0\.0 GiB of memory .* give a smaller model")


def test_a_full_disk_is_one_line(bad_room: Path, monkeypatch: pytest.MonkeyPatch, within: Within) -> None:
    def full(path: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("ssd_compiler.workspace.write_atomically", full)
    done = within(bad_room, compile_main, *compile_options("full"))
    assert_refused(done, "full.compile.*No space left on device; check the path, its permissions and the space left")
    assert not list(bad_room.glob("*full*"))


@pytest.mark.usefixtures("any_machine")
def test_a_compile_that_runs_out_of_memory_is_one_line(
    room: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setattr("ssd_compiler.stages.continue_prompts", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    done = within(room, compile_main, *compile_options("scarce"))
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: out of memory on cpu while compiling; give .*smaller model", done.stderr.splitlines()[-1]
    )
    assert not (room / "scarce").exists()
