from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssd_artifacts.bundle import Bundle, require_replaceable
from ssd_artifacts.integrity import read_manifest
from ssd_artifacts.successors import MOST_PAIRS, MOST_RANKS, SuccessorSet
from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from tests.bundles import LAYERS, bundle, fingerprint, light_record
from tests.damage import contents, edit_manifest, replace_text, rewrite, swap
from tests.tables import with_light_costs


def test_round_trip_is_byte_stable(saved: Path, tmp_path: Path) -> None:
    loaded = Bundle.load(saved)
    loaded.save(tmp_path / "again")
    assert contents(saved) == contents(tmp_path / "again")
    assert loaded.domains == bundle().domains
    assert loaded.model == fingerprint()
    assert loaded.report == '{"Ω": 1}'


@pytest.mark.parametrize("part", ["frontier", "rated", "latency"])
def test_a_bundle_with_anything_light_is_of_the_second_format(part: str, tmp_path: Path) -> None:
    given, mask = bundle(), SubLayerPlan.of(LAYERS, {2}).lightened(8)
    domain = given.domains["one"]
    if part == "frontier":
        given = bundle(one=light_record("one", {mask: 0.9}), two=given.domains["two"])
    elif part == "rated":
        cost = domain.search.model_copy(update={"rated": [(mask.hex(), "light", 1.1)]})
        given = bundle(one=domain.model_copy(update={"search": cost}), two=given.domains["two"])
    else:
        tables = {slug: with_light_costs(table, 0.5) for slug, table in given.latency.items()}
        given = replace(given, latency=tables)
    given.save(tmp_path / "light")
    assert (read_manifest(tmp_path / "light").format_version, bundle().format_version) == (2, 1)
    assert Bundle.load(tmp_path / "light").domains == given.domains


def test_a_field_under_both_names_is_refused(saved: Path) -> None:
    replace_text(saved, "domains/one.yaml", "oracle_speedup: 1.4", "oracle_speedup: 1.4\npotential: 1.3")
    with pytest.raises(UserError, match="potential"):
        Bundle.load(saved)


