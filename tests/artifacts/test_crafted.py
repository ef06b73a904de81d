"""Bundles that agree with their manifest, but that no compile wrote: each is refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd_artifacts.bundle import Bundle
from ssd_profiles.errors import UserError
from tests.bundles import WIDTH, bundle, exits
from tests.damage import edit_manifest, edit_metadata, edit_tensors, edit_yaml, replace_text, rewrite
from tests.tables import DEVICE

ANCHORS, EXITS, SUCCESSORS = "anchors.safetensors", "exits.safetensors", "followers.safetensors"
ONE, LATENCY = "domains/one.yaml", f"latency/{DEVICE.slug()}.json"
HUGE = "9" * 400
DEEP = "[" * 100_000
Change = Callable[[Path], object]


def tensors(name: str, **changed: Any) -> Change:
    return lambda folder: edit_tensors(folder, name, **changed)


def anchors_about(**changed: Any) -> Change:
    about = {"feature": "mean", "domains": ["one", "two"], "threshold": 0.5}
    return lambda folder: edit_metadata(folder, ANCHORS, json.dumps(about | changed))


def exits_about(layers: Any) -> Change:
    return lambda folder: edit_metadata(folder, EXITS, json.dumps({"layers": layers}))


def metadata(name: str, text: str) -> Change:
    return lambda folder: edit_metadata(folder, name, text)


def text(name: str, old: str, new: str) -> Change:
    return lambda folder: replace_text(folder, name, old, new)


def manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: edit_manifest(folder, change)


def manifest_text(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        before = (folder / "manifest.yaml").read_text()
        assert old in before
        (folder / "manifest.yaml").write_text(before.replace(old, new, 1))

    return change


def domain(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: edit_yaml(folder, ONE, change)


def entry(**changed: Any) -> Change:
    return domain(lambda data: data["frontier"][0].update(changed))


def loads(*counts: int, speedup: float = 1.1) -> Change:
    figures = {"speedup": speedup, "speedup_interval": [1.0, 1.2], "identical": True}
    measured = [{"concurrency": count, **figures} for count in counts]
    return domain(lambda data: data["validation"].update(under_load=measured))


def exit_after(*stops: int) -> Change:
    figures = {"width": 4, "threshold": 0.5, "annealing": 0.0, "predicted_speedup": 1.2}
    return domain(lambda data: data.update(exit={"stops": list(stops), **figures}))


def table(**changed: Any) -> Change:
    def change(folder: Path) -> None:
        rewrite(folder, LATENCY, json.dumps(json.loads((folder / LATENCY).read_text()) | changed))

    return change


def link(folder: Path) -> None:
    (folder / "report.json").unlink()
    (folder / "report.json").symlink_to("/dev/zero")
    edit_manifest(folder, lambda data: data["files"]["report.json"].update(bytes=0))


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside.yaml"
    os.replace(folder / ONE, outside)
    (folder / ONE).symlink_to(outside)


def link_folder(folder: Path) -> None:
    os.replace(folder / "domains", folder.parent / "domains")
    (folder / "domains").symlink_to(folder.parent / "domains")


def link_manifest(folder: Path) -> None:
    (folder / "manifest.yaml").unlink()
    (folder / "manifest.yaml").symlink_to("/dev/zero")


def rename(folder: Path) -> None:
    """The file and the manifest say `three`, the record in the file says `one`."""
    os.replace(folder / ONE, folder / "domains/three.yaml")
    edit_manifest(folder, lambda data: data["files"].update({"domains/three.yaml": data["files"].pop(ONE)}))
    edit_manifest(folder, lambda data: data.update(domains=["three", "two"]))


def many_domains(data: dict[str, Any]) -> None:
    data["domains"] = [f"d{number}" for number in range(3000)]


SQUARE = np.zeros((2, WIDTH, WIDTH))
NO_MAPS = np.zeros((0, WIDTH, WIDTH), np.float16)
NO_LABELS = np.zeros(0, np.int64)
CASES: dict[str, tuple[Change, str]] = {
    "cycles without a draft": (
        domain(lambda data: data["frontier"][0]["steps"][0].__setitem__(0, 0.0)),
        "steps: expected 1 to 1 per cycle for draft length 1",
    ),
    # Tensors without dimensions, of other dtypes, shapes or values.
    "features 0-d": (tensors(ANCHORS, features=np.float32(1)), "anchors.*expected float vectors"),
    "features int64": (tensors(ANCHORS, features=np.eye(2, WIDTH, dtype=np.int64)), "anchors.*expected float vectors"),
    "labels float": (tensors(ANCHORS, labels=np.array([0.0, 1.0])), "anchors.*expected float vectors"),
    "features that overflow": (
        tensors(ANCHORS, features=np.full((2, WIDTH), 3e38, np.float32)),
        "anchors.*below 65504",
    ),
    "exits of another width than the anchors": (
        tensors(EXITS, weights=np.zeros((2, WIDTH - 1, WIDTH - 1), np.float16), biases=np.zeros((2, WIDTH - 1))),
        "exits.*expected float16 weights",
    ),
    "exits larger than any of so many layers": (
        tensors(EXITS, more=np.zeros(2 << 20, np.uint8)),
        "exits.*larger than",
    ),
    "weights float64": (tensors(EXITS, weights=SQUARE), "exits.*expected float16 weights"),
    "pairs float": (tensors(SUCCESSORS, pairs=np.ones((2, 2))), "successors.*expected int32"),
    # Metadata of the tensors.
    "anchors nested deeply": (metadata(ANCHORS, DEEP), "anchors.*recursion"),
    "an endless threshold": (
        metadata(ANCHORS, f'{{"feature": "mean", "domains": ["one"], "threshold": {HUGE}}}'),
        "anchors.*threshold",
    ),
    "exits behind a text": (exits_about("12"), "exits.*layers"),
    "exits of no layers": (
        lambda folder: (tensors(EXITS, weights=NO_MAPS, biases=NO_MAPS[:, 0])(folder), exits_about([])(folder)),
        "exits.*expected float16 weights",
    ),
    "anchors of no domain": (
        lambda folder: (
            tensors(ANCHORS, features=NO_MAPS[:, 0].astype(np.float32), labels=NO_LABELS)(folder),
            tensors(ANCHORS, others=NO_MAPS[:, 0], other_labels=NO_LABELS)(folder),
            anchors_about(domains=[])(folder),
        ),
        "anchors.*labels of each domain",
    ),
    "a domain without an anchor": (tensors(ANCHORS, labels=np.array([0, 0])), "anchors.*labels of each domain"),
    "an exit behind the last layer": (exits_about([1, 4]), "exits.*layers"),
    "anchors of a text": (anchors_about(domains="ab"), "anchors.*domains"),
    "anchors of an unknown domain": (anchors_about(domains=["one", "three"]), "anchors.*manifest"),
    "anchors by another feature": (anchors_about(feature=[]), "anchors.*feature"),
    # Numbers without end.
    "a format that is true": (manifest_text("format_version: 1", "format_version: true"), "format_version: .* integer"),
    "a format that nothing needs": (manifest_text("format_version: 1", "format_version: 2"), "expected 1, got 2"),
    "a key that is a date": (manifest_text("tool_version:", "2026-11-21:"), "holds a date"),
    "a hash of other letters": (manifest(lambda data: data["model"].update(config_sha256="C" * 64)), "config_sha256"),
    "an endless format": (manifest_text("format_version: 1", f"format_version: {HUGE}"), "bundle format 999"),
    "a format that cannot be printed": (manifest_text("format_version: 1", "format_version: 0x" + "f" * 5000), "YAML"),
    "a huge number in sixties": (text(ONE, "context: 300", "context: 1" + ":1" * 1_000_000), "YAML"),
    # Latency tables.
    "a table nested deeply": (lambda folder: rewrite(folder, LATENCY, DEEP), "recursion"),
    "a table of too few layers": (table(layer_kinds=["full"] * 3), "layer_kinds.*4 layers.*got 3"),
    "a table of another device than its name": (
        table(device=asdict(DEVICE) | {"threads": 3}),
        "expected the file to be named",
    ),
    "a table of a hundred kinds": (table(attention={f"k{n}": [[1e-3]] for n in range(100)}), "attention: .*at most 32"),
    "a table of a million contexts": (table(contexts=list(range(300_000))), "contexts"),
    "a table that is larger than a table": (lambda folder: rewrite(folder, LATENCY, " " * (5 << 20)), "at most 4 MiB"),
    "a table of a million sequences": (table(sequences=list(range(2, 300_000))), "sequences"),
    # Domains and names.
    "another name in the record": (domain(lambda data: data.update(name="two")), "one.yaml: name: expected one"),
    "another name of the file": (rename, "three.yaml: name: expected three"),
    "a domain twice": (manifest(lambda data: data["domains"].append("one")), "each domain once"),
    "thousands of domains": (manifest(many_domains), "domains"),
    "a domain outside": (manifest(lambda data: data["domains"].append("../one")), "domains.2"),
    "a file outside": (manifest(lambda data: data["files"].update({"../x": data["files"][ONE]})), "inside the bundle"),
    "a file that is a device": (link, "report.json: not a file"),
    "a manifest that is a device": (link_manifest, "manifest.yaml: not a file"),
    "a key of two lines": (manifest(lambda data: data.update({"a\nb": 1})), "a b: Extra inputs"),
    "a file of code": (manifest(lambda data: data["files"].update({"setup.py": data["files"][ONE]})), "inside the"),
    "two names that differ by case": (
        manifest(
            lambda data: data["files"].update(
                {"latency/A.json": data["files"][LATENCY]} | {"latency/a.json": data["files"][LATENCY]}
            )
        ),
        "files: expected names that differ",
    ),
    "endlessly large files": (
        manifest(lambda data: data["files"][ANCHORS].update(bytes=10**15)),
        "files: expected at most 8 GiB",
    ),
    "endlessly large texts": (
        manifest(lambda data: data["files"][ONE].update(bytes=10**9)),
        "files: expected at most 64 MiB of text",
    ),
    "thousands of tables": (
        manifest(lambda data: data["files"].update({f"latency/{n}.json": data["files"][LATENCY] for n in range(999)})),
        "files: expected at most 256 latency tables",
    ),
    "a link out of the bundle": (link_out, "one.yaml: not a file but a link out"),
    "a folder that is a link": (link_folder, "one.yaml: missing"),
    # Texts that a terminal would obey.
    "an escape in the model's name": (manifest(lambda data: data["model"].update(name="a\x1b]0;b\x07")), "model.name"),
    "an escape in a key": (manifest(lambda data: data.update({"a\x1b[2J": 1})), "a.?.2J: Extra inputs"),
    "a name that runs backwards": (manifest(lambda data: data["model"].update(name="a\u202eb")), "model.name"),
    "a name of a million letters": (manifest(lambda data: data["model"].update(name="a" * 2049)), "YAML|model.name"),
    # Records.
    "draft lengths unsorted": (entry(draft_lengths=[2, 1, 3, 4, 5, 6, 8, 10, 12, 16]), "draft_lengths: expected asc"),
    "more steps than drafts": (entry(steps=[[1.5] * 11] * 10), "steps: expected 1 to 1"),
    "a choice of no entry": (domain(lambda data: data["choice"].update(entry=7)), "choice.entry: 7"),
    "an endless acceptance": (
        domain(lambda data: data["validation"].update(mean_acceptance_length=1e308)),
        "mean_acceptance_length",
    ),
    "endlessly many sequences at once": (loads(10**9), "under_load.0.concurrency"),
    "the same load twice": (loads(2, 2), "under_load: expected ascending"),
    "a choice of another draft length": (
        domain(lambda data: data["choice"].update(draft_length=7)),
        "choice: expected a draft length.*acceptance profile",
    ),
    "exits in descending order": (exit_after(2, 1), "stops: expected layers in ascending order"),
    "an exit after the last layer": (exit_after(1, 4), "exit.stops: expected layers below 4, got 4"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "bundle"
    replace(bundle(), exits=exits()).save(folder)
    Bundle.load(folder)
    return folder


@pytest.fixture
def saved(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "bundle"))


@pytest.mark.parametrize("case", CASES)
def test_a_crafted_bundle_is_refused_in_one_line(saved: Path, case: str) -> None:
    craft, says = CASES[case]
    craft(saved)
    with pytest.raises(UserError, match=says) as error:
        Bundle.load(saved)
    message = str(error.value)
    assert message.startswith(str(saved))
    assert message.isprintable()
    assert len(message) < len(str(saved)) + 500
    assert "again" in message or "give the folder of a bundle" in message, "says what to do"
