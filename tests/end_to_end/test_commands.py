"""Both commands as a user runs them, on a tiny model: compile, run, and everything that can be wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_artifacts.bundle import Bundle
from ssd_compiler.cli import main as compile_main
from ssd_profiles.prompts import sample_prompts
from ssd_runtime.commands.run import main as run_main
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.output.divergence import Divergence, Kind
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.models import LoadedModel
from ssd_runtime.sequence.session import Session
from tests.clocks import ANY_MACHINE
from tests.commands import COMPILE, RUN, command
from tests.folders import TEXTS, save_tiny_model


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, two prompt files and a compiled bundle."""
    folder = tmp_path_factory.mktemp("room")
    save_tiny_model(folder / "model")
    for name, text in (("rivers", TEXTS[0]), ("apples", TEXTS[1])):
        words = text.split()
        lines = [json.dumps({"prompt": " ".join(words[i % 5 : 6 + i]), "category": name}) for i in range(14)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    done = command(folder, COMPILE, *compile_options("bundle"), "--json")
    assert done.returncode == 0, done.stderr
    (folder / "compiled.json").write_text(done.stdout)
    return folder


def compile_options(out: str) -> list[str]:
    files = [f"--domain-file={name}={name}.jsonl" for name in ("rivers", "apples")]
    searched = ["--evaluations", "24", "--device", "cpu", "--exits", "3", "--concurrency", "3,1"]
    return ["--model", "model", *files, "--out", out, *searched]


def within(
    folder: Path,
    main: Callable[[], None],
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> subprocess.CompletedProcess[str]:
    """Run the command inside this process, which saves the seconds that its imports take."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SSD_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["ssd", *options])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capfd.readouterr()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(options, ended.value.code, shown.out, shown.err)


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def test_a_compile_writes_a_complete_bundle(room: Path) -> None:
    summary = json.loads((room / "compiled.json").read_text())
    assert [domain["domain"] for domain in summary["domains"]] == ["rivers", "apples", "mix"]
    bundle = Bundle.load(room / "bundle")
    assert set(bundle.domains) == {"rivers", "apples", "mix"}
    for name in ("rivers", "apples"):
        record = bundle.domains[name]
        assert record.frontier
        assert record.choice is not None
        assert record.validation is not None
        assert record.validation.identical
        assert [(each.concurrency, each.identical) for each in record.validation.under_load] == [(3, True)]
        assert record.search.evaluations == len(record.search.rated) <= 24
        assert {entry.origin for entry in record.frontier} <= {origin for _, origin, _ in record.search.rated}
    assert bundle.anchors.domains == ("rivers", "apples")
    assert len(bundle.latency) == 1
    assert bundle.successors is not None
    assert bundle.exits is not None
    assert bundle.exits.layers == (2, 4, 6)
    for name in ("rivers", "apples"):
        tuned = bundle.domains[name].exit
        assert tuned is not None
        assert set(tuned.stops) <= set(bundle.exits.layers)
    assert "<svg" in (room / "bundle" / "report.html").read_text()
    assert not list(room.glob(".bundle*"))


@pytest.mark.parametrize(
    "strategy",
    ["auto", "plain", "knn", "knapsack", "clasp", "swift", "exit", "del", "lookup", "fixed:rivers", "fixed:mix"],
)
def test_every_strategy_decodes_as_plain_decoding_does(room: Path, strategy: str) -> None:
    options = ["--artifact", "bundle", "--prompts", "rivers.jsonl", "--max-new-tokens", "24", "--strategy", strategy]
    *each, last = records(command(room, RUN, *options, "--compare", "--json", "--explain"))
    assert len(each) == 14
    for record in each:
        assert record["divergence"] in ("none", "near_tie")
        assert record["new_tokens"] == len(record["token_ids"]) == 24
        assert record["strategy"] == strategy
        assert record["finish_reason"] == "length"
        if strategy in ("plain", "auto", "knapsack") and not record["num_drafts"]:
            assert record["target_forwards"] == 23
    total = last["summary"]
    assert total["new_tokens"] == 14 * 24
    assert total["categories"]["rivers"]["new_tokens"] == 14 * 24
    assert total["tokens_per_second"] == pytest.approx(total["new_tokens"] / total["decode_seconds"], rel=1e-3)
    if strategy in ("knn", "fixed:rivers", "fixed:mix"):
        assert total["num_draft_tokens"] > 0
        assert total["mean_acceptance_length"] > 1.0


def test_domains_are_found_in_unlabelled_prompts(room: Path) -> None:
    both = (room / "rivers.jsonl").read_text() + "\n" + (room / "apples.jsonl").read_text()
    (room / "both.jsonl").write_text(both)
    options = ["--model", "model", "--domain-file", "both=both.jsonl", "--evaluations", "8", "--device", "cpu"]
    done = command(room, COMPILE, *options, "--anchors", "3", "--domains", "auto:2", "--out", "found", "--json")
    assert done.returncode == 0, done.stderr
    bundle = Bundle.load(room / "found")
    assert np.bincount(bundle.anchors.labels).tolist() == [3, 3]
    assert set(bundle.domains) == {"both-1", "both-2", "mix"}
    assert bundle.exits is None
    for wrong, files in (("auto:0", 1), ("auto:x", 1), ("auto", 2), ("auto", 0)):
        given = [part for name in ("one", "two")[:files] for part in ("--domain-file", f"{name}=both.jsonl")]
        done = command(room, COMPILE, "--model", "model", *given, "--domains", wrong, "--out", "wrong")
        assert done.returncode == 2
        assert ("one file of prompts" if wrong == "auto" else "--domains") in done.stderr


def test_from_python_a_loaded_model_answers_as_the_command_does(room: Path) -> None:
    options = ["--bundle", "bundle", "--strategy", "knn", "--max-new-tokens", "24", "--json"]
    expected = records(command(room, RUN, *options, "The river"))[0]
    folder = room / "model"
    loaded = LoadedModel.of(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    engine = Engine(loaded, Bundle.load(room / "bundle"))
    answer = engine.runner(RunSettings("knn", max_new_tokens=24)).answer("The river")
    assert answer.generation.token_ids == expected["token_ids"]
    assert answer.text == expected["text"]
    assert answer.generation.domain == expected["domain"]


def test_a_seeds_answers_are_those_of_plain_decoding_whatever_the_strategy(room: Path) -> None:
    (room / "twice.jsonl").write_text('{"prompt": "The river"}\n' * 2)
    options = ["--artifact", "bundle", "--prompts", "twice.jsonl", "--max-new-tokens", "20", "--json"]
    sampled = [*options, "--temperature", "0.9", "--top-p", "0.95"]

    def answers(*more: str) -> list[list[int]]:
        return [record["token_ids"] for record in records(command(room, RUN, *more)) if "token_ids" in record]

    plain = answers(*sampled, "--seed", "7", "--strategy", "plain")
    assert plain[0] != plain[1], "each prompt of a file has a seed of its own"
    for strategy in ("auto", "knn"):
        assert answers(*sampled, "--seed", "7", "--strategy", strategy) == plain
    assert answers(*sampled, "--seed", "8")[0] == plain[1]
    assert answers(*options)[0] != plain[0], "greedy"
    done = command(room, RUN, *sampled, "--seed", "7", "--rejection", "--strategy", "knn", "--compare")
    assert done.returncode == 0, done.stderr
    assert records(done)[0]["identical"] is None, "tested drafts are not those of a seed"


@pytest.mark.parametrize("strategy", ["auto", "knn"])
def test_an_explanation_accounts_for_every_token(room: Path, strategy: str) -> None:
    options = ["--artifact", "bundle", "--strategy", strategy, "--max-new-tokens", "24", "--json", "--explain"]
    done = command(room, RUN, *options, "The river")
    record = records(done)[0]
    pattern = r"  at (\d+) tokens: (.+) → (\d+) target forwards, (\d+) tokens, (\d+) of (\d+) drafts accepted"
    steps = [found for line in done.stderr.splitlines() if (found := re.fullmatch(pattern, line))]
    assert sum(int(step[3]) for step in steps) == record["target_forwards"]
    assert sum(int(step[4]) for step in steps) == record["new_tokens"] - 1
    assert sum(int(step[5]) for step in steps) == record["num_accepted_tokens"]
    assert sum(int(step[6]) for step in steps) == record["num_draft_tokens"]
    contexts = [int(step[1]) for step in steps]
    assert contexts == sorted(set(contexts))
    assert contexts[0] == record["prompt_tokens"]


def test_text_streams_and_stops(room: Path) -> None:
    text = command(room, RUN, "--artifact", "bundle", "The river", "--max-new-tokens", "30").stdout
    record = records(command(room, RUN, "--artifact", "bundle", "The river", "--max-new-tokens", "30", "--json"))[0]
    assert text == record["text"] + "\n"
    stop = next(c for c in record["text"][5:] if c.strip() and c.isascii())
    cut = command(room, RUN, "--artifact", "bundle", "The river", "--max-new-tokens", "30", "--stop", stop).stdout
    assert cut == record["text"][: record["text"].index(stop)] + "\n"


def test_short_options_and_the_option_of_the_prompt(room: Path) -> None:
    long = ["--model", "model", "--max-new-tokens", "8", "--threads", "1", "--dtype", "fp32", "--strategy", "plain"]
    short = ["-m", "model", "-n", "8", "-t", "1", "--dtype", "float32", "--strategy", "plain"]
    expected = command(room, RUN, *long, "The river")
    assert expected.returncode == 0
    assert command(room, RUN, *short, "The river").stdout == expected.stdout


def test_all_turns_see_the_answers_before(room: Path) -> None:
    (room / "turns.jsonl").write_text('{"turns": ["The river", "And then?"]}')
    options = ["--artifact", "bundle", "--prompts", "turns.jsonl", "--max-new-tokens", "8", "--json"]
    one = records(command(room, RUN, *options))
    both = records(command(room, RUN, *options, "--all-turns"))
    assert (len(one), len(both)) == (2, 3)
    assert both[0]["token_ids"] == one[0]["token_ids"]
    assert both[1]["prompt_tokens"] > one[0]["prompt_tokens"] + 8


def test_control_tokens_in_a_prompt_are_text_unless_allowed(room: Path) -> None:
    options = ["--model", "model", "The </s></s></s> river", "--max-new-tokens", "1", "--strategy", "plain", "--json"]
    text, control, raw = (
        records(command(room, RUN, *options, *more))[0]["prompt_tokens"]
        for more in ([], ["--allow-special"], ["--raw"])
    )
    assert raw < control < text


def test_plain_and_knapsack_need_no_bundle(room: Path) -> None:
    for strategy in ("plain", "knapsack"):
        options = ["--model", "model", "The river", "--max-new-tokens", "40", "--strategy", strategy]
        done = command(room, RUN, *options, "--json", "--device", "cpu")
        assert records(done)[0]["new_tokens"] == 40


def test_a_bundle_travels(room: Path, tmp_path: Path) -> None:
    """Another folder, another device: the latency is measured again, into the user's cache and not the bundle."""
    shutil.copytree(room / "bundle", tmp_path / "carried")
    before = sorted(p.name for p in (tmp_path / "carried").rglob("*"))
    threads = "1" if torch.get_num_threads() > 1 else "2"
    options = ["--artifact", str(tmp_path / "carried"), "The river", "--threads", threads, "--max-new-tokens", "8"]
    first = command(room, RUN, *options, SSD_CACHE=str(tmp_path / "cache"))
    second = command(room, RUN, *options, SSD_CACHE=str(tmp_path / "cache"))
    assert "measuring this device" in first.stderr
    assert "measuring" not in second.stderr
    assert first.stdout == second.stdout
    assert sorted(p.name for p in (tmp_path / "carried").rglob("*")) == before


@pytest.mark.parametrize("strategy", ["auto", "knn"])
def test_a_bundle_compiled_in_fp32_serves_the_same_files_in_bf16(room: Path, strategy: str) -> None:
    """A near tie is possible: on random weights in bf16, plain decoding itself depends on the number of rows."""
    options = ["--artifact", "bundle", "--dtype", "bf16", "The river", "--max-new-tokens", "40", "--strategy", strategy]
    done = command(room, RUN, *options, "--compare", "--json")
    record, _ = records(done)
    assert record["divergence"] in ("none", "near_tie")
    # `auto` may decode plainly, by what this machine takes for bf16 steps.
    assert record["num_drafts"] or strategy == "auto"


def test_a_domain_joins_a_bundle(room: Path) -> None:
    # Into the bundle that it comes from, as a server's own domains join the bundle that is served.
    shutil.copytree(room / "bundle", room / "joined")
    options = ["--domain-file", "pears=apples.jsonl", "--out", "joined", "--evaluations", "8", "--device", "cpu"]
    done = command(room, COMPILE, "--from", "joined", *options)
    assert done.returncode == 0, done.stderr
    assert not re.search("measure latency|rivers: |apples: ", done.stderr)
    old, new = Bundle.load(room / "bundle"), Bundle.load(room / "joined")
    assert list(new.domains) == ["rivers", "apples", "pears", "mix"]
    for part in (*(f"domains/{name}.yaml" for name in old.domains), *(f"latency/{slug}.json" for slug in old.latency)):
        assert (room / "joined" / part).read_bytes() == (room / "bundle" / part).read_bytes()
    assert new.anchors.domains == ("rivers", "apples", "pears")
    assert old.successors is not None
    assert new.successors is not None
    pairs, joined = (set(map(tuple, known.pairs.tolist())) for known in (old.successors, new.successors))
    assert pairs <= joined
    assert records(command(room, RUN, "--artifact", "joined", "The river", "--strategy", "fixed:pears", "--json"))


BAD_RUNS = {
    "no prompt": (["--artifact", "bundle"], "prompt"),
    "two prompts": (["--artifact", "bundle", "hi", "--prompts", "rivers.jsonl"], "prompt"),
    "empty prompt": (["--artifact", "bundle", "  "], "empty"),
    "empty prompt to compare": (["--artifact", "bundle", "--compare", ""], "prompt: must not be empty"),
    "empty stop": (["--artifact", "bundle", "hi", "--stop", ""], "--stop: must not be empty"),
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
    "unknown model": (["--model", "./nope", "hi", "--strategy", "plain"], "no such folder"),
    "unknown device": (["--artifact", "bundle", "hi", "--device", "abacus"], "--device"),
    "unknown dtype": (["--artifact", "bundle", "hi", "--dtype", "fp3"], "fp32 .float32., bf16 .bfloat16."),
    "missing file": (["--artifact", "bundle", "--prompts", "none.jsonl"], "none.jsonl: cannot be read"),
    "malformed file": (["--artifact", "bundle", "--prompts", "malformed.jsonl"], "malformed.jsonl:2"),
    "empty file": (["--artifact", "bundle", "--prompts", "empty.jsonl"], "no prompts"),
    "too long": (["--artifact", "bundle", "long " * 600], "prompt 1: .*512"),
    "another model": (["--artifact", "bundle", "--model", "other", "hi"], "compiled for"),
    "another tokenizer": (["--artifact", "bundle", "--model", "retokenized", "hi"], "other tokenizer"),
    "not utf-8": (["--artifact", "bundle", "--prompts", "latin.jsonl"], "latin.jsonl:1: not JSON in UTF-8"),
    "empty line in file": (["--artifact", "bundle", "--prompts", "blank.jsonl"], "blank.jsonl:2: the prompt is empty"),
    "a list for an object": (["--artifact", "bundle", "--prompts", "list.jsonl"], "expected a JSON object, got list"),
    "a folder for a file": (["--artifact", "bundle", "--prompts", "empty"], "empty: cannot be read"),
    "absurd threads": (["--artifact", "bundle", "hi", "--threads", "999999"], "--threads"),
    "bad size": (["--artifact", "bundle", "hi", "--weight-memory", "lots"], "such as 2G"),
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
    "truncated weights": (["--model", "truncated", "hi", "--strategy", "plain"], "not a safetensors file"),
    "weights that lack": (["--model", "lacking", "hi", "--strategy", "plain"], "lacks weights"),
    "broken config": (["--model", "broken", "hi", "--strategy", "plain"], "config.json is not JSON"),
    "another kind of model": (["--model", "bert", "hi", "--strategy", "plain"], "a bert model is not supported"),
    "not a gguf": (["--model", "fake.gguf", "hi", "--strategy", "plain"], "not a GGUF file"),
}


@pytest.fixture(scope="module")
def bad_room(room: Path) -> Path:
    (room / "empty").mkdir()
    shutil.copytree(room / "bundle", room / "mixed")
    (room / "mixed" / "notes.txt").write_text("precious")
    (room / "empty.jsonl").write_text("")
    (room / "malformed.jsonl").write_text('{"prompt": "a"}\n{"prompt"')
    (room / "latin.jsonl").write_bytes('{"prompt": "Häuser"}'.encode("latin-1"))
    (room / "blank.jsonl").write_text('{"prompt": "a"}\n{"prompt": "  "}')
    (room / "list.jsonl").write_text('["a"]')
    (room / "fake.gguf").write_bytes(b"GGUF nothing of the kind")
    save_tiny_model(room / "other", epsilon=0.3)
    for name in ("retokenized", "truncated", "lacking", "broken", "bert"):
        shutil.copytree(room / "model", room / name)
    template = room / "retokenized" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    weights = room / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    tensors = load_file(room / "model" / "model.safetensors")
    tensors.pop("model.layers.3.mlp.up_proj.weight")
    save_file(tensors, room / "lacking" / "model.safetensors", {"format": "pt"})
    (room / "broken" / "config.json").write_text("{")
    (room / "bert" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    return room


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_input_is_one_line_and_exit_code_2(
    bad_room: Path, case: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options, says = BAD_RUNS[case]
    assert_refused(within(bad_room, run_main, options, monkeypatch, capfd), says)


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
    "out in use": (["--model", "model", "--domains", "cnn", "--out", "model"], "not a bundle"),
    "out holds more": (["--model", "model", "--domains", "cnn", "--out", "mixed"], "holds notes.txt, which is not"),
    "out is where one stands": (["--model", "model", "--domains", "cnn", "--out", "."], "contains the current folder"),
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
    "base of another dtype": (
        ["--from", "bundle", "--dtype", "bf16", "--domain-file", "new=rivers.jsonl"],
        "give --dtype",
    ),
    "not a model": (["--model", "empty", "--domains", "cnn"], "config.json"),
    "no load": (["--model", "model", "--domains", "cnn", "--concurrency", "1,,4"], "--concurrency: expected numbers"),
    "load of nobody": (["--model", "model", "--domains", "cnn", "--concurrency", "0"], "from 1 to 256"),
    "absurd load": (["--model", "model", "--domains", "cnn", "--concurrency", "999999"], "from 1 to 256"),
    "option of earlier versions": (
        ["--model", "model", "--domains", "cnn", "--anchor-rule", "joint"],
        "--anchor-rule: is no longer an option; .*CompileSettings.anchor_rule",
    ),
    "unknown search": (
        ["--model", "model", "--domains", "cnn", "--search", "any"],
        "both, knapsack, bayesian, self-sd",
    ),
}


@pytest.mark.parametrize("case", BAD_COMPILES)
def test_a_bad_compile_writes_nothing(
    bad_room: Path, case: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (bad_room / "few.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}')
    options, says = BAD_COMPILES[case]
    before = {path.name for path in bad_room.iterdir()}
    assert_refused(within(bad_room, compile_main, options, monkeypatch, capfd), says)
    left = {path.name for path in bad_room.iterdir()} - before
    assert left <= {"cache"}


def test_the_last_domains_prompts_are_checked_before_anything_is_computed(
    bad_room: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (bad_room / "few.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}')
    monkeypatch.setattr("ssd_compiler.stages.features_of", None)
    before = {path.name for path in bad_room.iterdir()}
    options = ["--model", "model", "--domain-file", "rivers=rivers.jsonl", "--domain-file", "few=few.jsonl"]
    refused = within(bad_room, compile_main, [*options, "--out", "no"], monkeypatch, capfd)
    assert_refused(refused, "few.jsonl has 2 prompts; at least 6 are needed")
    assert {path.name for path in bad_room.iterdir()} - before <= {"cache"}


HEAVY = "{'torch', 'transformers', 'sklearn', 'scipy', 'faiss'}"


@pytest.mark.parametrize("module", ["ssd_runtime.commands.run", "ssd_compiler.cli"])
def test_bad_input_is_answered_before_torch_is_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit(f'imports {{found}}' if (found := {HEAVY} & set(sys.modules)) else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["ssd_runtime.commands.run", "ssd_compiler.cli"])
def test_the_version_is_printed_without_importing_torch(module: str) -> None:
    code = (
        f"import atexit, sys, {module}; sys.argv = ['ssd', '--version']; "
        f"atexit.register(lambda: print('imports', {HEAVY} & set(sys.modules))); {module}.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"ssd-decoding {version('ssd-decoding')}\nimports set()\n"


def test_a_model_too_large_is_refused_before_it_is_loaded(
    bad_room: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ssd_runtime.devices.memory.available_bytes", lambda _: 1000)
    monkeypatch.setattr("ssd_runtime.loading.checkpoint.read_model", None)
    done = within(bad_room, run_main, ["--artifact", "bundle", "hi"], monkeypatch, capfd)
    assert_refused(done, r"needs 0\.0 GiB of memory .* give a smaller model")


def test_a_full_disk_is_one_line(
    bad_room: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("ssd_compiler.workspace.write_atomically", full)
    done = within(bad_room, compile_main, compile_options("full"), monkeypatch, capfd)
    assert_refused(done, "full.compile.*No space left on device; check the path, its permissions and the space left")
    assert not list(bad_room.glob("*full*"))


def test_a_cache_that_cannot_be_written_is_done_without(room: Path) -> None:
    options = ["--artifact", "bundle", "The river", "--threads", "1", "--max-new-tokens", "4", "--json"]
    assert records(command(room, RUN, *options, SSD_CACHE="/proc/nowhere"))[0]["new_tokens"] == 4


LONG = "long " * 600
STRICT = "{% if messages[-1]['content']|length > 99 %}{{ raise_exception('too\nlong') }}{% endif %}x"
FAILING = {"too long": "prompt NAME: .* 512", "refused": r"prompt NAME: .* refuses it \(too long\)", "memory": "memory"}
PLAINLY = ["--model", "model", "--strategy", "plain", "--max-new-tokens", "8", "--prompts", "failing.jsonl"]


@pytest.fixture
def failing(room: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a file in which a prompt and a conversation's second turn fail."""
    shutil.copytree(room / "model", tmp_path / "model")
    prompts = [
        {"id": "one", "category": "short", "prompt": "The river"},
        {"id": "two", "category": "long", "prompt": LONG},
        {"id": "three", "turns": ["The river", LONG, "And then?"]},
        {"id": "four", "category": "short", "prompt": "The river"},
    ]
    (tmp_path / "failing.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    prefilling = Session.prefilling

    def scarce(session: Session, ids: list[int], **more: Any) -> Any:
        return prefilling(session, ids, **more) if len(ids) < 200 else torch.empty(1 << 60, dtype=torch.uint8)

    if request.param == "refused":
        (tmp_path / "model" / "chat_template.jinja").write_text(STRICT)
    if request.param == "memory":
        monkeypatch.setattr(Session, "prefilling", scarce)
    return tmp_path


@pytest.mark.parametrize(("failing", "says"), FAILING.items(), ids=FAILING, indirect=["failing"])
def test_a_prompt_that_fails_is_reported_in_its_place(
    failing: Path, says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = within(failing, run_main, [*PLAINLY, "--all-turns", "--json", "--quiet"], monkeypatch, capfd)
    assert (done.returncode, done.stderr) == (2, "")
    *each, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["id"] for record in each] == ["one", "two", "three", "three", "four"]
    for failed, name, category in ((each[1], "two", "long"), (each[3], "three", None)):
        assert set(failed) == {"id", "category", "error"}
        assert failed["category"] == category
        assert re.fullmatch(f".*{says.replace('NAME', name)}.*", failed["error"])
    assert each[4]["token_ids"] == each[2]["token_ids"] == each[0]["token_ids"]
    total = last["summary"]
    assert (total["prompts"], total["failed"], total["new_tokens"]) == (3, 2, 24)
    assert set(total["categories"]) == {"short"}

    shown = within(failing, run_main, PLAINLY, monkeypatch, capfd)
    text = each[0]["text"]
    assert (shown.returncode, shown.stdout) == (2, f"{text}\n\n{text}\n{text}\n")
    assert re.fullmatch(f"error: .*{says.replace('NAME', 'two')}.*\n3 prompts, 24 tokens, .*\n", shown.stderr)


@pytest.mark.parametrize("failing", ["too long"], indirect=True)
def test_a_prompt_that_fails_changes_no_other_answer(
    failing: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sampled = [*PLAINLY, "--json", "--all-turns", "--temperature", "1", "--seed", "3"]
    one = within(failing, run_main, sampled, monkeypatch, capfd)
    prompts = failing / "failing.jsonl"
    prompts.write_text(prompts.read_text().replace(LONG, "short"))
    other = within(failing, run_main, sampled, monkeypatch, capfd)
    answers = [[json.loads(line) for line in done.stdout.splitlines()][-2] for done in (one, other)]
    assert answers[0]["id"] == answers[1]["id"] == "four"
    assert (answers[0]["seed"], answers[0]["token_ids"]) == (answers[1]["seed"], answers[1]["token_ids"])


@pytest.mark.parametrize("failing", ["too long"], indirect=True)
@pytest.mark.parametrize("compare", [False, True])
def test_a_summary_comes_even_if_every_prompt_fails(
    failing: Path, compare: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (failing / "failing.jsonl").write_text(json.dumps({"prompt": LONG}))
    options = [*PLAINLY, "--compare"] if compare else PLAINLY
    done = within(failing, run_main, [*options, "--json"], monkeypatch, capfd)
    assert (done.returncode, done.stderr) == (2, "")
    total = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert (total["prompts"], total["failed"], total["new_tokens"]) == (0, 1, 0)
    ratios = ["tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate"]
    compared = ["plain_tokens_per_second", "speedup", "identical", "divergence"]
    assert {total[name] for name in [*ratios, *(compared if compare else [])]} == {None}
    assert within(failing, run_main, options, monkeypatch, capfd).returncode == 2


@pytest.mark.parametrize("failing", ["too long"], indirect=True)
def test_a_wrong_output_outweighs_a_prompt_that_fails(
    failing: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ssd_runtime.engine.offline.runner.compare", lambda **_: Divergence(Kind.ERROR, 0))
    done = within(failing, run_main, [*PLAINLY, "--compare"], monkeypatch, capfd)
    assert done.returncode == 1
    assert "error: prompt two: " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: an output differs from plain decoding")


@pytest.mark.parametrize("failing", ["too long"], indirect=True)
@pytest.mark.parametrize("sampled", [[], ["--temperature", "0.9", "--seed", "5"]], ids=["greedy", "sampled"])
def test_several_prompts_at_once_are_answered_as_one_by_one(
    failing: Path, sampled: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the file's order, turns, errors and seeds included."""
    options = [*PLAINLY, "--all-turns", "--json", *sampled]
    one, three = (
        within(failing, run_main, [*options, "--concurrency", number], monkeypatch, capfd) for number in ("1", "3")
    )
    assert one.returncode == three.returncode == 2
    expected, got = ([json.loads(line) for line in done.stdout.splitlines()] for done in (one, three))
    told = ("id", "turn", "category", "error", "token_ids", "text", "finish_reason", "seed")
    assert [[each.get(name) for name in told] for each in expected] == [
        [each.get(name) for name in told] for each in got
    ]
    summary = got[-1]["summary"]
    assert summary["concurrency"] == 3
    assert summary["throughput"] > 0
    assert summary["failed"] == 2


def test_a_comparison_without_a_prompt_decodes_the_sample_prompts(
    room: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "model", "--device", "cpu", "--compare", "--max-new-tokens", "6"]
    done = within(room, run_main, options, monkeypatch, capfd)
    assert done.returncode == 0, done.stderr
    ids = [prompt.id for prompt in sample_prompts()]
    assert len(ids) == len(set(ids)) == 8
    for name in ids:
        assert re.search(rf"{name} +│ +\d+ │ +[\d.]+ │ +[\d.]+ │ +[\d.]+ ", done.stdout), done.stdout
    line = r"auto is \d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\) times as fast as plain decoding on these 8 prompts; "
    assert re.search(line + "every output is plain decoding's", done.stderr), done.stderr
    *each, _ = records(within(room, run_main, [*options, "--json"], monkeypatch, capfd))
    assert [record["id"] for record in each] == ids


def test_a_comparison_of_one_prompt_says_how_fast_it_was(
    room: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "model", "--device", "cpu", "--compare", "-n", "6", TEXTS[0]]
    done = within(room, run_main, options, monkeypatch, capfd)
    assert re.search(r"auto is \d+\.\d\d times as fast as plain decoding on this prompt; every output", done.stderr)


def test_several_at_once_are_compared_with_plain_decoding_of_as_many(
    room: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--artifact", "bundle", "--strategy", "knn", "--prompts", "rivers.jsonl", "--max-new-tokens", "6"]
    done = within(room, run_main, [*options, "--concurrency", "4", "--compare", "--json"], monkeypatch, capfd)
    *each, last = records(done)
    assert len(each) == 14
    assert all(record["identical"] for record in each)
    summary = last["summary"]
    assert summary["identical"] is True
    assert summary["speedup"] == pytest.approx(summary["throughput"] / summary["plain_throughput"], rel=1e-3)


def test_one_prompt_is_not_decoded_several_at_once(
    room: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = within(room, run_main, ["--model", "model", "--concurrency", "2", "hello"], monkeypatch, capfd)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --concurrency: needs several prompts")


@pytest.mark.usefixtures("any_machine")
def test_a_compile_that_runs_out_of_memory_is_one_line(
    room: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ssd_compiler.stages.measure_latency", lambda _: torch.empty(1 << 60, dtype=torch.uint8))
    done = within(room, compile_main, compile_options("scarce"), monkeypatch, capfd)
    assert done.returncode == 2
    assert re.fullmatch(r"error: out of memory on cpu while compiling; give .*bf16.*", done.stderr.splitlines()[-1])
    assert not (room / "scarce").exists()


@pytest.mark.parametrize("warnings", ["default", "error"])
def test_ignored_generation_settings_are_noted_once(room: Path, tmp_path: Path, warnings: str) -> None:
    shutil.copytree(room / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"no_repeat_ngram_size": 3}')
    options = ["--model", "model", "--strategy", "plain", "--max-new-tokens", "2", "--json", "The river"]
    code = f"{ANY_MACHINE}from {RUN} import main; main()"
    program = [sys.executable, "-W", warnings, "-c", code, *options]
    env = {**os.environ, "SSD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert len(records(done)) == 2
    assert re.match(r"note: .*sets no_repeat_ngram_size, .*\n", done.stderr)


def assert_refused(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "Traceback" not in done.stderr
    assert re.search(says, lines[0]), lines[0]


def test_an_altered_bundle_is_refused(room: Path, tmp_path: Path) -> None:
    shutil.copytree(room / "bundle", tmp_path / "altered")
    with (tmp_path / "altered" / "domains" / "rivers.yaml").open("a") as file:
        file.write("\n")
    assert_refused(command(room, RUN, "--artifact", str(tmp_path / "altered"), "hi"), "altered")


def test_interrupted_and_resumed(room: Path) -> None:
    """Ctrl-C ends with 130, leaves no bundle, and `--resume` keeps what was finished."""
    env = {**os.environ, "SSD_CACHE": str(room / "cache"), "HF_HUB_OFFLINE": "1"}
    options = compile_options("resumed")
    process = subprocess.Popen(
        [sys.executable, "-c", f"{ANY_MACHINE}from {COMPILE} import main; main()", *options],
        cwd=room,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores Ctrl-C, and so would this.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    kept = room / ".resumed.compile"
    deadline = time.monotonic() + 120
    while not (kept / "calibration-rivers.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip().splitlines()[-1] == "error: interrupted"
    assert not (room / "resumed").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    again = command(room, COMPILE, *options, "--evaluations", "25", "--resume")
    assert_refused(again, "other options")
    done = command(room, COMPILE, *options, "--resume")
    assert done.returncode == 0, done.stderr
    assert "rivers: calibrate" not in done.stderr
    assert finished
    Bundle.load(room / "resumed")
    assert not kept.exists()
