"""`ssd-bundle` as a user runs it: a bundle is compiled, looked at, packed, signed, carried elsewhere and adopted."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.fingerprint import SLICE_BYTES
from ssd_artifacts.integrity import ORIGIN, SIGNATURE
from ssd_artifacts.reference_bundle import bundle_path
from ssd_artifacts.safetensors_header import read_header
from ssd_compiler.bundles.cli import main as bundle_main
from ssd_compiler.cli import main as compile_main
from ssd_runtime.commands.run import main as run_main
from tests.commands import COMPILE, Done, Within, command, one_line, records
from tests.damage import contents
from tests.folders import TEXTS, save_tiny_model, write_prompts
from tests.keys import key_pair
from tests.own_code import edited


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its fine-tune, prompts, keys and a compiled bundle."""
    folder = tmp_path_factory.mktemp("room")
    save_tiny_model(folder / "model")
    write_prompts(folder / "rivers.jsonl", TEXTS[0])
    key_pair(folder, "mine")
    done = command(folder, COMPILE, *options("bundle"))
    assert done.returncode == 0, done.stderr
    tuned(folder, "tuned", 0.02)
    return folder


def options(out: str) -> list[str]:
    return ["--model", "model", "--domain-file", "rivers=rivers.jsonl", "--out", out, "--evaluations", "12"]