def test_a_bundle_may_be_moved_and_accompanied(saved: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(saved, moved)
    (moved / "README.md").write_text("beside")
    (moved / ".git").mkdir()
    (moved / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (moved / ".cache" / "huggingface").mkdir(parents=True)
    (moved / ".cache" / "huggingface" / "a.metadata").write_text("of the Hub's client")
    (moved / ".DS_Store").write_text("of a file manager")
    Bundle.load(moved)


def test_saving_replaces_a_bundle_whole(saved: Path) -> None:
    (saved / "stray.txt").write_text("gone afterwards")
    (saved / "README.md").write_text("the user's")
    bundle().save(saved)
    assert contents(saved)["README.md"] == b"the user's"
    assert "stray.txt" not in contents(saved)
    assert [p.name for p in saved.parent.iterdir()] == ["bundle"]


def test_a_failed_save_leaves_the_old_bundle(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(saved)

    def fail(*_: object) -> str:
        raise OSError("no space")

    monkeypatch.setattr("ssd_artifacts.bundle.sha256_file", fail)
    with pytest.raises(OSError, match="no space"):
        bundle().save(saved)
    assert contents(saved) == before
    assert [p.name for p in saved.parent.iterdir()] == ["bundle"]


def spoil_anchors(folder: Path, part: str) -> None:
    anchors = bundle().anchors
    values = getattr(anchors, part).copy()
    values.flat[0] = 99 if part == "labels" else np.nan
    swap(folder, "anchors.safetensors", replace(anchors, **{part: values}).to_bytes())


def spoil(folder: Path) -> None:
    """Change a byte of a domain's file and keep its size."""
    path = folder / "domains/one.yaml"
    path.write_bytes(b"#" + path.read_bytes()[1:])


def spoil_successors(folder: Path, *rows: list[int]) -> None:
    swap(folder, "followers.safetensors", SuccessorSet.of(rows).to_bytes())


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "no bundle there"),
    "empty": (lambda f: [shutil.rmtree(f), f.mkdir()], "manifest.yaml: cannot be read"),
    "file missing": (lambda f: (f / "domains/one.yaml").unlink(), r"one.yaml: missing"),
    "file altered": (spoil, r"one.yaml: altered: expected sha256 [0-9a-f]{12}…, got [0-9a-f]{12}…; copy it"),
    "file truncated": (
        lambda f: (f / "anchors.safetensors").write_bytes(b""),
        r"altered: expected \d+ bytes, got 0; copy it",
    ),
    "surplus file": (lambda f: (f / "extra.pkl").write_text("x"), r"extra.pkl: not listed"),
    "surplus file within": (
        lambda f: [(f / "latency/.cache").mkdir(), (f / "latency/.cache/x").write_text("x")],
        r"latency/.cache/x: not listed",
    ),
    "newer format": (lambda f: edit_manifest(f, lambda d: d.update(format_version=3)), "format 3"),
    "huge manifest": (lambda f: (f / "manifest.yaml").write_text("# " + "x" * (17 << 20)), "expected at most"),
    "deep manifest": (lambda f: (f / "manifest.yaml").write_text("[" * 5000), "not valid YAML"),
    "a year 0": (lambda f: (f / "manifest.yaml").write_text("created: 0000-00-00"), "not valid YAML"),
    "manifest not yaml": (lambda f: (f / "manifest.yaml").write_text("{"), "not valid YAML"),
    "python tag": (
        lambda f: (f / "manifest.yaml").write_text("!!python/object/apply:os.system ['true']"),
        "not valid YAML",
    ),
    "a tag that fits nothing": (lambda f: (f / "manifest.yaml").write_text("created: !!map [a]"), "tags are not"),
    "alias bomb": (lambda f: (f / "manifest.yaml").write_text("a: &a [1]\nb: *a\n"), "aliases"),
    "duplicate key": (lambda f: rewrite(f, "domains/one.yaml", "name: one\nname: two\n"), "twice"),
    "wrong record": (lambda f: rewrite(f, "domains/one.yaml", "name: one\n"), "one.yaml: context"),
    "long mask": (lambda f: replace_text(f, "domains/one.yaml", "mask: 3c", "mask: 3cff"), r"frontier\[0\]"),
    "bad latency": (lambda f: rewrite(f, next(f.glob("latency/*")).relative_to(f).as_posix(), "{}"), "latency"),
    "negative count": (
        lambda f: edit_manifest(f, lambda d: d["model"].update(num_layers=-3)),
        "num_layers",
    ),
    "anchors not a number": (lambda f: spoil_anchors(f, "features"), "damaged anchors"),
    "anchors of no domain": (lambda f: spoil_anchors(f, "labels"), "damaged anchors"),
    "bad successors": (lambda f: rewrite(f, "followers.safetensors", "nothing"), "damaged successors"),
    "successors that are no tokens": (lambda f: spoil_successors(f, [5, 6, -2, 3]), "damaged successors"),
    "too many successors": (lambda f: spoil_successors(f, *([5, 6, 7],) * (1 + MOST_PAIRS)), "damaged successors"),
    "too many ranks": (lambda f: spoil_successors(f, [5] * (3 + MOST_RANKS)), "damaged successors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_in_one_line(saved: Path, damage: str) -> None:
    break_it, says = DAMAGE[damage]
    break_it(saved)
    with pytest.raises(UserError, match=says) as error:
        Bundle.load(saved)
    assert "\n" not in str(error.value)
    assert str(saved) in str(error.value)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_ends_in_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed, cut or put in anywhere, with the manifest made to agree."""
    folder = tmp_path / f"bundle{data.draw(st.integers(0, 10**9))}"
    bundle().save(folder)
    name = data.draw(st.sampled_from(sorted(contents(folder))))
    content = (folder / name).read_bytes()
    at = data.draw(st.integers(0, len(content)))
    until = data.draw(st.integers(at, min(len(content), at + 20)))
    changed = content[:at] + data.draw(st.binary(max_size=8)) + content[until:]
    if name == "manifest.yaml":
        (folder / name).write_bytes(changed)
    else:
        swap(folder, name, changed)
    with suppress(UserError):  # which test_damage_is_refused_in_one_line looks at
        Bundle.load(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("part", ["config", "tokenizer", "weights_sample"])
def test_another_model_is_refused(part: str) -> None:
    other = fingerprint(**{f"{part}_sha256": "e" * 64})
    with pytest.raises(UserError, match=part.removesuffix("_sample")):
        fingerprint().require_same_model(other, "bundle")
    fingerprint().require_same_model(fingerprint(), "bundle")
    assert not fingerprint().serves(other)
    assert not fingerprint().serves(fingerprint().model_copy(update={"num_layers": LAYERS + 1}))
    assert fingerprint().serves(fingerprint())


@pytest.mark.parametrize(
    ("name", "revision", "spec"),
    [("org/m", "abc", "org/m@abc"), ("org/m", None, "org/m"), ("demo@wheel", "1.0", "demo@wheel")],
)
def test_a_bundle_names_the_revision_of_a_model_on_the_hub(name: str, revision: str | None, spec: str) -> None:
    assert fingerprint().model_copy(update={"name": name, "revision": revision}).spec("bundle") == spec


def test_a_dense_models_bundle_serves_the_packed_one_and_no_other_model() -> None:
    packed = {"quantization": "gguf Q4_1+Q8_0", "weights_sample_sha256": "e" * 64}
    for config, fits in (("c" * 64, nullcontext()), ("e" * 64, pytest.raises(UserError, match="config"))):
        other = fingerprint(config_sha256=config).model_copy(update=packed)
        with fits:
            fingerprint().require_same_model(other, "bundle")


def test_a_bundle_may_be_replaced_even_a_damaged_or_newer_one(saved: Path, tmp_path: Path) -> None:
    require_replaceable(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    require_replaceable(tmp_path / "empty")
    (saved / "README.md").write_text("stays")
    require_replaceable(saved)
    (saved / "anchors.safetensors").unlink()
    edit_manifest(saved, lambda data: data.update(format_version=9))
    require_replaceable(saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "deploy.yaml").write_text("precious"), "holds deploy.yaml, which is not"),
        (lambda folder: (folder / ".git").mkdir(), "is a repository"),
        (lambda folder: (folder / "manifest.yaml").write_text("kind: Deployment"), "is not a bundle"),
        (lambda folder: (folder / "manifest.yaml").write_text("{"), "is not a bundle"),
        (lambda folder: (folder / "manifest.yaml").unlink(), "is not a bundle"),
    ],
)
def test_what_is_not_a_bundles_is_never_replaced(saved: Path, change: Callable[[Path], object], says: str) -> None:
    change(saved)
    with pytest.raises(UserError, match=says):
        require_replaceable(saved)
