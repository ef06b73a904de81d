"""Both commands as a user runs them, on a tiny model: compile and run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from ssd_artifacts.bundle import Bundle
from ssd_compiler.cli import main as compile_main
from ssd_profiles.prompts import sample_prompts
from ssd_runtime.commands.run import main as run_main
from ssd_runtime.engine.engine import Engine
from tests.commands import COMPILE, RUN, Within, assert_refused, command, compile_options, records
from tests.compiled import seeded
from tests.waiting import wait_until


def test_a_compile_writes_a_complete_bundle(room: Path) -> None:
    summary = json.loads((room / "compiled.json").read_text())
    assert [domain["domain"] for domain in summary["domains"]] == ["rivers", "apples", "mix"]
    bundle = Bundle.load(room / "bundle")
    assert set(bundle.domains) == {"rivers", "apples", "mix"}
    for name in ("rivers", "apples"):
        record = bundle.domains[name]
        assert record.frontier
        assert record.choice is not None
        assert record.validation.identical
        assert [(each.concurrency, each.identical) for each in record.validation.under_load] == [(3, True)]
        assert record.search.evaluations == len(record.search.rated) <= 24
        assert {entry.origin for entry in record.frontier} <= {origin for _, origin, _ in record.search.rated}
    assert bundle.anchors.domains == ("rivers", "apples")
    assert len(bundle.latency) == 1
    assert bundle.successors is not None
    assert bundle.exits.layers == (2, 4, 6)
    for name in ("rivers", "apples"):
        tuned = bundle.domains[name].exit
        assert set(tuned.stops) <= set(bundle.exits.layers)
    report = json.loads((room / "bundle" / "report.json").read_text())
    for figures in report["domains"]:
        assert ("added" in figures) == (figures["domain"] != "mix")
        if "added" in figures:
            low, high = figures["added"]["interval"]
            assert low <= figures["added"]["speedup"] <= high
            assert 2 <= figures["added"]["prompts"] <= 8
    assert "<svg" in (room / "bundle" / "report.html").read_text()
    assert not list(room.glob(".bundle*"))


def test_prompts_of_a_file_are_decoded_and_compared_with_plain_decoding(room: Path) -> None:
    (room / "five.jsonl").write_text("\n".join((room / "rivers.jsonl").read_text().splitlines()[:5]))
    options = ["--artifact", "bundle", "--prompts", "five.jsonl", "--max-new-tokens", "24", "--strategy", "knn"]
    *each, last = records(command(room, RUN, *options, "--compare", "--json", "--explain"))
    assert len(each) == 5
    for record in each:
        assert record["divergence"] in ("none", "near_tie")
        assert record["new_tokens"] == len(record["token_ids"]) == 24
        assert record["strategy"] == "knn"
        assert record["finish_reason"] == "length"
        assert record["target_forwards"] <= 23
    total = last["summary"]
    assert total["new_tokens"] == 5 * 24
    assert total["categories"]["rivers"]["new_tokens"] == 5 * 24
    assert total["tokens_per_second"] == pytest.approx(5 * 23 / total["decode_seconds"], rel=1e-3)
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


def test_a_bundle_travels(room: Path, tmp_path: Path) -> None:
    """Another folder, another device: the latency is measured again, into the user's cache and not the bundle."""
    shutil.copytree(room / "bundle", tmp_path / "carried")
    before = sorted(p.name for p in (tmp_path / "carried").rglob("*"))
    other = ["--weight-memory", "0"]  # its steps take another time, as another device's do
    options = ["--artifact", str(tmp_path / "carried"), "The river", *other, "--max-new-tokens", "8"]
    first = command(room, RUN, *options, SSD_CACHE=seeded(tmp_path / "cache"))
    second = command(room, RUN, *options, SSD_CACHE=seeded(tmp_path / "cache"))
    assert "measuring this device" in first.stderr
    assert "measuring" not in second.stderr
    assert first.stdout == second.stdout
    assert sorted(p.name for p in (tmp_path / "carried").rglob("*")) == before


def test_a_bundle_compiled_in_fp32_serves_the_same_files_in_bf16(room: Path) -> None:
    """A near tie is possible: on random weights in bf16, plain decoding itself depends on the number of rows."""
    options = ["--artifact", "bundle", "--dtype", "bf16", "The river", "--max-new-tokens", "40", "--strategy", "knn"]
    done = command(room, RUN, *options, "--compare", "--json")
    record, _ = records(done)
    assert record["divergence"] in ("none", "near_tie")
    assert record["num_drafts"]


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
    figures = [json.loads(each.report)["domains"] for each in (old, new)]
    added = [{one["domain"]: one.get("added") for one in each} for each in figures]
    assert added[0].items() <= added[1].items(), "what the base adds to its own domains"
    assert added[1]["pears"]
    assert records(command(room, RUN, "--artifact", "joined", "The river", "--strategy", "fixed:pears", "--json"))