def tuned(folder: Path, name: str, noise: float) -> None:
    """The model with noise on its weights, of so many standard deviations of each tensor."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(folder / name)
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / name)


@pytest.fixture
def call(room: Path, within: Within) -> Within:
    return partial(within, room)


def tokens(done: Done) -> Any:
    return records(done)[0]["token_ids"]


QUESTION = ("--max-new-tokens", "12", "--json", "How many loaves?")


def test_inspect_tells_what_is_in_a_bundle(room: Path, call: Within) -> None:
    shown = call(bundle_main, "inspect", "bundle").stdout
    config = Bundle.load(room / "bundle").domains["rivers"]
    mask = config.frontier[config.choice.entry].sub_layer_plan(8)
    picture = "".join("█" if skipped else "·" for skipped in mask.skipped[1::2])
    assert f"  MLP       {picture}" in shown
    assert "made on this machine" in shown
    assert f"manifest.yaml: the model's path, {room / 'model'}" in shown
    assert "token pairs, which give back much of the calibration text" in shown
    summary = json.loads(call(bundle_main, "inspect", "bundle", "--json").stdout)
    assert summary["domains"][0]["domain"] == "rivers"


def test_a_packed_bundle_decodes_elsewhere_with_a_model_that_the_user_names(room: Path, call: Within) -> None:
    assert call(bundle_main, "pack", "bundle", "--out", "b.ssd.tar").returncode == 0
    assert "does not choose the model" in one_line(call(run_main, "--artifact", "b.ssd.tar", *QUESTION))
    plain = tokens(call(run_main, "--model", "model", "--strategy", "plain", *QUESTION))
    for strategy in ("auto", "knn"):
        run = call(run_main, "--artifact", "b.ssd.tar", "--model", "model", "--strategy", strategy, *QUESTION)
        assert tokens(run) == plain
    assert call(bundle_main, "unpack", "b.ssd.tar", "--out", "unpacked").returncode == 0
    assert (room / "unpacked" / "report.html").read_text().startswith("<!doctype html>")
    assert "does not choose the model" in one_line(call(run_main, "--artifact", "unpacked", *QUESTION))
    assert tokens(call(run_main, "--artifact", "unpacked", "--model", "model", *QUESTION)) == plain
    assert call(bundle_main, "diff", "bundle", "b.ssd.tar").stdout == ""
    assert "b.ssd.tar, sha256:" in call(bundle_main, "inspect", "unpacked").stdout


def test_a_report_goes_into_the_users_own_folders_alone(room: Path, call: Within) -> None:
    (room / "bundle" / "report.html").unlink()
    assert call(bundle_main, "report", "bundle").stdout == "bundle/report.html\n"
    assert (room / "bundle" / "report.html").read_text().startswith("<!doctype html>")
    packaged = bundle_path(Path("demo"))
    before = contents(packaged)
    assert call(bundle_main, "report", "demo").stdout == "report.html\n"
    assert contents(packaged) == before
    assert (room / "report.html").read_text().startswith("<!doctype html>")


def test_a_signer_who_is_trusted_lets_the_bundle_choose(room: Path, call: Within) -> None:
    shutil.copytree(room / "bundle", room / "signed")
    assert call(bundle_main, "sign", "signed", "--key", "mine.pem").returncode == 0
    assert (room / "signed" / SIGNATURE).is_file()
    call(bundle_main, "pack", "signed", "--out", "signed.ssd.tar")
    trusting = ("--artifact", "signed.ssd.tar", "--require-signature", "mine.pub")
    plain = tokens(call(run_main, "--model", "model", "--strategy", "plain", *QUESTION))
    assert tokens(call(run_main, *trusting, *QUESTION)) == plain
    assert "it is not signed" in one_line(call(run_main, "--artifact", "bundle", *trusting[2:], *QUESTION))
    _, other = key_pair(room, "other")
    assert "not signed by" in one_line(call(bundle_main, "verify", "signed", "--require-signature", str(other)))
    assert "signed by mine.pub" in call(bundle_main, "verify", "signed", *trusting[2:], "--model", "model").stdout


def test_verify_reads_the_weights_whatever_is_remembered(room: Path, call: Within) -> None:
    weights = room / "copied" / "model.safetensors"
    shutil.copytree(room / "model", weights.parent)
    assert "all weights match" in call(bundle_main, "verify", "bundle", "--model", "copied").stdout
    largest = max(read_header(weights).values(), key=lambda tensor: tensor.nbytes)
    content, seen = bytearray(weights.read_bytes()), weights.stat()
    content[largest.offset + SLICE_BYTES] ^= 1  # after the first slice that loading looks at
    weights.write_bytes(content)
    os.utime(weights, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert "made from other weights" in one_line(call(bundle_main, "verify", "bundle", "--model", "copied"))


def test_strip_leaves_out_what_the_bundle_can_do_without(
    room: Path, call: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(bundle_main, "pack", "bundle", "--out", "s.ssd.tar", "--strip", "--key", "mine.pem")
    call(bundle_main, "unpack", "s.ssd.tar", "--out", "stripped")
    files = contents(room / "stripped")
    assert not {"followers.safetensors", "report.json"} & set(files)
    assert str(room).encode() not in b"".join(content for name, content in files.items() if name != ORIGIN)
    plain = tokens(call(run_main, "--model", "model", "--strategy", "plain", *QUESTION))
    assert tokens(call(run_main, "--artifact", "stripped", "--model", "model", *QUESTION)) == plain
    trusting = call(run_main, "--artifact", "stripped", "--require-signature", "mine.pub", *QUESTION)
    assert tokens(trusting) == plain, "./model, from where the command runs"
    (room / "apples.jsonl").write_text((room / "rivers.jsonl").read_text().replace("river", "apple"))
    load, loaded = Bundle.load, list[Path]()
    monkeypatch.setattr(Bundle, "load", lambda path: (loaded.append(path), load(path))[1])
    joined = call(
        compile_main,
        *("--from", "stripped", "--model", "model", "--domain-file", "apples=apples.jsonl"),
        *("--evaluations", "8", "--out", "joined"),
    )
    assert joined.returncode == 0, joined.stderr
    assert loaded == [Path("stripped")], "what was checked is extended, not what lies there later"
    assert set(Bundle.load(room / "joined").domains) == {"rivers", "apples"}


def test_diff_names_what_differs(room: Path, call: Within) -> None:
    shutil.copytree(room / "bundle", room / "changed")
    changed = Bundle.load(room / "changed")
    changed.domains["rivers"] = changed.domains["rivers"].model_copy(
        update={"pays": not changed.domains["rivers"].pays}
    )
    changed.save(room / "changed")
    done = call(bundle_main, "diff", "bundle", "changed")
    assert done.returncode == 1
    assert [line.split(" ")[:2] for line in done.stdout.splitlines()] == [["rivers:", "pays"]]


def test_a_fine_tune_adopts_a_bundle(room: Path, call: Within) -> None:
    refused = one_line(call(run_main, "--artifact", "bundle", "--model", "tuned", *QUESTION))
    assert "other weights" in refused
    measured = ("--prompts", "rivers.jsonl", "--seconds", "2")
    done = call(bundle_main, "adopt", "bundle", "--model", "tuned", "--out", "adopted", *measured)
    assert done.returncode == 0, done.stderr
    adopted = Bundle.load(room / "adopted")
    assert adopted.model.name == str(room / "tuned")
    assert adopted.domains["rivers"].validation is None
    assert not adopted.domains["rivers"].pays
    assert adopted.domains["rivers"].choice.predicted_speedup == adopted.domains["rivers"].oracle_speedup == 0
    assert adopted.domains["rivers"].search.evaluations == 0
    assert adopted.latency
    assert "predicted" not in call(bundle_main, "inspect", "adopted").stdout
    plain = tokens(call(run_main, "--model", "tuned", "--strategy", "plain", *QUESTION))
    drafted = call(run_main, "--artifact", "adopted", "--strategy", "knn", *QUESTION)
    assert tokens(drafted) == plain
    assert json.loads(drafted.stdout.splitlines()[0])["draft_acceptance_rate"] > 0


def test_acceptance_on_any_grid_is_measured_anew_where_the_model_contradicts_it(room: Path, call: Within) -> None:
    given = Bundle.load(room / "bundle")
    rivers = given.domains["rivers"]
    grid = {"draft_lengths": [2, 4], "thresholds": [0.1], "tokens": [[1.0], [1.0]], "steps": [[2.0], [4.0]]}
    entries = [entry.model_copy(update={**grid, "token_agreement": 0.0}) for entry in rivers.frontier]
    choice = rivers.choice.model_copy(update={"draft_length": 4, "threshold": 0.1})
    given.domains["rivers"] = rivers.model_copy(update={"frontier": entries, "choice": choice})
    given.save(room / "foreign")
    shutil.copytree(room / "tuned", room / "longer")
    edited(room / "longer", "config.json", max_position_embeddings=1024)
    measured = ("--prompts", "rivers.jsonl", "--seconds", "2", "--out", "anew")
    done = call(bundle_main, "adopt", "foreign", "--model", "longer", *measured)
    assert "acceptance measured anew" in done.stdout, done.stderr
    adopted = Bundle.load(room / "anew")
    entry = adopted.domains["rivers"].frontier[choice.entry]
    assert (entry.draft_lengths, entry.thresholds) == ([2, 4], [0.1])
    assert entry.tokens[0][0] > 1
    assert adopted.latency == {}, "another config, whose times may be others"


def test_a_bundle_that_is_not_adopted_says_why(room: Path, call: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ("--prompts", "rivers.jsonl", "--seconds", "2", "--out", "never")
    with monkeypatch.context() as patch:
        patch.setattr("ssd_compiler.bundles.adopt.LEAST_AGREEMENT", 2.0)
        done = call(bundle_main, "adopt", "bundle", "--model", "tuned", *measured)
    assert done.returncode == 2
    assert "no mask fits" in done.stderr
    itself = call(bundle_main, "adopt", "bundle", "--model", "model", *measured)
    assert itself.returncode == 2
    assert "it serves" in itself.stderr
    assert not (room / "never").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect", "nowhere"), "no bundle there"),
        (("inspect", "nowhere.ssd.tar"), "no such archive"),
        (("unpack", "rivers.jsonl", "--out", "x"), "not an archive of ssd-bundle pack"),
        (("pull", "bundle"), "no place on the Hub or in a registry"),
        (("push", "bundle", "s3://bucket/x", "--yes"), "unknown kind of reference"),
        (("pull", "hf://org"), "no reference to the Hub"),
        (("sign", "bundle", "--key", "none.pem"), "is not there"),
        (("sign", "b.ssd.tar", "--key", "mine.pem"), "not a bundle's folder"),
        (("pack", "bundle", "--out", "model"), "is a folder"),
        (("unpack", "b.ssd.tar", "--out", "model"), "--out: model exists and is not a bundle"),
        (("unpack", "b.ssd.tar"), "--out: bundle is a bundle that was made here"),
        (("push", "bundle", "oci://localhost:1/x:y"), "give --yes to upload without asking"),
        (("push", "bundle", "oci://localhost:1/x:y", "--private", "--yes"), "only the Hub's repositories"),
        (("unpack", "b.ssd.tar", "--out", "."), "contains the current folder"),
        (("pack", "bundle", "--out", "bundle/b.ssd.tar"), "would lie in the bundle"),
        (("adopt", "bundle", "--model", "tuned", "--out", "model"), "--out: model exists and is not a bundle"),
    ],
)
def test_bad_input_is_one_line(room: Path, call: Within, arguments: tuple[str, ...], says: str) -> None:
    call(bundle_main, "pack", "bundle", "--out", "b.ssd.tar")
    before = sorted(path.name for path in room.iterdir())
    assert says in one_line(call(bundle_main, *arguments))
    assert sorted(path.name for path in room.iterdir()) == before
