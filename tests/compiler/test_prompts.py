from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from ssd_compiler.data.domains import packaged_prompts
from ssd_compiler.data.prompts import (
    OUT_OF_DOMAIN_PROMPTS,
    DomainPrompts,
    out_of_domain_prompts,
    read_pool,
    split_pool,
)
from ssd_compiler.settings import CompileSettings
from ssd_profiles.domain import domain_names, load_domain, starter_set
from ssd_profiles.errors import UserError
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.loading.models import load_model


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), "cpu")


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_compiler.data.domains.hub_reachable", lambda: False)


def own(tmp_path: Path, texts: list[str], **changes: int) -> CompileSettings:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    return CompileSettings("m", (), (("own", str(path)),), **changes)  # type: ignore[arg-type]


def parts(prompts: DomainPrompts) -> list[set[tuple[int, ...]]]:
    return [{tuple(ids) for ids in part} for part in (prompts.search, prompts.anchors, prompts.validation)]


@pytest.mark.parametrize("count", [6, 7, 20, 90])
def test_the_three_sets_never_overlap(
    loaded: LoadedModel, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimming = "{% for message in messages %}user: {{ message.content | trim }}{% endfor %}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", trimming)
    texts = [f"prompt {i}" for i in range(count)]
    settings = own(tmp_path, texts + texts + [f"{text}\n" for text in texts])
    sets = parts(split_pool(read_pool("own", settings, loaded, lambda _: None), settings))
    assert all(sets)
    assert sum(map(len, sets)) == len(set.union(*sets)) <= count


def test_the_search_gets_one_prompt_of_each_kind(loaded: LoadedModel, tmp_path: Path) -> None:
    """Three kinds of very different sizes; at random, two of the small ones would mostly be missed."""
    texts = [f"{'a' if i < 24 else 'b' if i < 27 else 'c'} {i}" for i in range(30)]
    kinds = {tuple(loaded.encode([("user", text)])): "abc".index(text[0]) for text in texts}

    def survey(prompts: list[list[int]]) -> list[dict[str, list[float]]]:
        return [{"last": [5.0 * (kinds[tuple(ids)] == kind) + 1e-3 * len(ids) for kind in range(3)]} for ids in prompts]

    settings = own(tmp_path, texts, search_prompts=3, validation_prompts=2)
    found = split_pool(read_pool("own", settings, loaded, lambda _: None), settings, survey)
    left = {kinds[tuple(ids)] for ids in found.search + found.anchors}
    assert {kinds[tuple(ids)] for ids in found.search} == left
    assert len(found.anchor_features) == len(found.anchors)
    assert not set(map(tuple, found.search)) & set(map(tuple, found.anchors))
    for ids, features in zip(found.anchors, found.anchor_features, strict=True):
        assert features == survey([ids])[0]


def test_too_few_or_too_long(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="5 different prompts"):
        read_pool("own", own(tmp_path, [f"p{i}" for i in range(5)] * 3), loaded, lambda _: None)
    with pytest.raises(UserError, match="9 different prompts, of which 0 fit"):
        read_pool("own", own(tmp_path, [f"{i} " + "long " * 600 for i in range(9)]), loaded, lambda _: None)


def test_data_sets_without_answers_show_the_packages_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library of data sets: rows as the Hub serves them."""
    rows = [
        {"db": f"d{i}", "question": f"Which {i}?", "translation": {"de": f"Satz {i}", "en": f"S {i}"}} for i in range(9)
    ]
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda *_, **__: iter(rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr("ssd_compiler.data.domains.hub_reachable", lambda: True)
    sql = packaged_prompts(load_domain("spider"), 4, pytest.fail)
    assert [record["question"] for _, record in sql] == [f"Which {i}?" for i in range(4)]
    assert starter_set("spider").shots[0]["sql"].strip() in sql[0][0]
    german = packaged_prompts(load_domain("wmt16"), 3, pytest.fail)
    assert [record["german"] for _, record in german] == ["Satz 5", "Satz 6", "Satz 7"]
    assert "English: S 4" in german[0][0]


def test_starter_prompts_come_with_a_warning(loaded: LoadedModel) -> None:
    warnings: list[str] = []
    settings = CompileSettings("m", ("gsm8k",))
    with pytest.raises(UserError, match="fit this model's context"):  # 512 tokens are too few for five shots
        read_pool("gsm8k", settings, loaded, warnings.append)
    assert len(warnings) == 1
    assert "starter prompts" in warnings[0]


def test_prompts_of_no_domain_are_of_every_other_packaged_one(loaded: LoadedModel) -> None:
    def of(name: str) -> list[list[int]]:
        return out_of_domain_prompts([other for other in domain_names() if other != name], loaded)

    alone = {name: of(name) for name in domain_names()}
    assert all(len(found) <= OUT_OF_DOMAIN_PROMPTS for found in alone.values())
    assert sum(map(len, alone.values())) > 4 * OUT_OF_DOMAIN_PROMPTS, "most fit this small model's context"
    assert out_of_domain_prompts(["cnn", "mine"], loaded) == [
        ids for name in domain_names() if name != "cnn" for ids in alone[name]
    ]
    assert out_of_domain_prompts(domain_names(), loaded) == []
