"""Whatever a bundle holds that loads: its page, its summary and its card can be made, and hold no escapes."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import SIGNATURE
from ssd_artifacts.sharing.privacy import stripped
from ssd_compiler.bundles.card import card_text
from ssd_compiler.bundles.difference import differences
from ssd_compiler.bundles.summary import summary_text
from ssd_compiler.report.html import html_report
from ssd_profiles.errors import UserError
from tests.bundles import bundle, exits, record
from tests.mutations import mutate

COUNT = int(os.environ.get("SSD_MUTATIONS", "100")) // 2


def test_a_mutated_bundle_that_loads_can_be_shown(tmp_path: Path) -> None:
    good = replace(bundle(), exits=exits())
    good.save(tmp_path / "good")
    shown = 0
    for seed in range(COUNT):
        folder = tmp_path / "mutated"
        shutil.copytree(tmp_path / "good", folder)
        mutate(folder, seed)
        try:
            found = Bundle.load(folder)
        except UserError:
            shutil.rmtree(folder)
            continue
        texts = (summary_text(found, folder), card_text(found, "hf://org/name"), *differences(good, found))
        assert all(line.isprintable() for text in texts for line in text.split("\n")), seed
        assert "<script" not in html_report(found)
        stripped(found).save(tmp_path / "stripped")
        Bundle.load(tmp_path / "stripped")
        shutil.rmtree(folder)
        shown += 1
    assert shown > COUNT // 5


def test_a_card_shows_names_as_they_are_written() -> None:
    """Nothing of a bundle is Markdown or HTML on the Hub's page."""
    evil = "[x](http://e) <img src=x> `|"
    model = bundle().model.model_copy(update={"architecture": evil, "dtype": evil, "name": evil})
    card = card_text(replace(bundle(), model=model, created=evil), "hf://org/name")
    prose = "\n".join(line for line in card.split("---\n", 2)[2].splitlines() if not line.startswith("    "))
    assert "<img" not in prose
    assert "[x](" not in prose
    [command] = [line for line in card.splitlines() if line.startswith("    ")]
    assert shlex.split(command)[4] == evil, "one word for a shell"


def test_a_card_names_a_model_of_the_hub_as_its_base() -> None:
    for name, base in (("demographics/model", True), ("/home/me/model", False), ("demo@wheel", False)):
        named = replace(bundle(), model=bundle().model.model_copy(update={"name": name}))
        assert (f"base_model: {name}" in card_text(named, "hf://org/name")) == base


def test_a_signature_that_nobody_verified_is_not_called_one(tmp_path: Path) -> None:
    bundle().save(tmp_path / "bundle")
    (tmp_path / "bundle" / SIGNATURE).write_text("anything")
    assert "signed    a signature is there, unverified;" in summary_text(bundle(), tmp_path / "bundle")


def test_a_stripped_bundle_differs_by_what_was_left_out() -> None:
    given = bundle()
    parts = [line.partition(":")[0] for line in differences(given, stripped(given))]
    assert parts == ["further prompts for later domains", "successors", "report.json"]


def test_bundles_that_differ_in_their_search_or_report_alone_differ() -> None:
    given = bundle(one=record("one", {(2, 3): 0.9}))
    one = given.domains["one"]
    searched = one.model_copy(update={"search": one.search.model_copy(update={"seconds": 1e3})})
    assert differences(given, replace(given, domains={"one": searched})) == ["one: another search"]
    assert differences(given, replace(given, report="{}")) == ["report.json: another one"]
    sample = replace(given, model=given.model.model_copy(update={"weights_sample_sha256": "9" * 64}))
    assert differences(given, sample) == ["model: other weights"]
    choice = one.choice.model_copy(update={"draft_length": 5, "threshold": 0.3})
    lines = differences(given, replace(given, domains={"one": one.model_copy(update={"choice": choice})}))
    assert lines[-2:] == ["one: draft_length 4 → 5", "one: threshold 0.0 → 0.3"]
    assert not differences(given, given)