def test_a_comparison_without_a_prompt_decodes_the_sample_prompts(room: Path, within: Within) -> None:
    options = ["--model", "model", "--device", "cpu", "--compare", "--max-new-tokens", "6"]
    done = within(room, run_main, *options)
    assert done.returncode == 0, done.stderr
    ids = [prompt.id for prompt in sample_prompts()]
    assert len(ids) == len(set(ids)) == 8
    for name in ids:
        assert re.search(rf"{name} +│ +\d+ │ +[\d.]+ │ +[\d.]+ │ +[\d.]+ ", done.stdout), done.stdout
    line = r"auto is \d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\) times as fast as plain decoding on these 8 prompts; "
    assert re.search(line + "every output is plain decoding's", done.stderr), done.stderr
    *each, _ = records(within(room, run_main, *options, "--json"))
    assert [record["id"] for record in each] == ids


def test_an_answer_of_one_token_has_no_speed(room: Path, within: Within) -> None:
    options = ["--artifact", "bundle", "--prompts", "rivers.jsonl", "--max-new-tokens", "1", "--compare"]
    done = within(room, run_main, *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no second token, so no speed, identical: yes") == 14
    assert "No answer has a second token" in done.stderr
    assert re.search(r"14 prompts, 14 tokens, first token after [\d.]+ s$", done.stderr, re.MULTILINE)


def test_several_at_once_are_compared_with_plain_decoding_of_as_many(room: Path, within: Within) -> None:
    options = ["--artifact", "bundle", "--strategy", "knn", "--prompts", "rivers.jsonl", "--max-new-tokens", "6"]
    done = within(room, run_main, *options, "--concurrency", "4", "--compare", "--json")
    *each, last = records(done)
    assert len(each) == 14
    assert all(record["identical"] for record in each)
    summary = last["summary"]
    assert summary["identical"] is True
    assert summary["speedup"] == pytest.approx(summary["throughput"] / summary["plain_throughput"], rel=1e-3)


def test_interrupted_and_resumed(room: Path, within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with 130, leaves no bundle, and `--resume` keeps what was finished.

    What somebody has put into the bundle's folder meanwhile is kept as well.
    """
    kept = room / ".resumed.compile"

    def interrupt(process: BaseProcess) -> None:
        wait_until((kept / "calibration-rivers.json").exists, "a stage is finished", seconds=120)
        os.kill(process.pid or 0, signal.SIGINT)

    options = compile_options("resumed", evaluations=8, exits=0, loads="1")
    done = command(room, COMPILE, *options, beside=interrupt)
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "error: interrupted"
    assert not (room / "resumed").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    again = command(room, COMPILE, *options, "--evaluations", "9", "--resume")
    assert_refused(again, "other options")
    thesis = room / "resumed" / "thesis.txt"

    def put(_: object) -> str:
        thesis.parent.mkdir()
        thesis.write_text("of years")
        return ""

    with monkeypatch.context() as patch:
        patch.setattr("ssd_compiler.build.html_report", put)
        done = within(room, compile_main, *options, "--resume")
    assert_refused(done, "resumed exists and is not a bundle")
    assert "rivers: calibrate" not in done.stderr
    assert finished
    assert thesis.read_text() == "of years"
    shutil.rmtree(thesis.parent)
    done = command(room, COMPILE, *options, "--resume")
    assert done.returncode == 0, done.stderr
    assert "rivers: search" not in done.stderr
    Bundle.load(room / "resumed")
    assert not kept.exists()


@pytest.mark.parametrize("together", [[], ["--concurrency", "2"]], ids=["one by one", "two at once"])
def test_ctrl_c_while_the_device_is_measured_between_prompts_ends_the_run(
    room: Path, within: Within, monkeypatch: pytest.MonkeyPatch, together: list[str]
) -> None:
    def interrupted(_: Engine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "must_be_measured", True)
    monkeypatch.setattr(Engine, "measure", interrupted)
    options = ["--model", "model", "--strategy", "plain", "--max-new-tokens", "8", "--prompts", "rivers.jsonl"]
    done = within(room, run_main, *options, *together, "--json")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "error: interrupted")
    assert len(done.stdout.splitlines()) == 1, "the first answer was given"
