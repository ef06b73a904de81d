"""Bundles on the Hub: its own client against a Hub on this machine, and against the client's cache alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import ORIGIN, SIGNATURE
from ssd_artifacts.sharing.signature import sign
from tests.bundles import bundle
from tests.commands import Done, command, one_line
from tests.damage import contents
from tests.hub import FakeHub, fake_hub
from tests.keys import key_pair

PLACE = "hf://org/bundle"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as found:
        yield found


def run(hub: FakeHub, room: Path, *arguments: str, offline: bool = False) -> Done:
    """Run ssd-bundle in a process of its own, since the client reads its settings when it is imported."""
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(room / "hf"),
        "HF_TOKEN": "hf_test",
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    room.mkdir(exist_ok=True)
    done = command(room, "ssd_compiler.bundles.cli", *arguments, **settings)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_a_bundle_goes_to_the_hub_and_comes_back(hub: FakeHub, saved: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "mine")
    sign(saved, private)
    pushed = run(hub, tmp_path, "push", str(saved), PLACE, "--yes")
    assert pushed.returncode == 0, pushed.stderr
    assert "followers.safetensors: 2 token pairs" in pushed.stdout, "what leaves is said"
    files = hub.repositories["org/bundle"][-1]
    card = files["README.md"].decode()
    assert "| one | 4 | 0.80 | 2.50 | 1.20x (1.10–1.30) | 3 | speculate |" in card
    assert "base_model: tiny" in card
    assert {name: content for name, content in files.items() if name != "README.md"} == contents(saved)

    pulled = run(hub, tmp_path, "pull", PLACE, "--out", str(tmp_path / "pulled"))
    assert pulled.returncode == 0, pulled.stderr
    found = contents(tmp_path / "pulled")
    assert hub.commit_id("org/bundle", 1) in found.pop(ORIGIN).decode()
    assert found.pop("report.html").startswith(b"<!doctype html>"), "made here"
    assert found == contents(saved)

    online = run(hub, tmp_path, "verify", PLACE, "--require-signature", str(public))
    assert online.returncode == 0, online.stderr
    offline = run(hub, tmp_path, "verify", PLACE, "--require-signature", str(public), offline=True)
    assert offline.returncode == 0, offline.stderr
    unknown = run(hub, tmp_path, "verify", "hf://org/other", offline=True)
    one_line(unknown)


def test_a_push_that_must_be_private_goes_to_no_public_repository(hub: FakeHub, saved: Path, tmp_path: Path) -> None:
    """The Hub takes no notice of the wish for a repository that is there, and the fake one's are all public."""
    done = run(hub, tmp_path, "push", str(saved), PLACE, "--private", "--yes")
    assert done.returncode == 2
    assert "org/bundle is there already, and public" in done.stderr
    assert hub.repositories["org/bundle"] == [{}]


def test_a_second_push_replaces_the_first_whole(hub: FakeHub, saved: Path, tmp_path: Path) -> None:
    run(hub, tmp_path, "push", str(saved), PLACE, "--yes")
    hub.repositories["org/bundle"][-1]["notes.txt"] = b"somebody's"
    bundle(one=bundle().domains["one"]).save(saved)
    stripped = run(hub, tmp_path, "push", str(saved), PLACE, "--yes", "--strip")
    assert stripped.returncode == 0, stripped.stderr
    assert "followers" not in stripped.stdout
    files = hub.repositories["org/bundle"][-1]
    assert "domains/two.yaml" not in files
    assert not {"followers.safetensors", "report.json"} & set(files)
    assert files["notes.txt"] == b"somebody's"
    run(hub, tmp_path, "pull", f"{PLACE}@main", "--out", str(tmp_path / "pulled"))
    assert set(Bundle.load(tmp_path / "pulled").domains) == {"one"}
    earlier = run(hub, tmp_path, "inspect", f"{PLACE}@{hub.commit_id('org/bundle', 1)}", "--json")
    assert [domain["domain"] for domain in json.loads(earlier.stdout)["domains"]] == ["one", "two"]


def test_a_file_larger_than_the_manifest_says_is_not_fetched(hub: FakeHub, saved: Path, tmp_path: Path) -> None:
    run(hub, tmp_path, "push", str(saved), PLACE, "--yes")
    hub.sizes["anchors.safetensors"] = 10**12
    refused = run(hub, tmp_path, "pull", PLACE, "--out", str(tmp_path / "pulled"))
    assert "anchors.safetensors has 1000000000000 bytes" in one_line(refused)
    assert not (tmp_path / "pulled").exists()


def test_a_repository_that_is_no_bundle_is_refused(hub: FakeHub, saved: Path, tmp_path: Path) -> None:
    run(hub, tmp_path, "push", str(saved), PLACE, "--yes")
    files = hub.repositories["org/bundle"][-1]
    whole = dict(files)
    files["setup.py"] = b"print('never fetched')"
    done = run(hub, tmp_path, "pull", PLACE, "--out", str(tmp_path / "unlisted"))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "unlisted" / "setup.py").exists()
    for name, content in (("anchors.safetensors", b"altered"), ("anchors.safetensors", None), ("manifest.yaml", None)):
        files.clear()
        files.update({each: held for each, held in (whole | {name: content}).items() if held is not None})
        refused = run(hub, tmp_path / f"{name} {content}", "pull", PLACE, "--out", str(tmp_path / "pulled"))
        assert PLACE in one_line(refused)
        assert not (tmp_path / "pulled").exists()


def test_a_push_that_is_not_confirmed_sends_nothing(hub: FakeHub, saved: Path, tmp_path: Path) -> None:
    asked = run(hub, tmp_path, "push", str(saved), PLACE)
    assert asked.returncode != 0
    assert hub.repositories == {}


def test_a_hub_that_is_not_there_is_one_line(saved: Path, tmp_path: Path) -> None:
    nowhere = FakeHub(url="http://127.0.0.1:9")
    for arguments in (["push", str(saved), PLACE, "--yes"], ["pull", PLACE, "--out", str(tmp_path / "pulled")]):
        done = run(nowhere, tmp_path, *arguments)
        assert PLACE in one_line(done)
    assert "the Hub cannot be reached, and manifest.yaml was not fetched before" in done.stderr
    assert not (saved / SIGNATURE).exists()
